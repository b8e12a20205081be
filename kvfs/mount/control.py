"""What KVFS says of itself through the filesystem: `user.kvfs.*` and `/.kvfs/`."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from uuid import UUID

from kvfs.engine.buffer import Kept
from kvfs.engine.codec import ITEM_SIZES, Codec, elements
from kvfs.engine.files import Stored
from kvfs.engine.format import FIRST_FREE_ID, ROOT_INODE, Inode
from kvfs.engine.io import Step
from kvfs.engine.latency import Latencies
from kvfs.engine.nodes import error
from kvfs.engine.store import Store
from kvfs.mount import scrubbing
from kvfs.mount.config import MountConfig
from kvfs.mount.metrics import metrics
from kvfs.tiers.migrate import Mapped, Migration
from kvfs.tiers.planner import Outcomes, Planner
from kvfs.tiers.uses import Uses

PREFIX = b"user.kvfs."
_XATTR_MAX = 64 * 1024 - 1
# What may be set by a user and is kept, and which values say something; the rest of the
# prefix is answered or refused.
_SETTABLE: dict[bytes, Callable[[bytes], bool]] = {
    b"codec": lambda value: True,  # the store checks it
    b"dtype": lambda value: value in [name.encode() for name in ITEM_SIZES],
    b"shape": lambda value: elements(value) is not None,
    b"model": lambda value: True,
    b"unit": lambda value: value in (b"auto", b"session", b"pool"),
    b"pin": lambda value: value in (b"0", b"1"),
    b"ttl": lambda value: value.isdigit() and len(value) <= _DIGITS_MAX,
    b"device_id": lambda value: value.isdigit() and len(value) <= _DIGITS_MAX,
}
_DIGITS_MAX = 12
_PLACE_DIGITS_MAX = 18

# What setting these does: a fork of that name beside it; into the warm tier; out of it.
FORK = PREFIX + b"fork"
PREFETCH = PREFIX + b"prefetch"
DEMOTE = PREFIX + b"demote"
# What an agent says of its session (see tiers/hints.py).
HINT = PREFIX + b"hint"
DEVICE_ID = PREFIX + b"device_id"
# Reading it brings a file in, and says where to map it.
MAP = PREFIX + b"map"
# Reading it of the root begins a scrub of the ring, and says how many have ended.
SCRUB = PREFIX + b"scrub"
_TIER = PREFIX + b"tier"
HEAT = PREFIX + b"heat"

CONTROL_NAME = b".kvfs"
CONTROL_INODE = 2
_FIRST_FILE = CONTROL_INODE + 1


def read_xattr(store: Store, migration: Migration, ino: int, name: bytes) -> Step[bytes]:
    """The value of an xattr. Raises ENODATA."""
    if name == _TIER:
        return (yield from migration.tier(ino)).encode()
    what, _, start = name.removeprefix(PREFIX).partition(b".")
    is_place = start.isdigit() and len(start) <= _PLACE_DIGITS_MAX
    if name.startswith(PREFIX) and what == b"extents" and (not start or is_place):
        return (yield from _extents(store, ino, int(start or 0)))
    value = yield from store.xattr(ino, name)
    if value is None and name.startswith(PREFIX):
        value = yield from _unset(store, ino, name.removeprefix(PREFIX))
    if value is None:
        raise error(errno.ENODATA)
    return value


def _unset(store: Store, ino: int, name: bytes) -> Step[bytes | None]:
    """What a setting that was not made here amounts to."""
    units = store.units
    match name:
        case b"pin":
            return b"1" if (yield from units.is_pinned(ino)) else b"0"
        case b"ttl":
            return b"0"
        case b"unit":
            node = yield from store.node(ino)
            if node.is_directory:
                unit = yield from units.unit_of(ino)
                is_session = unit != ino or (yield from units.is_session(ino))
                return b"session" if is_session and ino != ROOT_INODE else b"pool"
    return None


def read_map(migration: Migration, ino: int) -> Step[bytes]:
    """JSON for who maps a file's bytes: version, size, and segments with path, offset, length,
    and the offset in the file that they are from; of a directory the same of each file in it that
    is in warm memory, by their names, with paths by number. Raises ENODATA if it cannot be had."""
    if (yield from migration.store.node(ino)).is_directory:
        shown = yield from migration.map_all(ino)
        if shown is None:
            raise error(errno.ENODATA)
        document = _map_of_all(shown)
    else:
        mapped = yield from migration.map(ino)
        if mapped is None:
            raise error(errno.ENODATA)
        document = _map_of(mapped)
    value = json.dumps(document, separators=(",", ":")).encode()
    if len(value) > _XATTR_MAX:
        raise error(errno.ENODATA)
    return value


def _map_of_all(files: dict[bytes, Mapped]) -> dict[str, Any]:
    """So short that a session of some thousand segments fits in an attribute."""
    paths: dict[str, int] = {}
    return {
        "files": {
            os.fsdecode(name): {
                "version": mapped.version,
                "size": mapped.size,
                "segments": [
                    (
                        paths.setdefault(os.fspath(one.path), len(paths)),
                        one.offset,
                        one.length,
                        one.at,
                    )
                    for one in mapped.segments
                ],
            }
            for name, mapped in files.items()
        },
        "paths": list(paths),
    }


def _map_of(mapped: Mapped) -> dict[str, Any]:
    segments = [
        {"path": os.fspath(one.path), "offset": one.offset, "length": one.length, "at": one.at}
        for one in mapped.segments
    ]
    return {"version": mapped.version, "size": mapped.size, "segments": segments}


def hinted(store: Store, ino: int) -> Step[tuple[int, int]]:
    """The session that a hint is about, and what it takes on the device, in bytes. Raises EINVAL
    where there is none."""
    unit = yield from store.units.unit_of(ino)
    is_directory = (yield from store.node(unit)).is_directory
    if not is_directory or unit == ROOT_INODE or not (yield from store.units.is_session(unit)):
        raise error(errno.EINVAL)
    return unit, (yield from store.units.unit(unit)).stored


def check_settable(name: bytes, value: bytes) -> None:
    """Raises EOPNOTSUPP for names of ours that are not settings, and for ACLs; EINVAL for
    values that say nothing."""
    if name.startswith(b"system."):
        raise error(errno.EOPNOTSUPP)
    if not name.startswith(PREFIX):
        return
    check = _SETTABLE.get(name.removeprefix(PREFIX))
    if check is None:
        raise error(errno.EOPNOTSUPP)
    if not check(value):
        raise error(errno.EINVAL)


def _extents(store: Store, ino: int, start: int) -> Step[bytes]:
    """JSON, one object an extent from the file offset `start` on: offset, length, stored,
    codec, address, id (never used twice: who has the same shares its bytes), and which byte of the
    extent is the first. Cut before 64 KiB, with a mark that says where to go on."""
    node = yield from store.node(ino)
    if not stat.S_ISREG(node.inode.mode):
        raise error(errno.ENODATA)
    rows: list[str] = []
    size = 2
    at = start
    for part in (yield from store.parts(ino, start, max(0, node.inode.size - start))):
        if isinstance(part, Stored):
            extent = part.extent
            row = json.dumps(
                {
                    "offset": at,
                    "length": part.length,
                    "stored": extent.stored,
                    "codec": Codec(extent.codec).name.lower(),
                    "address": extent.address,
                    "extent": extent.extent_id,
                    "skew": part.skew,
                }
            )
            size += len(row) + 2
            if size > _XATTR_MAX - 64:
                rows.append(json.dumps({"truncated": True, "next": at}))
                break
            rows.append(row)
        at += len(part) if isinstance(part, Kept) else part.length
    return f"[{', '.join(rows)}]".encode()


# -- /.kvfs


@dataclass(frozen=True, slots=True)
class Mounted:
    """What the files of `/.kvfs` tell of. `unrecovered`: a read-only mount does not show what
    the last daemon had answered and not brought into the ring. `superblock_lost`: one of the
    two could not be read at the mount."""

    store: Store
    migration: Migration
    planner: Planner
    uses: Uses
    config: MountConfig
    unrecovered: bool
    superblock_lost: bool


@dataclass(frozen=True, slots=True)
class ControlFile:
    """`render` gives its bytes as the user with that uid may see them."""

    render: Callable[[Mounted, int], Step[bytes]]
    mode: int


def _stats(mounted: Mounted) -> dict[str, Any]:
    store, warm = mounted.store, mounted.migration.warm
    superblock, failover = store.superblock, store.failover
    return {
        "pid": os.getpid(),
        "mountpoint": str(mounted.config.mountpoint),
        "source": str(mounted.config.source),
        "unrecovered": mounted.unrecovered,
        "superblock_lost": mounted.superblock_lost,
        "uuid": str(UUID(bytes=superblock.uuid)),
        "cipher": superblock.cipher.name.lower(),
        "epoch": superblock.epoch,
        "read_only": store.read_only,
        "reclaim": mounted.config.store.reclaim,
        "policy": mounted.config.profile.policy,
        "damage": store.damage,
        "failure": store.failure,
        "shadow": {
            "device_failed": failover.failure is not None,
            "gave_up": failover.gave_up,
            "limit": failover.limit,
            "used": failover.used,
            "counters": asdict(failover.counters),
        },
        "space": asdict(store.usage()),
        "segment_size": superblock.segment_size,
        "segments": superblock.segment_count,
        "unsaved": store.unsaved,
        "counters": asdict(store.counters),
        "errors": asdict(store.reader.errors) | {"index": store.index_errors},
        "scrub": scrubbing.status(store.scrub),
        "warm": asdict(warm.usage()) | asdict(warm.counters),
        "strained": mounted.migration.is_strained,
        "heat": asdict(mounted.uses.summary()),
        "prefetch": _prefetch(mounted.planner.outcomes),
        "hot_hit_rate": mounted.planner.hot_hit_rate,
        "hot_uses": asdict(mounted.planner.hot_uses),
        "latency": {
            name: {
                "count": sum(latencies.counts),
                "p50_ms": round(1000 * latencies.quantile(0.5), 3),
                "p99_ms": round(1000 * latencies.quantile(0.99), 3),
            }
            for name, latencies in _latencies(mounted).items()
        },
    }


def _latencies(mounted: Mounted) -> dict[str, Latencies]:
    """Of reads of the device, frames written to it, and groups of sessions going down."""
    return {
        "ring_write": mounted.store.write_latencies,
        "cold_read": mounted.store.reader.latencies,
        "warm_evict": mounted.migration.latencies,
    }


def _prefetch(outcomes: Outcomes) -> dict[str, Any]:
    return {
        "right": {reason.value: count for reason, count in outcomes.right.items()},
        "wrong": {reason.value: count for reason, count in outcomes.wrong.items()},
        "right_bytes": outcomes.right_bytes,
        "wrong_bytes": outcomes.wrong_bytes,
    }


def _stats_json(mounted: Mounted, _uid: int) -> Step[bytes]:
    return (json.dumps(_stats(mounted), indent=2) + "\n").encode()
    yield


def metrics_of_now(mounted: Mounted) -> Callable[[], bytes]:
    """The figures are taken at once; the text is made by the call, from any thread."""
    latencies = {
        name: Latencies(list(seen.counts), seen.total) for name, seen in _latencies(mounted).items()
    }
    return partial(metrics, _stats(mounted), latencies)


def _metrics(mounted: Mounted, _uid: int) -> Step[bytes]:
    return metrics_of_now(mounted)()
    yield


def _config(mounted: Mounted, _uid: int) -> Step[bytes]:
    return mounted.config.as_toml()
    yield


def _sessions(mounted: Mounted, uid: int) -> Step[bytes]:
    """A line of JSON for each session that was used, the last used first."""
    sessions = yield from mounted.store.units.sessions()
    return _lines(asdict(session) for session in sessions if _may_see(uid, session.uid))


def _log(mounted: Mounted, uid: int) -> Step[bytes]:
    """A line of JSON for each unit that was reclaimed, the oldest first."""
    entries = yield from mounted.store.reclaimer.entries()
    return _lines(entry for entry in entries if _may_see(uid, entry["uid"]))


def _may_see(uid: int, owner: int) -> bool:
    return uid == owner or sees_all(uid)


def sees_all(uid: int) -> bool:
    """Whether a user may know of what belongs to others: root, and who runs the daemon, whose
    memory and device it is."""
    return uid in (0, os.geteuid())


def _lines(documents: Iterable[dict[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(document)}\n" for document in documents).encode()


# What tells of the whole mount is for root and the daemon's user alone; the others show a
# caller what it owns.
FILES = {
    b"stats.json": ControlFile(_stats_json, 0o400),
    b"metrics": ControlFile(_metrics, 0o400),
    b"config.toml": ControlFile(_config, 0o400),
    b"sessions": ControlFile(_sessions, 0o444),
    b"log": ControlFile(_log, 0o444),
}
_NAMES = list(FILES)


def is_control(ino: int) -> bool:
    """Whether it is `/.kvfs` or a file in it."""
    return CONTROL_INODE <= ino < FIRST_FREE_ID


def control_files() -> list[tuple[bytes, int]]:
    """Names and inode numbers."""
    return [(name, _FIRST_FILE + number) for number, name in enumerate(_NAMES)]


def find_control_file(name: bytes) -> int:
    """Its inode number. Raises ENOENT."""
    if name not in FILES:
        raise error(errno.ENOENT)
    return _FIRST_FILE + _NAMES.index(name)


def render(mounted: Mounted, ino: int, uid: int) -> Step[bytes]:
    """The bytes of a file in `/.kvfs`."""
    return _file(ino).render(mounted, uid)


def control_inode(ino: int) -> Inode:
    """The attributes of `/.kvfs` or of a file in it: the daemon's, whoever owns the root. As in
    /proc a file is made when it is opened, and has no size before."""
    owner = os.geteuid(), os.getegid()
    if ino == CONTROL_INODE:
        return Inode(ino, stat.S_IFDIR | 0o555, *owner, nlink=2)
    return Inode(ino, stat.S_IFREG | _file(ino).mode, *owner, nlink=1)


def _file(ino: int) -> ControlFile:
    return FILES[_NAMES[ino - _FIRST_FILE]]
