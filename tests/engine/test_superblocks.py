"""The two superblock slots: the newest valid one wins, and what cannot be trusted is
refused with what to do about it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvfs.engine.device import DeviceError
from kvfs.engine.format import BLOCK, DATA_START, SUPERBLOCK_ADDRESSES, Superblock
from kvfs.engine.io import run
from kvfs.engine.superblocks import format_device, read_superblocks
from tests.engine.audit import audit
from tests.engine.kit import MIB, Bench, flip, new_device, noise, wipe
from tests.support.devices import RecordingDevice
from tests.support.images import from_a_newer_release


def slots(device: RecordingDevice) -> list[Superblock]:
    """Both, the newest last."""
    image = bytes(device.image)
    found = [Superblock.unpack(image[at : at + BLOCK]) for at in SUPERBLOCK_ADDRESSES]
    return sorted(found, key=lambda superblock: superblock.generation)


def put(device: RecordingDevice, superblock: Superblock) -> None:
    device.image[superblock.address : superblock.address + BLOCK] = superblock.pack()


def test_a_fresh_device_has_two_valid_slots_of_one_ring() -> None:
    older, newer = slots(new_device())
    assert newer == older.next()


def test_the_newest_slot_wins() -> None:
    device = new_device()
    put(device, slots(device)[-1].next(operation=77))
    read = read_superblocks(device, "ring")
    assert read.newest.operation == 77
    assert not read.one_is_lost


@pytest.mark.parametrize("start", [0, 512, 2048, BLOCK - 512])
def test_a_torn_slot_falls_back_to_the_older(start: int) -> None:
    device = new_device()
    older, newer = slots(device)
    flip(device.image, newer.address + start + 8)
    read = read_superblocks(device, "ring")
    assert read.newest == older
    assert read.one_is_lost


def test_a_slot_that_cannot_be_read_falls_back_to_the_other() -> None:
    device = new_device()
    older, newer = slots(device)

    def fail(kind: str, address: int, length: int) -> None:
        if kind == "read" and address <= newer.address < address + length:
            raise OSError(errno.EIO, "bad sector")

    device.fail = fail
    assert read_superblocks(device, "ring").newest == older


def test_two_bad_slots_are_refused_with_the_mkfs_line() -> None:
    device = new_device()
    for superblock in slots(device):
        flip(device.image, superblock.address + 100)
    with pytest.raises(DeviceError, match=r"checksum mismatch.* kvfs mkfs ring --force"):
        read_superblocks(device, "ring")


def test_a_foreign_device_is_refused_with_the_mkfs_line() -> None:
    device = RecordingDevice(bytearray(noise(2 * MIB)))
    with pytest.raises(DeviceError, match=r"no KVFS superblock.* kvfs mkfs ring --force"):
        read_superblocks(device, "ring")


def test_a_tiny_device_is_refused() -> None:
    with pytest.raises(DeviceError, match="too small"):
        read_superblocks(RecordingDevice.of_size(BLOCK), "ring")


@pytest.mark.parametrize("which", [0, 1])
def test_a_slot_of_a_newer_release_is_refused_also_when_the_other_is_known(which: int) -> None:
    device = new_device()
    superblock = slots(device)[which]
    newer = from_a_newer_release(superblock, {7: "lossy"})
    device.image[superblock.address : superblock.address + BLOCK] = newer
    with pytest.raises(DeviceError, match=r"^ring: .*: lossy \(bit 7\); use a newer kvfs"):
        read_superblocks(device, "ring")


def test_a_device_that_was_cut_is_refused() -> None:
    device = new_device()
    cut = RecordingDevice(device.image[: -4 * BLOCK])
    with pytest.raises(DeviceError, match="is cut"):
        read_superblocks(cut, "ring")


def test_a_device_that_has_grown_is_taken() -> None:
    device = new_device()
    grown = RecordingDevice(device.image + bytes(MIB))
    assert read_superblocks(grown, "ring").newest == slots(device)[-1]


@pytest.mark.parametrize("segment_size", [0, MIB // 2, MIB + BLOCK, 2048 * MIB])
def test_a_segment_size_out_of_bounds_is_refused(segment_size: int) -> None:
    with pytest.raises(DeviceError, match="segment size"):
        format_device(RecordingDevice.of_size(64 * MIB), segment_size)


def test_a_device_for_too_few_segments_is_refused_with_what_is_needed() -> None:
    device = RecordingDevice.of_size(DATA_START + 11 * MIB)
    with pytest.raises(DeviceError, match="13 MiB"):
        format_device(device, MIB)
    assert not any(device.image), "it has been written to"


def test_ids_are_new_after_the_newest_slot_was_lost(tmpfs: Path) -> None:
    """The lost one alone said which ids had been given."""
    bench = Bench(tmpfs)
    inos = [bench.make(b"file %d" % number) for number in range(3)]
    run(bench.store.sync())
    image = bytearray(bench.device.image)
    wipe(image, slots(bench.device)[-1].address)
    other = bench.open_image(image)
    created = run(other.create(1, b"new", 0o100644, 0, 0)).inode.ino
    assert created > max(inos)


def test_ids_are_new_also_when_the_newest_slot_was_lost_twice(bench: Bench) -> None:
    bench.make(b"of the first")
    run(bench.store.sync())
    inos = set()
    for number in range(4):
        image = bytearray(bench.device.image)
        wipe(image, slots(bench.device)[-1].address)
        bench = Bench(bench.directory / "next", RecordingDevice(image), boot=str(number))
        inos.add(bench.make(b"file %d" % number))
        run(bench.store.sync())
        bench.directory = bench.directory.parent
    assert len(inos) == 4
    audit(bench.store)


def test_each_mount_begins_an_epoch_and_a_window_of_ids(bench: Bench) -> None:
    first = bench.store.superblock
    run(bench.store.close())
    second = bench.open().superblock
    assert second.epoch == first.epoch + 1
    bench.open()
    assert bench.store.superblock.epoch == second.epoch + 1
    assert bench.store.superblock.id_floor > second.id_floor


def test_opening_writes_both_superblocks_and_nothing_else(bench: Bench) -> None:
    bench.make(b"file")
    run(bench.store.close())
    written = bench.device.bytes_written
    bench.open()
    assert bench.device.bytes_written - written == 2 * BLOCK
