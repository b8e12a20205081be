"""The kernel, and what of it a container may use."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator

from kvfs.mount.uring import open_ring
from mount_tools.doctor.check import Check, Question, Status
from mount_tools.doctor.system import System

_VERSION_MIN = (5, 15)
_VERSION = Question(
    "kernel",
    "version",
    "5.15 or newer",
    "what KVFS asks of FUSE and io_uring is tried on these",
)
_URING = Question(
    "kernel",
    "io_uring",
    "allowed",
    "reads of the device up to 256 KiB go without a thread, which costs 60 us and more each",
    "sysctl -w kernel.io_uring_disabled=0",
)
_DISABLED = "/proc/sys/kernel/io_uring_disabled"
_ALLOWED_IN_CONTAINER = (
    "allow io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp profile"
)


def checks(system: System) -> Iterator[Check]:
    yield _version(system)
    yield _uring(system)


def _version(system: System) -> Check:
    release = system.text("/proc/sys/kernel/osrelease")
    numbers = re.match(r"(\d+)\.(\d+)", release or "")
    if release is None or numbers is None:
        return _VERSION.unknown("/proc/sys/kernel/osrelease cannot be read", "uname -r")
    good = (int(numbers[1]), int(numbers[2])) >= _VERSION_MIN
    return _VERSION.judged(release, good=good, otherwise=Status.WARNING)


def _uring(system: System) -> Check:
    """By what the kernel says. Here it is tried as well: what a container forbids is in no file."""
    disabled = system.number(_DISABLED)
    if disabled == 2 or (disabled == 1 and os.geteuid() != 0):
        who = "everybody" if disabled == 2 else "users outside kernel.io_uring_group"
        return _URING.bad(Status.ADVICE, f"switched off for {who}")
    if system.is_this_machine:
        if platform.machine() != "x86_64":
            return _URING.unknown("not used: KVFS uses it on x86_64 alone")
        if open_ring() is None:
            return _URING.bad(Status.ADVICE, "refused", _ALLOWED_IN_CONTAINER)
        return _URING.ok("works")
    if disabled is None:
        return _URING.unknown(f"{_DISABLED} is not there (it came with Linux 6.6)")
    return _URING.ok("not switched off")
