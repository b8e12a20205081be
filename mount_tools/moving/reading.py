"""The bytes of a session that nothing is written to, at the speed of the mount."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

from mount_tools.moving.bytes import ahead, buffers, past_page_cache, pieces, read_at
from mount_tools.moving.content import Content, Laid, changed_blocks, of_bytes, of_file, runs
from mount_tools.moving.entries import Entry, open_below
from mount_tools.paths import opened

Run = tuple[int, int]


def without_holes(session: Laid, entry: Entry) -> list[Run]:
    """The runs [start, end) of a file in which there is something."""
    return runs(changed_blocks(session.slices[entry.path], []), entry.size)


def read_runs(
    session: Laid, wanted: Iterable[tuple[Entry, Sequence[Run]]]
) -> AbstractContextManager[Iterator[tuple[Entry, int, memoryview]]]:
    """Runs of files, in pieces: the file, where they are in it, and the bytes, which are valid
    until the next one is asked for. That is being read meanwhile."""
    return ahead(_read_runs(session, wanted))


def content_of(session: Laid) -> Content:
    """As it is known, else by reading all of it."""
    known = session.known_content
    return known if known is not None else content_of_files(session, session.files)


def content_of_files(session: Laid, files: Sequence[Entry]) -> Content:
    """What some of its files count."""
    whole = [(entry, without_holes(session, entry)) for entry in files]
    return sum(
        (of_file(entry.path, entry.size) for entry in files), content_of_runs(session, whole)
    )


def content_of_runs(session: Laid, wanted: Iterable[tuple[Entry, Sequence[Run]]]) -> Content:
    """What these runs of blocks count."""
    total = Content(0)
    with read_runs(session, wanted) as read:
        for entry, offset, data in read:
            total += of_bytes(entry.path, offset, data)
    return total


def _read_runs(
    session: Laid, wanted: Iterable[tuple[Entry, Sequence[Run]]]
) -> Iterator[tuple[Entry, int, memoryview]]:
    memory = buffers()
    with opened(session.path) as root:
        for entry, parts in wanted:
            if not parts:
                continue
            fd = past_page_cache(partial(open_below, root, entry.path), os.O_RDONLY)
            try:
                for offset, length in pieces(parts):
                    buffer = next(memory)[:length]
                    read_at(fd, buffer, offset)
                    yield entry, offset, buffer
            finally:
                os.close(fd)
