"""The POSIX face: the only part that knows FUSE."""
