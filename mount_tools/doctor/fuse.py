"""Whether FUSE can be used, and how much it carries at once."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from mount_tools.doctor.check import Check, Question, Status
from mount_tools.doctor.system import System

_MODULE = Question(
    "FUSE", "module", "in the kernel", "a mount is a FUSE filesystem", "modprobe fuse"
)
_DEVICE = Question(
    "FUSE",
    "/dev/fuse",
    "may be read and written",
    "requests of the kernel come from there",
    "chmod 666 /dev/fuse (a container: --device /dev/fuse --cap-add SYS_ADMIN)",
)
_PROGRAM = Question(
    "FUSE",
    "fusermount3",
    "installed, and setuid root where users mount",
    "it mounts and unmounts",
    "apt-get install fuse3",
)
_OTHERS = Question(
    "FUSE",
    "user_allow_other",
    "a line in /etc/fuse.conf, or mounts by root",
    "without it -o allow_other is root's alone, and agents of other users see no mount of yours",
    "echo user_allow_other >> /etc/fuse.conf",
)
_PAGES_WANTED = 256
_PAGES = Question(
    "FUSE",
    "max_pages_limit",
    f"{_PAGES_WANTED} or more",
    "a request carries 1 MiB then; a smaller one costs as much time",
    f"sysctl -w fs.fuse.max_pages_limit={_PAGES_WANTED}",
)
_BACKGROUND_WANTED = 512
_BACKGROUND = Question(
    "FUSE",
    "max_user_bgreq",
    f"0 (by memory), or {_BACKGROUND_WANTED} or more",
    "so many reads ahead, and answers to asynchronous I/O, may be under way on mounts of users",
    f"echo {_BACKGROUND_WANTED} > /sys/module/fuse/parameters/max_user_bgreq",
)


def checks(system: System) -> Iterator[Check]:
    yield _module(system)
    yield _device(system)
    yield _program(system)
    yield _others(system)
    yield _pages(system)
    yield _background(system)


def _module(system: System) -> Check:
    known = system.text("/proc/filesystems")
    if known is None:
        return _MODULE.unknown("/proc/filesystems cannot be read")
    good = "fuse" in (line.split("\t")[-1] for line in known.splitlines())
    return _MODULE.judged("there" if good else "missing", good=good, otherwise=Status.ERROR)


def _device(system: System) -> Check:
    if not system.exists("/dev/fuse"):
        return _DEVICE.bad(Status.ERROR, "missing")
    good = system.may_write("/dev/fuse")
    found = "may be used" if good else "permission denied"
    return _DEVICE.judged(found, good=good, otherwise=Status.ERROR)


def _program(system: System) -> Check:
    program = system.program("fusermount3")
    if program is None:
        return _PROGRAM.bad(Status.ERROR, "missing")
    if os.geteuid() == 0 or program.stat().st_mode & stat.S_ISUID:
        return _PROGRAM.ok("there")
    return _PROGRAM.bad(Status.ERROR, f"{program} is not setuid root", f"chmod u+s {program}")


def _others(system: System) -> Check:
    if os.geteuid() == 0:
        return _OTHERS.ok("not needed: this is root")
    config = system.text("/etc/fuse.conf")
    if config is None:
        return _OTHERS.bad(Status.ADVICE, "/etc/fuse.conf cannot be read")
    good = "user_allow_other" in map(str.strip, config.splitlines())
    return _OTHERS.judged("set" if good else "not set", good=good, otherwise=Status.ADVICE)


def _pages(system: System) -> Check:
    limit = system.number("/proc/sys/fs/fuse/max_pages_limit")
    if limit is None:
        return _PAGES.unknown("not told: kernels before 6.13 have 256, which cannot be changed")
    found = f"{limit} ({limit * 4} KiB)"
    return _PAGES.judged(found, good=limit >= _PAGES_WANTED, otherwise=Status.WARNING)


def _background(system: System) -> Check:
    limit = system.number("/sys/module/fuse/parameters/max_user_bgreq")
    if limit is None:
        return _BACKGROUND.unknown("/sys/module/fuse/parameters/max_user_bgreq cannot be read")
    good = limit == 0 or limit >= _BACKGROUND_WANTED
    return _BACKGROUND.judged(str(limit), good=good, otherwise=Status.ADVICE)
