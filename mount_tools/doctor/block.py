"""The disks that a ring lies on, through images, loop devices, dm and partitions."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mount_tools.doctor.check import Check, Question, Status
from mount_tools.doctor.mountinfo import Filesystem, filesystem_of
from mount_tools.doctor.system import System

_DEPTH_MAX = 16
_CLASS = "/sys/class/block"


@dataclass(frozen=True, slots=True)
class Below:
    """What lies below a ring: disks by their names in /sys/block, and the filesystems with the
    images on the way to them."""

    disks: tuple[str, ...]
    filesystems: tuple[Filesystem, ...]


def below(system: System, source: Path) -> Below:
    """A block device or an image file, which need not exist any more."""
    disks: dict[str, None] = {}
    filesystems: dict[Filesystem, None] = {}
    for disk, through in _walk(system, source, 0):
        disks |= dict.fromkeys([disk] if disk else [])
        filesystems |= dict.fromkeys(through)
    return Below(tuple(disks), tuple(filesystems))


def _walk(
    system: System, source: Path, depth: int
) -> Iterator[tuple[str | None, tuple[Filesystem, ...]]]:
    name = _block_name(system, source)
    if name is not None:
        yield from _walk_block(system, name, (), depth)
        return
    filesystem = filesystem_of(system, system.real(source))
    if filesystem is None:
        yield None, ()
        return
    name = _block_name_of(system, filesystem)
    if name is None:
        yield None, (filesystem,)
    else:
        yield from _walk_block(system, name, (filesystem,), depth)


def _walk_block(
    system: System, name: str, through: tuple[Filesystem, ...], depth: int
) -> Iterator[tuple[str | None, tuple[Filesystem, ...]]]:
    place = f"{_CLASS}/{name}"
    if depth > _DEPTH_MAX:
        yield name, through
        return
    if system.exists(f"{place}/partition"):
        whole = system.real(place).parent.name
        yield from _walk_block(system, whole, through, depth + 1)
        return
    backing = system.text(f"{place}/loop/backing_file")
    if backing is not None:
        for disk, more in _walk(system, Path(backing), depth + 1):
            yield disk, through + more
        return
    parts = system.names(f"{place}/slaves")
    if not parts:
        yield name, through
    for part in parts:
        yield from _walk_block(system, part, through, depth + 1)


def _block_name(system: System, path: Path) -> str | None:
    """As /sys/class/block has it; None for what is no block device."""
    real = system.real(path)
    if real.is_relative_to("/dev") and system.exists(f"{_CLASS}/{real.name}"):
        return real.name
    try:
        status = os.stat(system.path(real))
    except OSError:
        return None
    if not stat.S_ISBLK(status.st_mode):
        return None
    return _name_by_number(system, f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}")


def _block_name_of(system: System, filesystem: Filesystem) -> str | None:
    """Filesystems over several devices have a number of their own, and name one of these."""
    name = _name_by_number(system, filesystem.device)
    if name is None and filesystem.source.startswith("/dev/"):
        name = _block_name(system, Path(filesystem.source))
    return name


def _name_by_number(system: System, number: str) -> str | None:
    place = f"/sys/dev/block/{number}"
    return system.real(place).name if system.exists(place) else None


# -- the questions


_FOUND = Question(
    "device", "disk", "a disk of this machine", "what it can do bounds saving and resuming"
)
_FILESYSTEM = Question(
    "device",
    "filesystem of the image",
    "ext4 or xfs, or a whole device",
    "the ring is written in place below its own log",
)
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_COPIES = ("btrfs", "zfs", "bcachefs", "overlay", "nilfs2", "f2fs")
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "virtiofs", "lustre")


def checks(system: System, source: Path) -> Iterator[Check]:
    """Of a device, or of the image file at that path and what is below it."""
    found = below(system, source)
    for filesystem in found.filesystems:
        yield _filesystem(filesystem)
    if not found.disks and not found.filesystems:
        yield _FOUND.unknown(f"nothing in /proc and /sys tells what {source} lies on", "lsblk -s")
    for disk in found.disks:
        yield from disk_checks(system, disk)


def _filesystem(filesystem: Filesystem) -> Check:
    found = f"{filesystem.kind} on {filesystem.mountpoint} ({filesystem.source})"
    if filesystem.kind in _IN_MEMORY:
        why = f"{found}: in memory, gone at a reboot"
        return _FILESYSTEM.bad(Status.WARNING, why, "kvfs mkfs IMAGE (on a disk)")
    if filesystem.kind in _COPIES:
        why = f"{found}: it writes elsewhere each time, below a ring that does so already"
        command = "chattr +C DIRECTORY (btrfs, before the image is made); else another filesystem"
        return _FILESYSTEM.bad(Status.ADVICE, why, command)
    if filesystem.kind in _REMOTE:
        why = f"{found}: another machine's, whose disk cannot be seen from here"
        return _FILESYSTEM.unknown(why)
    return _FILESYSTEM.ok(found)


def disk_checks(system: System, disk: str) -> Iterator[Check]:
    """`disk` by its name in /sys/block."""
    queue = f"/sys/block/{disk}/queue"

    def ask(name: str, wanted: str, why: str, command: str | None = None) -> Question:
        return Question(f"device {disk}", name, wanted, why, command)

    yield _scheduler(
        system.text(f"{queue}/scheduler"),
        ask(
            "scheduler",
            "none (or mq-deadline)",
            "KVFS sorts its reads and bounds its writes itself; another queue only delays them",
            f"echo none > {queue}/scheduler",
        ),
    )
    yield _depth(
        system.number(f"{queue}/nr_requests"),
        system.number(f"/sys/block/{disk}/device/queue_depth"),
        ask(
            "queue depth",
            "64 or more",
            "eight reads of 1 MiB, which the kernel may split, and up to 64 small ones at once",
            f"echo 256 > {queue}/nr_requests",
        ),
    )
    yield _request_size(
        system.number(f"{queue}/max_sectors_kb"),
        system.number(f"{queue}/max_hw_sectors_kb"),
        ask(
            "largest request",
            "1024 KiB, or what the hardware takes",
            "a read of the ring is up to 1 MiB; smaller requests are more work for the same bytes",
            f"echo 1024 > {queue}/max_sectors_kb",
        ),
    )
    yield _write_cache(
        system, disk,
        ask(
            "write cache",
            "as the device says",
            "an fsync holds through a power cut only if flushes reach a cache that forgets",
            f"echo 'write back' > {queue}/write_cache",
        ),
    )  # fmt: skip
    yield _rotational(
        system.number(f"{queue}/rotational"),
        disk,
        ask(
            "rotational",
            "0: an SSD",
            "a ring is read at random; a disk that turns takes 10 ms for what takes 0.1",
        ),
    )
    yield _discard(
        system.number(f"{queue}/discard_max_bytes"),
        ask(
            "discard",
            "possible",
            "an SSD that knows which blocks are free wears less: give it the whole device before "
            "mkfs (blkdiscard DEV, which loses what is on it); KVFS itself discards nothing",
            "leave a tenth of the device unpartitioned",
        ),
    )


def _scheduler(text: str | None, question: Question) -> Check:
    """`[mq-deadline] kyber none`: the one in brackets is in use."""
    if text is None:
        return question.unknown("the kernel does not tell")
    chosen = next((word[1:-1] for word in text.split() if word.startswith("[")), text.strip())
    good = chosen in ("none", "noop", "mq-deadline")
    return question.judged(chosen, good=good, otherwise=Status.ADVICE)


def _depth(requests: int | None, commands: int | None, question: Question) -> Check:
    """Requests that the kernel queues; a SCSI or SATA disk takes fewer commands itself."""
    if requests is None:
        return question.unknown("the kernel does not tell")
    of_device = "" if commands is None else f", {commands} commands in the disk"
    good = requests >= 64
    return question.judged(f"{requests} requests{of_device}", good=good, otherwise=Status.ADVICE)


def _request_size(soft_kib: int | None, hard_kib: int | None, question: Question) -> Check:
    if soft_kib is None:
        return question.unknown("the kernel does not tell")
    good = soft_kib >= min(1024, hard_kib or 1024)
    return question.judged(f"{soft_kib} KiB", good=good, otherwise=Status.ADVICE)


def _write_cache(system: System, disk: str, question: Question) -> Check:
    """Where the kernel believes that there is no cache that forgets, it sends no flushes. A SCSI
    disk (and SATA) tells what it has in its `cache_type`."""
    believed = system.text(f"/sys/block/{disk}/queue/write_cache")
    if believed is None:
        return question.unknown("the kernel does not tell", f"nvme get-feature /dev/{disk} -f 6 -H")
    if believed == "write back":
        return question.ok("write back: an fsync flushes it")
    place = f"/sys/block/{disk}/device/scsi_disk"
    types = [system.text(f"{place}/{name}/cache_type") for name in system.names(place)]
    if "write back" in types:
        found = "taken for write through, but the disk has a cache that forgets"
        return question.bad(Status.WARNING, found)
    return question.ok("write through: nothing to be flushed")


def _rotational(value: int | None, disk: str, question: Question) -> Check:
    if value is None:
        return question.unknown("the kernel does not tell")
    if value == 0:
        return question.ok("0")
    if disk.startswith(("vd", "xvd")):
        command = f"echo 0 > /sys/block/{disk}/queue/rotational"
        found = "1, as hypervisors often say of SSDs too: ask whose disk it is"
        return question.bad(Status.ADVICE, found, command)
    return question.bad(Status.WARNING, "1")


def _discard(value: int | None, question: Question) -> Check:
    if value is None:
        return question.unknown("the kernel does not tell")
    found = "possible" if value else "not possible"
    return question.judged(found, good=value > 0, otherwise=Status.ADVICE)
