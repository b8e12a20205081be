"""Bytes on the device: usable alone, without FUSE, torch or the command."""
