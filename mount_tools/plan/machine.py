"""What this machine, a mount or a device has for KV, and how fast it is."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from kvfs.engine.format import DATA_START
from kvfs.engine.ring import Geometry
from kvfs.engine.space import capacity, longest_extent
from kvfs.mount.backing import backing_file
from kvfs.mount.memory import warm_limit
from kvfs.mount.mounts import containing_mount
from kvfs.tiers.profiles import Profile
from mount_tools.common import CommandError, format_size
from mount_tools.doctor import gpu
from mount_tools.doctor.measure import measured_copy, measured_reads
from mount_tools.doctor.system import System
from mount_tools.mkfs import fitting_segment_size
from mount_tools.mountpoints import answered, read_stats

WARM_DIRECTORY = Path("/dev/shm")
ADAPTER_BUDGET = 128 * 1024**2
"""Hot memory of a process that names none (docs/adapter.md)."""
_COPY_SHARE = 0.85
"""Of a memcpy: what loading a warm session reaches (docs/adapter.md, Measured)."""
_GPU_SHARE = 0.9
"""Of a GPU's memory: the rest is for activations, as engines have it by default."""
_PAYLOAD_MIN = 1024**3


@dataclass(frozen=True, slots=True)
class Found:
    """A number and where it is from, for people."""

    value: float | None
    source: str

    @property
    def size(self) -> int | None:
        return None if self.value is None else int(self.value)


@dataclass(frozen=True, slots=True)
class Place:
    """A mount or a device as the plan's cold tier. `cold` is what a ring takes there; `warm` and
    `write_amplification` are known of a mount alone."""

    cold: Found
    source: Path | None = None
    warm: Found | None = None
    write_amplification: Found | None = None


def hot_memory(system: System, wanted: int | None, weights: int) -> Found:
    """In bytes, after the model's weights."""
    if wanted is not None:
        return Found(wanted, "as given")
    found = gpu.gpus(system)
    if not found:
        return Found(ADAPTER_BUDGET, "no GPU seen: the adapter's default for a process")
    total = sum(each.total for each in found)
    left = max(0, int(total * _GPU_SHARE) - weights)
    less = f", less {format_size(weights)} of weights" if weights else ""
    return Found(left, f"{_GPU_SHARE:.0%} of {len(found)} x {found[0].name}{less}")


def weights_of(model: Path | None) -> int:
    """Bytes of the weights beside a config.json; 0 where there are none."""
    folder = model if model is not None and model.is_dir() else model and model.parent
    files = [] if folder is None else [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)


def warm_memory(wanted: int | None, place: Place) -> Found:
    """As a mount would choose it; filled up to the profile's level."""
    fill = Profile().warm_fill_pct / 100
    if wanted is not None:
        return Found(wanted * fill, f"as given, filled to {fill:.0%}")
    if place.warm is not None:
        return place.warm
    try:
        limit = warm_limit(WARM_DIRECTORY / "kvfs-plan", WARM_DIRECTORY, None)
    except OSError:
        return Found(None, f"{WARM_DIRECTORY} cannot be asked: give --warm SIZE")
    return Found(limit * fill, f"as a mount would choose, filled to {fill:.0%}")


def place_of(path: Path) -> Place:
    """Raises CommandError for what is neither a mount nor a device or image."""
    mount = containing_mount(path)
    if mount is not None:
        return _place_of_mount(mount.mountpoint)
    try:
        status = answered(path, path.stat)
    except FileNotFoundError:
        raise CommandError(
            f"{path} does not exist: name a mount, a device or an image, or give --ring SIZE"
        ) from None
    if stat.S_ISREG(status.st_mode):
        return Place(ring_of(status.st_size), path)
    if stat.S_ISBLK(status.st_mode):
        return Place(ring_of(_device_size(path)), path)
    raise CommandError(f"{path} is neither a mounted KVFS nor a block device or image")


def ring_of(size: int) -> Found:
    """What a ring on a device of that size takes, as mkfs would make it."""
    segment = fitting_segment_size(size)
    geometry = Geometry(segment, max(0, size - DATA_START) // segment)
    room = max(0, capacity(geometry, longest_extent(segment, encrypted=False)))
    return Found(room, f"a ring on {format_size(size)}")


def _device_size(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.lseek(fd, 0, os.SEEK_END)
    finally:
        os.close(fd)


def _place_of_mount(mountpoint: Path) -> Place:
    stats = read_stats(mountpoint)
    counters, fill = stats.document["counters"], Profile().warm_fill_pct / 100
    payload, written = counters["payload_written"], counters["device_written"]
    measured = None
    if payload >= _PAYLOAD_MIN:
        text = f"measured by {mountpoint} on {format_size(payload)}"
        measured = Found(max(1.0, written / payload), text)
    return Place(
        cold=Found(stats.total, f"the ring of {mountpoint}"),
        source=stats.source,
        warm=Found(
            stats.document["warm"]["limit"] * fill, f"the limit of {mountpoint}, to {fill:.0%}"
        ),
        write_amplification=measured,
    )


# -- speed


def warm_speed() -> Found:
    """Bytes a second at which a warm session is loaded."""
    speed = _COPY_SHARE * measured_copy()
    return Found(speed, f"{_COPY_SHARE:.0%} of a copy by one thread, measured now")


def cold_speed(wanted: int | None, source: Path | None) -> Found:
    """Bytes a second at which the device is read."""
    if wanted is not None:
        return Found(wanted, "as given")
    if source is None:
        return Found(None, "no device named: give MNT or DEV by --on, or --bandwidth")
    speed = answered(source, lambda: measured_reads(backing_file(source) or source))
    if speed is None:
        return Found(
            None,
            f"{source} cannot be measured (no right to read it, or most of it was never "
            f"written): give --bandwidth",
        )
    return Found(speed, f"random reads of 1 MiB of {source}, measured now in less than a second")
