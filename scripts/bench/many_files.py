"""An image with very many small layer files, made through the library; and visits to it."""

from __future__ import annotations

import gc
import os
import re
import stat
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from rich.progress import track

from kvfs.engine.device import FileDevice, create_image
from kvfs.engine.format import DATA_START, ROOT_INODE
from kvfs.engine.io import InlineExecutor, run
from kvfs.engine.store import Store, StoreOptions
from kvfs.engine.superblocks import format_device
from kvfs.tiers.oplog import OperationLog

LAYERS = 32
READ_LAYERS = 4  # of each session that is visited
SEGMENT_SIZE = 64 * 1024 * 1024
_SESSION_SPACE = 224 * 1024  # what a session takes of the ring, with the index's share
_SPACE_MIN = 1024 * 1024 * 1024
_GARBAGE_THRESHOLDS = (5_000, 5, 100)


def session_name(number: int) -> str:
    return f"session-{number:05}"


def content(session: int, layer: int) -> bytes:
    """Some hundred bytes that tell where they belong."""
    return f"session {session} layer {layer}\n".encode() * (4 + layer)


def build(image: Path, sessions: int) -> None:
    """A ring that was unmounted cleanly."""
    # As the daemon does: what lives long is not looked at by the collector again and again.
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(*_GARBAGE_THRESHOLDS)
    size = DATA_START + _SPACE_MIN + sessions * _SESSION_SPACE // SEGMENT_SIZE * SEGMENT_SIZE
    create_image(image, size)
    device = FileDevice(image)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as log:
        format_device(device, SEGMENT_SIZE)
        operations = OperationLog(Path(log), 256 * 1024 * 1024)
        store = Store.open(device, str(image), InlineExecutor(), operations, StoreOptions())
        for session in track(range(sessions), "building"):
            _add_session(store, session)
            run(store.tick())
        run(store.close())
    device.close()
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def _add_session(store: Store, session: int) -> None:
    def create(parent: int, name: str, mode: int) -> int:
        step = store.create(parent, name.encode(), mode, os.geteuid(), os.getegid())
        return run(step).inode.ino

    directory = create(ROOT_INODE, session_name(session), stat.S_IFDIR | 0o700)
    for layer in range(LAYERS):
        ino = create(directory, f"layer.{layer:03}", stat.S_IFREG | 0o600)
        run(store.write(ino, 0, content(session, layer)))


@dataclass(slots=True)
class Visits:
    """What was wrong, and the daemon's anonymous memory in MiB as they went on."""

    wrong: list[str] = field(default_factory=list)
    anonymous: list[float] = field(default_factory=list)


def visit_sessions(mountpoint: Path, pid: int, sessions: int, visits: int) -> Visits:
    """Names, attributes and some content of random sessions, then `ls` of the root."""
    random = Random(sessions)
    found = Visits(anonymous=[anonymous_mib(pid)])
    for count, session in enumerate(track(random.sample(range(sessions), visits), "visiting"), 1):
        found.wrong += _visit(mountpoint, session, random)
        if count * 10 % visits < 10:
            found.anonymous.append(anonymous_mib(pid))
    listing = subprocess.run(["ls", mountpoint], check=True, capture_output=True, text=True)
    names = [name for name in listing.stdout.splitlines() if name.startswith("session-")]
    if names != [session_name(number) for number in range(sessions)]:
        found.wrong.append("the names in the root")
    found.anonymous.append(anonymous_mib(pid))
    return found


def _visit(mountpoint: Path, session: int, random: Random) -> list[str]:
    directory = mountpoint / session_name(session)
    names = sorted(os.listdir(directory))
    if names != [f"layer.{layer:03}" for layer in range(LAYERS)]:
        return [f"the names in {directory.name}"]
    wrong = [
        f"the size of {directory.name}/{name}"
        for layer, name in enumerate(names)
        if (directory / name).stat().st_size != len(content(session, layer))
    ]
    for layer in random.sample(range(LAYERS), READ_LAYERS):
        if (directory / names[layer]).read_bytes() != content(session, layer):
            wrong.append(f"the content of {directory.name}/{names[layer]}")
    return wrong


def anonymous_mib(pid: int) -> float:
    found = re.search(r"RssAnon:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    if found is None:
        raise SystemExit(f"process {pid} has no memory of its own: has it ended?")
    return int(found[1]) / 1024
