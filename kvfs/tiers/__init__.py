"""Where bytes are while they are not only on the device."""
