"""Look-ahead: what comes next is read before it is asked for, and nothing else is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.engine.device import FileDevice, create_image
from kvfs.engine.format import ROOT_INODE, Extent
from kvfs.engine.io import InlineExecutor, run
from kvfs.engine.reader import Chunk, ExtentReader
from kvfs.engine.store import Store
from kvfs.engine.superblocks import format_device
from kvfs.tiers.oplog import OperationLog
from kvfs.tiers.prefetch import LookAhead, Reader

MIB = 1024 * 1024
LAYER_SIZE = 4 * MIB


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    create_image(tmp_path / "ring.img", 256 * MIB)
    device = FileDevice(tmp_path / "ring.img")
    format_device(device, 4 * MIB)
    buffer = OperationLog(tmp_path / "oplog", 64 * MIB)
    opened = Store.open(device, "ring.img", InlineExecutor(), buffer)
    yield opened
    run(opened.close())
    device.close()


def session(store: Store, layers: int) -> list[int]:
    directory = run(store.create(ROOT_INODE, b"s", 0o40700, 0, 0)).inode.ino
    inodes = []
    for layer in range(layers):
        ino = run(store.create(directory, b"layer.%03d" % layer, 0o100600, 0, 0)).inode.ino
        run(store.write(ino, 0, os.urandom(LAYER_SIZE)))
        inodes.append(ino)
    run(store.sync())
    return inodes


def held(store: Store, ino: int) -> int:
    """How many bytes of a file the reader holds."""
    extents = run(store.extents(ino, 0, LAYER_SIZE))
    return sum(e.size for e in extents if store.reader.find(e) is not None)


def read(store: Store, look_ahead: LookAhead, reader: Reader, offset: int, length: int) -> None:
    run(look_ahead.reads(reader, offset, length))
    run(store.read(reader.ino, offset, length))


def test_a_sequential_reader_has_the_next_range_and_the_next_layer_read_ahead(
    store: Store,
) -> None:
    inodes = session(store, 4)
    look_ahead = LookAhead(store, 8 * MIB)
    first = run(look_ahead.opened(inodes[0]))
    read(store, look_ahead, first, 0, MIB)
    assert held(store, inodes[0]) >= 2 * MIB
    for offset in range(MIB, LAYER_SIZE, MIB):
        read(store, look_ahead, first, offset, MIB)
    assert held(store, inodes[1]) == LAYER_SIZE
    assert held(store, inodes[3]) == 0


def test_a_random_reader_gets_what_it_asks_for_and_no_more(store: Store) -> None:
    inodes = session(store, 2)
    look_ahead = LookAhead(store, 8 * MIB)
    reader = run(look_ahead.opened(inodes[1]))
    reader.expected = LAYER_SIZE * 100
    read(store, look_ahead, reader, 2 * MIB, 4096)
    assert held(store, inodes[1]) <= MIB
    assert held(store, inodes[0]) == 0


def test_layers_opened_out_of_order_do_not_read_ahead_over_their_end(store: Store) -> None:
    inodes = session(store, 4)
    look_ahead = LookAhead(store, 8 * MIB)
    reader = run(look_ahead.opened(inodes[2]))
    for offset in range(0, LAYER_SIZE, MIB):
        read(store, look_ahead, reader, offset, MIB)
    assert held(store, inodes[3]) == 0


def test_a_file_whose_directory_is_gone_is_still_opened(store: Store) -> None:
    (ino,) = session(store, 1)
    store.pin(ino)
    directory = run(store.lookup(ROOT_INODE, b"s")).inode.ino
    run(store.unlink(directory, b"layer.000"))
    run(store.rmdir(ROOT_INODE, b"s"))
    look_ahead = LookAhead(store, 8 * MIB)
    reader = run(look_ahead.opened(ino))
    read(store, look_ahead, reader, 0, MIB)
    run(store.unpin(ino))


def test_layers_that_were_all_opened_before_are_read_ahead_in_order_only(store: Store) -> None:
    inodes = session(store, 12)
    look_ahead = LookAhead(store, 8 * MIB)
    readers = [run(look_ahead.opened(ino)) for ino in inodes]
    for place in (0, 3, 7, 4, 10):
        read(store, look_ahead, readers[place], 0, LAYER_SIZE)
        assert held(store, inodes[place + 1]) == 0
    readers = [run(look_ahead.opened(ino)) for ino in inodes]
    for place in (0, 1, 2):
        assert held(store, inodes[3]) == 0
        read(store, look_ahead, readers[place], 0, LAYER_SIZE)
    assert held(store, inodes[3]) == LAYER_SIZE


def test_a_session_that_is_begun_anew_is_read_ahead_from_its_first_layer(store: Store) -> None:
    inodes = session(store, 4)
    look_ahead = LookAhead(store, 8 * MIB)
    run(look_ahead.opened(inodes[3]))
    reader = run(look_ahead.opened(inodes[0]))
    read(store, look_ahead, reader, 0, LAYER_SIZE)
    assert held(store, inodes[1]) > 0


def test_what_is_asked_for_is_read_before_what_is_likely(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    inodes = session(store, 4)
    begun: list[int] = []
    start = ExtentReader._start

    def recorded(reader: ExtentReader, extents: list[Extent]) -> Chunk:
        begun.extend(extent.extent_id for extent in extents)
        return start(reader, extents)

    monkeypatch.setattr(ExtentReader, "_start", recorded)
    look_ahead = LookAhead(store, 8 * MIB)
    reader = run(look_ahead.opened(inodes[0]))
    read(store, look_ahead, reader, 0, LAYER_SIZE)
    asked_for = run(store.extent_ids(inodes[0]))
    assert begun[: len(asked_for)] == asked_for
    assert len(begun) > len(asked_for)
