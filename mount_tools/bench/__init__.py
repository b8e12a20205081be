"""`kvfs bench`: what a user of a mount gets, beside its device."""

from mount_tools.bench.verb import bench

__all__ = ["bench"]
