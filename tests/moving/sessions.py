"""Sessions to be moved, and what has to be the same of them wherever they are."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random

from mount_tools.moving.entries import KNOWN_CONTENT
from mount_tools.moving.places import target_at
from mount_tools.moving.receiving import Received, receive
from mount_tools.moving.sending import Sent, send
from mount_tools.moving.stream import StreamWriter
from tests.support.manifest import of_mount

ROW = 2 * 2 * 16 * 2
BLOCK = 128 * 1024


def silent(size: int | None) -> Callable[[int], None]:
    """No bar."""
    return lambda count: None


def make_session(path: Path, tokens: int = 3000, layers: int = 3, seed: int = 0) -> Path:
    """As the adapter makes it, in bf16: `tokens` rows of 128 bytes a layer."""
    random = Random(seed)
    path.mkdir(mode=0o700)
    os.setxattr(path, "user.kvfs.model", b"a model 3x2x16 bfloat16 NHD #0")
    (path / "session.json").write_text(json.dumps({"version": 1, "rounds": [tokens]}))
    _file(path / "tokens", random.randbytes(4 * tokens), b"int32", b"1")
    for layer in range(layers):
        _file(path / f"layer.{layer:03d}", random.randbytes(ROW * tokens), b"bfloat16", b"2,2,16")
    return path


def make_tree(path: Path) -> Path:
    """All that a directory of an engine may hold: directories, links, holes, strange names."""
    make_session(path, tokens=500)
    (path / "empty").touch(mode=0o640)
    below = path / "below" / "and below"
    below.mkdir(parents=True)
    (below / os.fsdecode(b"no utf-8 \xff\xfe")).write_bytes(b"\0" * 10 + b"x")
    (below / ("n" * 255)).write_text("long")
    os.symlink("../layer.000", path / "below" / "link")
    os.link(path / "layer.001", path / "below" / "second name")
    with (path / "sparse").open("wb") as file:
        file.seek(1 << 26)
        file.write(b"end")
        file.truncate((1 << 26) + 5 * BLOCK + 1)
    os.setxattr(path / "empty", "user.any", bytes(range(256)))
    os.setxattr(path / "empty", "user.a=b%c", b"=%\n")
    os.setxattr(below, "user.kvfs.codec", b"zstd")
    os.setxattr(path, "user.kvfs.ttl", b"1000000")
    os.utime(path / "empty", ns=(1, 1_700_000_000_123_456_789))
    os.utime(path / "tokens", ns=(1, -1_500_000_001))
    below.chmod(0o555)
    return path


def _file(path: Path, data: bytes, dtype: bytes, shape: bytes) -> None:
    path.touch()
    os.setxattr(path, "user.kvfs.dtype", dtype)
    os.setxattr(path, "user.kvfs.shape", shape)
    path.write_bytes(data)


def shown(session: Path) -> tuple[object, ...]:
    """All that moves of a session."""
    status = session.stat()
    xattrs = {
        name: os.getxattr(session, name)
        for name in os.listxattr(session)
        if os.fsencode(name) != KNOWN_CONTENT
    }
    return status.st_mode, status.st_mtime_ns, xattrs, of_mount(session)


def move(
    session: Path, target: Path, *, since: Path | None = None, base: Path | None = None,
    compress: bool = False, replace: bool = False,
) -> tuple[Sent, Received]:  # fmt: skip
    """By a pipe, in this process."""
    read_end, write_end = os.pipe()
    sent: list[Sent] = []

    def work() -> None:
        try:
            writer = StreamWriter(write_end, compress=compress)
            sent.append(send(session, since, writer, silent))
        finally:
            os.close(write_end)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        received = receive(read_end, target, base, silent, replace=replace)
    finally:
        os.close(read_end)
        thread.join()
    return sent[0], received


def fork(session: Path, name: str) -> Path:
    os.setxattr(session, "user.kvfs.fork", name.encode())
    return session.with_name(name)


def receive_bytes(
    target: Path, stream: bytes, *, base: Path | None = None, force: bool = False
) -> Received:
    """As the command does, in this process."""
    fd = os.memfd_create("stream")
    try:
        with open(fd, "r+b", closefd=False) as file:
            file.write(stream)
            file.seek(0)
        return receive(fd, target_at(target, force=force), base, silent, replace=force)
    finally:
        os.close(fd)


def stream_of(session: Path, since: Path | None = None) -> bytes:
    """What the command would write."""
    with tempfile.TemporaryFile() as file:
        send(session, since, StreamWriter(file.fileno()), silent)
        file.seek(0)
        return file.read()


def left_behind(directory: Path) -> list[str]:
    """Names that nobody should see when all is over."""
    return [name for name in os.listdir(directory) if name.startswith(".kvfs-")]
