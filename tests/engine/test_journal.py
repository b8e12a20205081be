"""Replay, one damage after the other: what happened before it is there, nothing else is."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs.engine.device import DeviceError
from kvfs.engine.format import (
    BLOCK,
    DATA_START,
    NO_SEGMENT,
    SUPERBLOCK_ADDRESSES,
    FrameFlag,
    FrameHeader,
    RecordHeader,
    Superblock,
    SuperblockFlag,
)
from kvfs.engine.io import run
from kvfs.engine.ring import Geometry, read_header
from kvfs.engine.store import Store
from kvfs.engine.superblocks import read_superblocks
from tests.engine.audit import audit
from tests.engine.kit import FILE, MIB, Bench, flip, frames_written, new_device, noise, wipe
from tests.support.devices import RecordingDevice

SIZE = 3 * BLOCK


def three_units(bench: Bench) -> list[FrameHeader]:
    """Files a, b and c, each a commit unit of one frame, and none of them flushed."""
    flushes = bench.device.flushes
    for name in (b"a", b"b", b"c"):
        bench.write(bench.make(name), noise(SIZE, ord(name)))
        bench.write_out()
    frames = frames_written(bench.device)
    assert len(frames) == 3
    assert bench.device.flushes == flushes
    return frames


def files(store: Store) -> dict[bytes, bytes]:
    found = {}
    for _, entry in run(store.list_directory(1, 0, 100)):
        size = run(store.node(entry.ino)).inode.size
        found[entry.name] = bytes(run(store.read(entry.ino, 0, size)))
    return found


def expected(*names: bytes) -> dict[bytes, bytes]:
    return {name: noise(SIZE, ord(name)) for name in names}


def reopened(bench: Bench, image: bytearray) -> Store:
    store = bench.open_image(image)
    assert store.damage is None
    return store


# -- the end of the log ----------------------------------------------------------------


def test_whole_frames_are_replayed(bench: Bench) -> None:
    three_units(bench)
    store = reopened(bench, bench.device.image)
    assert files(store) == expected(b"a", b"b", b"c")
    assert store.counters.replayed_frames == 3


@pytest.mark.plain
def test_a_torn_last_frame_is_ignored(bench: Bench) -> None:
    """Whichever of its sectors was lost, but for padding."""
    three_units(bench)
    bench.write(bench.make(b"d" * 255), noise(SIZE))
    bench.write_out()
    last = frames_written(bench.device)[-1]
    used = FrameHeader.SIZE + RecordHeader.SIZE * last.record_count + last.item_bytes
    assert last.head_length == BLOCK and used > 512, "a table that can be torn from its header"
    sectors = [*range(0, used, 512), *range(BLOCK, last.frame_length, 512)]
    for sector in sectors:
        image = bytearray(bench.device.image)
        wipe(image, last.address + sector, 512)
        assert files(reopened(bench, image)) == expected(b"a", b"b", b"c"), f"sector at {sector}"


def test_a_lost_last_frame_is_ignored(bench: Bench) -> None:
    *_, last = three_units(bench)
    image = bytearray(bench.device.image)
    wipe(image, last.address, last.frame_length)
    assert files(reopened(bench, image)) == expected(b"a", b"b")


def test_frames_behind_a_torn_one_are_ignored(bench: Bench) -> None:
    """The device may have written the later ones first: none had been flushed."""
    first, _, _ = three_units(bench)
    image = bytearray(bench.device.image)
    wipe(image, first.address + BLOCK)
    assert files(reopened(bench, image)) == {}


def test_work_goes_on_where_the_log_was_torn(bench: Bench) -> None:
    """The next frames overwrite the torn one, and are found after the next crash."""
    *_, last = three_units(bench)
    image = bytearray(bench.device.image)
    wipe(image, last.address)
    other = Bench(bench.directory / "x", RecordingDevice(image), boot="next")
    other.write(other.make(b"d"), noise(SIZE, ord("d")))
    run(other.store.sync())
    assert frames_written(other.device)[0].address == last.address
    assert files(reopened(bench, other.device.image)) == expected(b"a", b"b", b"d")


def test_a_frame_found_torn_does_not_come_back(bench: Bench) -> None:
    """A mount has shown a state without it. That a later write of the same bytes completes
    it by chance must not bring its operations back."""
    *_, last = three_units(bench)
    torn = bytearray(bench.device.image)
    wipe(torn, last.address + 2 * BLOCK)
    other = Bench(bench.directory / "x", RecordingDevice(torn), boot="next")
    assert files(other.store) == expected(b"a", b"b")
    whole = bytearray(other.device.image)
    span = slice(last.address, last.address + last.frame_length)
    whole[span] = bench.device.image[span]
    assert files(reopened(bench, whole)) == expected(b"a", b"b")


# -- what is no frame of this log ------------------------------------------------------


def test_a_stale_frame_of_an_earlier_turn_behind_the_end_is_ignored(bench: Bench) -> None:
    """Units of one size: after a turn of the ring old frames lie exactly where the next
    ones will."""
    ino = bench.make(b"file")
    ring, device = bench.store._appender.ring, bench.device
    content = b""
    for number in range(1000):
        content = noise(200_000, number)
        segment = ring.position.segment
        bench.write(ino, content)
        bench.write_out()
        if ring.position.segment != segment:
            run(bench.store.checkpoint())
        elif is_frame(device, Geometry(MIB, 16).address(segment, ring.position.offset)):
            break
    stale = read_header(ring, device, ring.position.segment, ring.position.offset)
    assert stale.sequence < ring.position.sequence, "the case that is meant"
    assert files(reopened(bench, device.image)) == {b"file": content}


def is_frame(device: RecordingDevice, address: int) -> bool:
    return device.image[address : address + 8] == FrameHeader.MAGIC


def test_frames_of_another_ring_are_ignored(tmpfs_bench: Callable[..., Bench]) -> None:
    """A device formatted again: the old first frame is where the new first one would be."""
    old = tmpfs_bench("old")
    three_units(old)
    fresh = new_device()
    image = fresh.image[:DATA_START] + old.device.image[DATA_START:]
    new = tmpfs_bench("new", RecordingDevice(image))
    assert new.store.counters.replayed_frames == 0
    assert new.names() == []


def test_a_misdirected_frame_is_ignored(bench: Bench) -> None:
    """It says where it belongs."""
    *_, last = three_units(bench)
    image = bytearray(bench.device.image)
    frame = image[last.address : last.address + last.frame_length]
    wipe(image, last.address, last.frame_length)
    image[last.address + BLOCK : last.address + BLOCK + last.frame_length] = frame
    assert files(reopened(bench, image)) == expected(b"a", b"b")


@pytest.mark.parametrize(
    "changes",
    [
        {"previous_checksum": 12345},
        {"address": DATA_START + 8 * MIB},
        {"uuid": b"another ring    "},
        {"sequence": 77},
        {"epoch": 0},
        {"frame_length": BLOCK},
        {"head_length": 0},
        {"record_count": 10_000},
        {"item_bytes": 2**31},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_whole_frame_that_does_not_belong_here_is_ignored(
    bench: Bench, changes: dict[str, Any]
) -> None:
    """Written behind another frame, meant for another place, of another ring or mount; or
    with lengths that make no sense. Its checksums are all right."""
    *_, last = three_units(bench)
    image = bytearray(bench.device.image)
    head = dataclasses.replace(last, **changes).pack()
    image[last.address : last.address + len(head)] = head
    assert files(reopened(bench, image)) == expected(b"a", b"b")


# -- units of several frames -----------------------------------------------------------


def large_unit(bench: Bench) -> list[FrameHeader]:
    """File a, flushed; then one unit over several segments."""
    bench.write(bench.make(b"a"), noise(SIZE, ord("a")))
    run(bench.store.sync())
    ino = bench.make(b"large")
    for number in range(3):
        bench.write(ino, noise(MIB, number), number * MIB)
    before = len(frames_written(bench.device))
    bench.write_out()
    unit = frames_written(bench.device)[before:]
    assert len(unit) > 3
    assert all(frame.flags & FrameFlag.CONTINUES for frame in unit[:-1])
    assert not unit[-1].flags & FrameFlag.CONTINUES
    return unit


def test_a_unit_over_several_segments_is_replayed(bench: Bench) -> None:
    large_unit(bench)
    store = reopened(bench, bench.device.image)
    large = b"".join(noise(MIB, number) for number in range(3))
    assert files(store) == {**expected(b"a"), b"large": large}


@pytest.mark.parametrize("which", [0, 1, -2, -1])
def test_a_unit_without_one_of_its_frames_never_happened(bench: Bench, which: int) -> None:
    unit = large_unit(bench)
    image = bytearray(bench.device.image)
    wipe(image, unit[which].address)
    other = Bench(bench.directory / "x", RecordingDevice(image), boot="next")
    assert files(other.store) == expected(b"a")
    assert other.store._appender.ring.position.sequence == unit[0].sequence
    other.write(other.make(b"d"), noise(SIZE, ord("d")))
    run(other.store.sync())
    assert files(reopened(bench, other.device.image)) == expected(b"a", b"d")


def test_the_segments_of_a_unit_that_never_happened_are_free(bench: Bench) -> None:
    """Else the same operations, done again from the log in tmpfs, would find no space."""
    free_before = bench.store._appender.ring.free_segments
    unit = large_unit(bench)
    image = bytearray(bench.device.image)
    wipe(image, unit[-1].address)
    ring = reopened(bench, image)._appender.ring
    assert ring.free_segments == free_before


def test_a_segment_that_only_a_lost_unit_named_is_named_again(bench: Bench) -> None:
    """A replay follows the frames from segment to segment: a name in a frame that never
    happened does not count."""
    unit = large_unit(bench)
    image = bytearray(bench.device.image)
    wipe(image, unit[-1].address)
    other = Bench(bench.directory / "x", RecordingDevice(image), boot="next")
    ino = other.make(b"more")
    content = b""
    for number in range(30):
        content += noise(100_000, 50 + number)
        other.write(ino, content[-100_000:], number * 100_000)
        other.write_out()
    run(other.store.sync())
    assert files(reopened(bench, other.device.image)) == {**expected(b"a"), b"more": content}


# -- damage ----------------------------------------------------------------------------


def damaged(bench: Bench, image: bytearray) -> Bench:
    other = Bench(bench.directory / "damaged", RecordingDevice(image), boot="next")
    assert other.store.damage is not None
    assert "had been flushed and is not whole" in other.store.damage
    assert other.store.read_only
    return other


def check_read_only(bench: Bench) -> None:
    """Reads are served; nothing is written; it closes without a fault."""
    store = bench.store
    with pytest.raises(OSError, match="Read-only") as caught:
        run(store.create(1, b"new", FILE, 0, 0))
    assert caught.value.errno == errno.EROFS
    run(store.sync())
    run(store.tick())
    run(store.close())
    assert bench.device.bytes_written == 0


@pytest.mark.parametrize("sector", [0, 512 * 9, 512 * 20])
def test_a_bad_frame_that_a_later_one_calls_flushed_is_damage(bench: Bench, sector: int) -> None:
    _, second, _ = three_units(bench)
    run(bench.store.sync())
    bench.write(bench.make(b"d"), b"the frame that tells")
    bench.write_out()
    image = bytearray(bench.device.image)
    flip(image, second.address + sector)
    other = damaged(bench, image)
    assert files(other.store) == expected(b"a")
    check_read_only(other)


def test_damage_is_seen_many_segments_away_from_the_frame_that_tells(bench: Bench) -> None:
    unit = large_unit(bench)
    run(bench.store.sync())
    bench.write(bench.make(b"d"), b"the frame that tells")
    bench.write_out()
    image = bytearray(bench.device.image)
    wipe(image, unit[0].address)
    other = damaged(bench, image)
    assert files(other.store) == expected(b"a")
    check_read_only(other)


def test_damage_in_the_frame_that_leads_to_the_next_segment_is_seen(bench: Bench) -> None:
    unit = large_unit(bench)
    run(bench.store.sync())
    bench.write(bench.make(b"d"), b"the frame that tells")
    bench.write_out()
    leading = [
        frame
        for frame, after in pairwise(unit)
        if after.address != frame.address + frame.frame_length
    ]
    assert leading
    for frame in leading:
        image = bytearray(bench.device.image)
        flip(image, frame.address + 100)
        assert files(damaged(bench, image).store) == expected(b"a")


def test_a_torn_frame_of_an_older_epoch_is_no_damage(bench: Bench) -> None:
    """Stale frames say what was flushed in their time, which is before the end."""
    three_units(bench)
    image = bytearray(bench.device.image)
    for header in frames_written(bench.device)[1:]:
        wipe(image, header.address + BLOCK)
    for number in range(3):
        boot = f"boot {number}"
        other = Bench(bench.directory / f"x{number}", RecordingDevice(image), boot=boot)
        assert other.store.damage is None
        other.write(other.make(b"n%d" % number), noise(SIZE))
        run(other.store.sync())
        image = bytearray(other.device.image)
    assert reopened(bench, image).damage is None


def test_a_fresh_ring_can_be_looked_at_read_only(bench: Bench) -> None:
    device = new_device()
    device.read_only = True
    other = Bench(bench.directory / "x", device, boot="next")
    assert other.names() == []
    check_read_only(other)


def test_a_ring_that_was_not_closed_can_be_looked_at_read_only(bench: Bench) -> None:
    three_units(bench)
    device = RecordingDevice(bytearray(bench.device.image), read_only=True)
    other = Bench(bench.directory / "x", device, boot="next")
    assert files(other.store) == expected(b"a", b"b", b"c")
    check_read_only(other)


# -- checkpoints -----------------------------------------------------------------------


def closed_with_files(bench: Bench) -> bytearray:
    for name in (b"a", b"b", b"c"):
        bench.write(bench.make(name), noise(SIZE, ord(name)))
    run(bench.store.close())
    return bytearray(bench.device.image)


def test_a_tick_beside_the_end_leaves_the_mark_of_a_clean_end(bench: Bench) -> None:
    """The last checkpoint puts no ids aside, so that a tick asks for another one."""
    bench.make(b"file")
    run(bench.store.close())
    run(bench.store.tick())
    assert bench.store.counters.checkpoints == 2
    assert read_superblocks(bench.device, "ring").newest.flags & SuperblockFlag.CLEAN


def test_a_clean_end_needs_no_replay(bench: Bench) -> None:
    image = closed_with_files(bench)
    store = reopened(bench, image)
    assert store.counters.replayed_frames == 0
    assert files(store) == expected(b"a", b"b", b"c")


def test_an_older_checkpoint_and_replay_give_the_same(bench: Bench) -> None:
    image = closed_with_files(bench)
    wipe(image, bench.store.superblock.address)
    store = reopened(bench, image)
    assert store.counters.replayed_frames > 0
    assert files(store) == expected(b"a", b"b", b"c")


def test_where_both_checkpoints_are_damaged_the_ring_is_refused(bench: Bench) -> None:
    image = closed_with_files(bench)
    for address in SUPERBLOCK_ADDRESSES:
        superblock = Superblock.unpack(image[address : address + BLOCK])
        if superblock.checkpoint.stored:
            flip(image, superblock.checkpoint.address)
        else:
            wipe(image, address)
    with pytest.raises(DeviceError, match="fails its checksum; the index"):
        bench.open_image(image)


def test_where_the_newest_checkpoint_is_damaged_the_one_before_leads_to_the_same_state(
    bench: Bench,
) -> None:
    for number in range(3):
        bench.write(bench.make(b"%d" % number), noise(100_000, number))
        run(bench.store.checkpoint())
    bench.write(bench.make(b"later"), noise(50_000))
    run(bench.store.sync())
    image = bytearray(bench.device.image)
    flip(image, bench.store.superblock.checkpoint.address + 8)
    store = bench.open_image(image)
    assert sorted(entry.name for _, entry in run(store.list_directory(1, 0, 100))) == [
        b"0", b"1", b"2", b"later",
    ]  # fmt: skip
    for number in range(3):
        ino = run(store.lookup(1, b"%d" % number)).inode.ino
        assert bytes(run(store.read(ino, 0, 100_000))) == noise(100_000, number)
    run(store.sync())
    audit(store)


def test_a_checkpoint_write_that_was_lost_is_not_taken_for_one(bench: Bench) -> None:
    """What lay there before is whole in itself; the pointer to it has another checksum. The
    checkpoint before it leads to the same."""
    image = closed_with_files(bench)
    wipe(image, bench.store.superblock.checkpoint.address)
    assert files(reopened(bench, image)) == expected(b"a", b"b", b"c")


@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_no_flipped_bit_of_a_closed_ring_gives_wrong_bytes(
    closed_image: bytearray, bench: Bench, data: st.DataObject
) -> None:
    """Refused, or EIO, or right: and no name is missing."""
    ring_end = DATA_START + 60 * BLOCK
    places = st.one_of(
        st.integers(DATA_START, ring_end),
        *[st.integers(at, at + BLOCK - 1) for at in SUPERBLOCK_ADDRESSES],
    )
    image = bytearray(closed_image)
    flip(image, data.draw(places), data.draw(st.integers(0, 7)))
    try:
        store = bench.open_image(image)
    except DeviceError:
        return
    names = [entry.name for _, entry in run(store.list_directory(1, 0, 100))]
    assert sorted(names) == [b"a", b"b", b"c"]
    for name in names:
        try:
            content = bytes(run(store.read(run(store.lookup(1, name)).inode.ino, 0, SIZE)))
        except OSError as failure:
            assert failure.errno == errno.EIO
            continue
        assert content == noise(SIZE, ord(name))


@pytest.fixture
def closed_image(tmpfs_bench: Callable[..., Bench]) -> bytearray:
    return closed_with_files(tmpfs_bench("closed"))


@pytest.fixture
def tmpfs_bench(bench: Bench) -> Callable[..., Bench]:
    """`tmpfs_bench(name, device=None)`: a store beside the others."""

    def make(name: str, device: RecordingDevice | None = None) -> Bench:
        (bench.directory / name).mkdir()
        return Bench(bench.directory / name, device or new_device())

    return make


# -- the next segment ------------------------------------------------------------------


def test_a_link_leads_to_a_segment_that_was_not_known_in_time(bench: Bench) -> None:
    """All frames of a segment were written while none was free; then one became free."""
    ring = bench.store._appender.ring
    while ring.position.offset < MIB - 30 * BLOCK:
        bench.write(bench.make(b"f%d" % ring.position.sequence), noise(5 * BLOCK))
        bench.write_out()
    last = frames_written(bench.device)[-1]
    # As if no segment had been free when these frames were made.
    announced = ring.position.next_segment
    object.__setattr__(ring.position, "next_segment", NO_SEGMENT)
    bench.write(bench.make(b"unlinked"), noise(BLOCK))
    bench.write_out()
    assert frames_written(bench.device)[-1].next_segment == NO_SEGMENT
    assert last.next_segment == announced
    ring.choose_next()
    bench.write(bench.make(b"behind"), noise(60 * BLOCK, 9))
    run(bench.store.sync())
    assert any(frame.frame_length == BLOCK for frame in frames_written(bench.device)), "a link"
    store = reopened(bench, bench.device.image)
    assert files(store)[b"behind"] == noise(60 * BLOCK, 9)
    assert store._appender.ring.position.segment != Geometry(MIB, 16).segment(last.address)
