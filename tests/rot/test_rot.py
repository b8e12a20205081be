"""Bit rot and devices that lie: any damage to any structure of a ring of any past."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs.engine.check import check
from kvfs.engine.device import DeviceError
from kvfs.engine.format import BLOCK, DATA_START, FrameHeader
from tests.engine.kit import MIB, flip
from tests.rot.anatomy import anatomy
from tests.rot.damages import KINDS, Damaged, damaged
from tests.rot.rings import NAMES
from tests.rot.verdict import judge
from tests.support.devices import RecordingDevice

# Those that every ring has; a ring without a log has none of it to be hit.
STRUCTURES = [
    "newest superblock", "older superblock", "checkpoint record", "part of the bitmap",
    "node of names, level 0", "node of names, level 1", "node of names, level 2",
    "node of names, level 3", "node of extents, level 0", "node of extents, level 1",
    "node of extents, level 2", "frame header", "record headers", "items", "data, none",
    "data, zstd", "data, planes",
]  # fmt: skip
LOG = ["frame header of the log", "record headers of the log", "items of the log"]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of errors are told of, as they should be."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_all_kinds_of_structures_are_there_to_be_damaged() -> None:
    for name in NAMES:
        found = anatomy(name).structures
        assert set(STRUCTURES) <= found.keys()
        assert (name not in ("closed", "turned")) == (set(LOG) <= found.keys())


@pytest.mark.parametrize("kind", [*STRUCTURES, *LOG])
def test_a_flipped_bit_in_any_structure_costs_no_more_than_itself(kind: str) -> None:
    random = Random(kind)
    names = [name for name in NAMES if kind in anatomy(name).structures]
    one = anatomy(random.choice(names))
    structure = random.choice([s for s in one.structures[kind] if s.is_used])
    image = bytearray(one.ring.image)
    at = structure.address + random.randrange(structure.length)
    flip(image, at, random.randrange(8))
    judge(one, Damaged(image, frozenset({at // BLOCK}), f"a bit of the {kind}", is_wide=False))


@settings(max_examples=16, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 1 << 32))
def test_no_damage_shows_wrong_bytes_or_costs_what_is_whole(kind: str, seed: int) -> None:
    """It mounts, or is refused with advice; EIO for what is lost alone; writes go on, or it is said
    why not; a check finds it; a repair brings back all that is whole."""
    random = Random(seed)
    one = anatomy(random.choice(NAMES))
    judge(one, damaged(one, random, kind))


@pytest.mark.parametrize("name", NAMES)
def test_a_device_that_was_cut_is_refused_and_told_from_a_damaged_one(name: str) -> None:
    """At any block: where its size is restored, what lay there is all that is lost (see
    `cut and filled`)."""
    image = anatomy(name).ring.image
    for end in (0, BLOCK, DATA_START // 2, DATA_START, len(image) // 2, len(image) - BLOCK):
        with pytest.raises(DeviceError, match=r"is cut: |is too small to be a KVFS ring|no KVFS"):
            check(RecordingDevice(bytearray(image[:end])), "ring")


def test_a_stale_older_superblock_is_found_and_written_again() -> None:
    one = anatomy("closed")
    (older,) = one.structures["older superblock"]
    image = bytearray(one.ring.image)
    stale = one.ring.stages[0][older.address : older.address + BLOCK]
    image[older.address : older.address + BLOCK] = stale
    device = RecordingDevice(image)
    assert [f.message for f in check(device, "ring", repair=True).findings] == [
        f"slot {int(older.address > 0)}: it is older than it should be: a write was lost"
    ]
    assert check(device, "ring").is_clean


def test_both_checkpoints_lost_cost_nothing_that_frames_tell_of() -> None:
    """Neither the record nor the bitmap of any of the two can be read."""
    one = anatomy("closed")
    (record,) = one.structures["checkpoint record"]
    image = bytearray(one.ring.image)
    start = min(s.address for s in one.structures["node of extents, level 2"]) - 8 * BLOCK
    image[start : record.address + BLOCK] = bytes(record.address + BLOCK - start)
    hit = frozenset(range(start // BLOCK, record.address // BLOCK + 1))
    judge(one, Damaged(image, hit, "the end of both checkpoints", is_wide=True))
    report = check(RecordingDevice(image), "ring")
    assert any("taken together" in finding.message for finding in report.findings)
    assert not report.lost


def test_a_frame_of_an_older_epoch_that_claims_to_be_flushed_is_no_damage() -> None:
    """A mount has begun without it since: it is of another history."""
    one = anatomy("turned and killed")
    image = bytearray(one.ring.image)
    frame = one.structures["frame header of the log"][-1].address
    header = FrameHeader.unpack(image[frame : frame + FrameHeader.SIZE])
    used = [s.address // MIB for same in one.structures.values() for s in same if s.is_used]
    free = next(n * MIB for n in range(1, len(image) // MIB) if n not in used)
    other = replace(
        header, epoch=0, sequence=header.sequence + 9, flushed=header.sequence + 8, address=free,
        record_count=0, item_bytes=0, head_length=BLOCK, frame_length=BLOCK,
    )  # fmt: skip
    image[free : free + FrameHeader.SIZE] = other.pack()
    assert check(RecordingDevice(image), "ring").is_clean
    judge(one, Damaged(image, frozenset(), "a frame of another history", is_wide=False))
