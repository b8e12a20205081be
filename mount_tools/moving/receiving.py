"""What comes out of a stream: a session, hidden until its end is there."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mount_tools.common import CommandError
from mount_tools.moving.bytes import ahead, buffers, pieces
from mount_tools.moving.content import BLOCK, Content, Laid, of_bytes, of_file
from mount_tools.moving.entries import Entry, Kind, RefusedError, shown
from mount_tools.moving.landing import Landing, landing
from mount_tools.moving.places import laid
from mount_tools.moving.reading import content_of, content_of_files
from mount_tools.moving.stream import Begin, Data, End, Entered, read_stream
from mount_tools.sessions import locate

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Received:
    """Entries, bytes of files that came, and the content of the session that is there now."""

    entries: int
    size: int
    content: Content
    base: Content | None


def receive(
    fd: int,
    target: Path,
    base: Path | None,
    begins: Callable[[int], Advance],
    *,
    replace: bool,
) -> Received:
    """Make the session `target` of what a descriptor gives; nothing, if it is not whole. A
    difference is applied to `base`, else to the session beside the target that has the name
    of the sender's."""
    with ahead(read_stream(fd)) as frames:
        begin = next(frames)
        assert isinstance(begin, Begin)
        advance = begins(begin.size)
        with landing(target, replace=replace, base=_base_of(begin, target, base)) as new:
            building = _Building(new, begin)
            for frame in frames:
                match frame:
                    case Entered():
                        building.enter(frame.entry, keeps=frame.keeps)
                    case Data():
                        building.write(frame.offset, frame.data)
                        advance(len(frame.data))
                    case End():
                        building.finish(frame)
                        basis = begin.base and begin.base[1]
                        return Received(frame.entries, frame.size, frame.content, basis)
    raise AssertionError("a stream ends with its end")


def _base_of(begin: Begin, target: Path, base: Path | None) -> Path | None:
    if begin.base is None:
        if base is not None:
            raise CommandError(f"a whole session came: leave --base {base} out")
        return None
    if base is None:
        name = begin.base[0]
        if b"/" in name or name in (b"", b".", b".."):
            raise RefusedError("the stream names no session as its base")
        base = target.with_name(os.fsdecode(name))
    try:
        _, found = locate(base)
    except CommandError as failure:
        raise CommandError(
            f"this is a difference from a session that is not here ({failure}): "
            "name it with --base, or send all"
        ) from None
    return found


class _Building:
    """Follows what the session that is being made counts."""

    def __init__(self, new: Landing, begin: Begin) -> None:
        self._new = new
        self._base: Laid | None = None
        self._content = Content(0)
        self._entry: Entry | None = None
        self._had = 0
        self._at = 0
        self._memory = buffers()
        self._left: dict[bytes, Entry] = {}
        if begin.base is not None:
            self._base = laid(new.path)
            self._content = content_of(self._base)
            self._left = {entry.path: entry for entry in self._base.files}
            if self._content != begin.base[1]:
                raise CommandError(
                    f"{shown(begin.base[0])} here is not what the sender has by that name: "
                    "send it again, or send all"
                )

    def enter(self, entry: Entry, *, keeps: bool) -> None:
        old = self._left.pop(entry.path, None) if keeps else None
        if keeps and (old is None or old.names > 1 or entry.kind is not Kind.FILE):
            raise RefusedError(f"{shown(entry.path)} keeps bytes that the base does not have")
        if not keeps:
            self._forget(entry)
        self._new.add(entry, keeps=keeps)
        self._entry, self._at, self._had = entry, 0, old.size if old else 0
        if entry.kind is Kind.FILE:
            self._content += of_file(entry.path, entry.size)
        if old:
            self._content -= of_file(old.path, old.size)
            self._cut(entry)

    def write(self, offset: int, data: memoryview) -> None:
        entry = self._entry
        if entry is None or entry.kind is not Kind.FILE or offset < self._at:
            raise RefusedError("the stream is damaged: data of no file, or out of order")
        self._at = offset + len(data)
        if len(data) % BLOCK and self._at != entry.size:
            raise RefusedError("the stream is damaged: data that ends in a block")
        self._content -= self._of_old(offset, min(self._at, self._had))
        self._new.write(offset, data)
        self._content += of_bytes(entry.path, offset, data)

    def finish(self, end: End) -> None:
        for entry in self._new.not_added():
            self._forget(entry)
        if self._content != end.content:
            raise RefusedError("what arrived is not what was sent: send it again")
        self._new.land(end.content)

    def _cut(self, entry: Entry) -> None:
        """What lies behind a file's new end counts no longer."""
        first = entry.size // BLOCK * BLOCK
        if entry.size < self._had:
            self._content -= self._of_old(first, self._had)
            self._content += self._of_old(first, entry.size)
            self._had = entry.size

    def _of_old(self, start: int, end: int) -> Content:
        """What bytes of the file that was entered last count as they are now."""
        total = Content(0)
        assert self._entry is not None
        for offset, length in pieces([(start, end)] if start < end else []):
            buffer = next(self._memory)[:length]
            self._new.read(offset, buffer)
            total += of_bytes(self._entry.path, offset, buffer)
        return total

    def _forget(self, entry: Entry) -> None:
        """What an entry takes the place of counts no longer."""
        if self._base is None or entry.path not in self._base.entries:
            return
        below = entry.path + b"/"
        gone = [
            path
            for path in self._left
            if path == entry.path or (path.startswith(below) and entry.kind is not Kind.DIRECTORY)
        ]
        files = [self._left.pop(path) for path in gone]
        self._content -= content_of_files(self._base, files)
