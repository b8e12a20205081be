"""What goes into a stream: all of a session, or what another one lacks."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvfs.engine.codec import Layout, layout_of
from mount_tools.moving.content import (
    Content,
    Laid,
    changed_blocks,
    note_content,
    of_bytes,
    of_file,
    runs,
)
from mount_tools.moving.entries import Entry, Kind
from mount_tools.moving.places import laid, require_unchanged, snapshot
from mount_tools.moving.reading import Run, content_of, content_of_runs, read_runs, without_holes
from mount_tools.moving.stream import Begin, StreamWriter

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Sent:
    """`size` bytes of files went out, in a stream of `written` bytes."""

    entries: int
    size: int
    written: int
    content: Content
    base: Content | None


@dataclass(frozen=True, slots=True)
class _File:
    """What is sent of a file, and what that stands for in the base: `gone` counts what the base
    has there and this session does not."""

    entry: Entry
    runs: list[Run]
    old_runs: list[Run]
    keeps: bool


def send(
    session: Path,
    since: Path | None,
    writer: StreamWriter,
    begins: Callable[[int], Advance],
) -> Sent:
    """Write a session as it is now, or what differs from the session `since`. `begins` is told
    how many bytes there are, and what it returns how many went."""
    with ExitStack() as stack:
        base = laid(stack.enter_context(snapshot(since))) if since else None
        mine = laid(stack.enter_context(snapshot(session)))
        before = content_of(base) if base else None
        files = {entry.path: _plan(entry, mine, base) for entry in mine.files}
        size = sum(end - start for file in files.values() for start, end in file.runs)
        name = os.fsencode(since.name) if since else b""
        writer.begin(Begin(size, None if before is None else (name, before)))
        content = before or Content(0)
        if base:
            content -= _of_gone(base, files)
        content += _write(mine, files, writer, begins(size))
        require_unchanged(mine)
        if base:
            require_unchanged(base)
        writer.end(content)
    if before is not None and since is not None and base is not None:
        note_content(since, before, base.place)
    note_content(session, content, mine.place)
    return Sent(len(mine.entries), size, writer.written, content, before)


def _plan(entry: Entry, mine: Laid, base: Laid | None) -> _File:
    old = base.entries.get(entry.path) if base else None
    if base is None or old is None or old.kind is not Kind.FILE or old.names + entry.names > 2:
        return _File(entry, without_holes(mine, entry), [], keeps=False)
    blocks = changed_blocks(mine.slices[entry.path], base.slices[entry.path])
    return _File(entry, runs(blocks, entry.size), runs(blocks, old.size), keeps=True)


def _of_gone(base: Laid, files: dict[bytes, _File]) -> Content:
    """What the base has that this session has not, or not in these places."""
    total = Content(0)
    gone = []
    for entry in base.files:
        file = files.get(entry.path)
        total += of_file(entry.path, entry.size)
        gone.append((entry, file.old_runs if file and file.keeps else without_holes(base, entry)))
    return total + content_of_runs(base, gone)


def _write(
    mine: Laid, files: dict[bytes, _File], writer: StreamWriter, advance: Advance
) -> Content:
    """All entries, and the data that is to be sent. What it counts."""
    total = Content(0)
    told = iter(mine.entries.values())
    wanted = [(file.entry, file.runs) for file in files.values() if file.runs]

    def tell_up_to(path: bytes | None) -> None:
        for entry in told:
            file = files.get(entry.path)
            writer.enter(entry, keeps=file is not None and file.keeps)
            if entry.path == path:
                return

    last = None
    layout = Layout()
    with read_runs(mine, wanted) as read:
        for entry, offset, data in read:
            if entry.path != last:
                tell_up_to(entry.path)
                last, layout = entry.path, _layout(entry)
            writer.data(offset, data, layout)
            total += of_bytes(entry.path, offset, data)
            advance(len(data))
    tell_up_to(None)
    for entry in mine.files:
        total += of_file(entry.path, entry.size)
    return total


def _layout(entry: Entry) -> Layout:
    return layout_of(entry.xattrs.get(b"user.kvfs.dtype"), entry.xattrs.get(b"user.kvfs.shape"))
