"""What a cut left, looked at through a real mount."""

from __future__ import annotations

import os
import stat
from collections import defaultdict

from tests.crash.cuts import Cut, fsck
from tests.crash.history import History
from tests.crash.model import Seen, View
from tests.support.encrypted import KEY
from tests.support.mounter import Mounter


def check_mounted(history: History, cut: Cut, mounter: Mounter) -> None:
    """After a power cut, which takes the tmpfs. Raises AssertionError."""
    _, image = cut.happens()
    mounter.image.write_bytes(image)
    key = mounter.directory / "key"
    key.touch(0o600)
    key.write_bytes(KEY)
    is_encrypted = history.encryption is not None
    mounter.mount("--no-reclaim", *(["--key-file", str(key)] if is_encrypted else []))
    try:
        view = view_at(os.fsencode(mounter.mountpoint))
    finally:
        mounter.umount()
    history.matching(view, cut.after_power_cut)
    fsck(bytearray(mounter.image.read_bytes()))


def view_at(root: bytes) -> View:
    """The same of a tree of files as of a store, by system calls alone."""
    paths: dict[int, list[bytes]] = defaultdict(list)
    todo = [b""]
    for path in todo:
        status = os.lstat(root + path)
        paths[status.st_ino].append(path)
        if stat.S_ISDIR(status.st_mode):
            todo += [path + b"/" + name for name in os.listdir(root + path)]
    return {path: _seen_at(root + path, min(same)) for same in paths.values() for path in same}


def _seen_at(path: bytes, same_as: bytes) -> Seen:
    status = os.lstat(path)
    names = sorted(map(os.fsencode, os.listxattr(path, follow_symlinks=False)))
    xattrs = tuple((name, os.getxattr(path, name, follow_symlinks=False)) for name in names)
    if stat.S_ISLNK(status.st_mode):
        data = os.readlink(path)
    elif stat.S_ISREG(status.st_mode):
        with open(path, "rb") as file:
            data = file.read()
    else:
        data = b""
    return Seen(status.st_mode, status.st_nlink, len(data), data, xattrs, same_as)
