"""Cleaning: what is live is carried forward, exact, and its segments are free again."""

from __future__ import annotations

import errno
from pathlib import Path
from random import Random

import pytest

from kvfs.engine.format import BLOCK
from kvfs.engine.io import run
from tests.engine.audit import audit
from tests.engine.kit import MIB, Bench, flip, new_device, noise


def painted(number: int, version: int, size: int) -> bytes:
    """A pattern of its own for each version of a file."""
    return noise(size, number * 100_003 + version)


def fill(bench: Bench, share: float, size: int) -> list[int]:
    """Files of `size` bytes until so much of the ring is in use."""
    inos = []
    total = bench.store.usage().total
    while bench.store.usage().free > total * (1 - share):
        inos.append(bench.make(b"file-%d" % len(inos)))
        bench.write(inos[-1], painted(len(inos) - 1, 0, size))
    return inos


@pytest.mark.parametrize("size", [9_000, 120_000, 700_000])
def test_a_ring_that_is_turned_over_at_85_percent_keeps_every_byte(tmpfs: Path, size: int) -> None:
    bench = Bench(tmpfs, new_device(segments=40))
    inos = fill(bench, 0.85, size)
    versions = dict.fromkeys(range(len(inos)), 0)
    random = Random(size)
    written = cleaned = 0
    while written < 5 * bench.device.size:
        number = random.randrange(len(inos))
        run(bench.store.unlink(1, b"file-%d" % number))
        inos[number] = bench.make(b"file-%d" % number)
        versions[number] += 1
        bench.write(inos[number], painted(number, versions[number], size))
        counters = bench.store.counters
        if counters.device_written > bench.device.size:
            written += counters.device_written
            cleaned += counters.cleaned_segments
            run(bench.store.close())
            bench.open()
    assert cleaned > 0
    run(bench.store.sync())
    audit(bench.store)
    for number, ino in enumerate(inos):
        assert bench.read(ino) == painted(number, versions[number], size)


def test_two_checkpoints_free_several_segments(tmpfs: Path) -> None:
    """Cleaning begins while there is room for more than one."""
    bench = Bench(tmpfs, new_device(segments=192))
    inos = fill(bench, 0.85, 120_000)
    random = Random(1)
    while bench.store.counters.device_written < 2 * bench.device.size:
        number = random.randrange(len(inos))
        run(bench.store.unlink(1, b"file-%d" % number))
        bench.write(bench.make(b"file-%d" % number), noise(120_000, number))
    counters = bench.store.counters
    assert counters.cleaned_segments > 30
    assert counters.checkpoints < counters.cleaned_segments


def test_a_cleaned_segment_is_free_two_checkpoints_later(bench: Bench) -> None:
    for number in range(40):
        bench.write(bench.make(b"%d" % number), painted(number, 0, 100_000))
    run(bench.store.sync())
    for number in range(40):
        if number % 4:
            run(bench.store.unlink(1, b"%d" % number))
    for _ in range(2):
        run(bench.store.checkpoint())
    ring = bench.store._appender.ring
    before = ring.free_segments
    run(bench.store.clean())
    for _ in range(2):
        run(bench.store.checkpoint())
    assert ring.free_segments > before
    audit(bench.store)
    for number in range(0, 40, 4):
        assert bench.read(bench.find(b"%d" % number)) == painted(number, 0, 100_000)


def test_nodes_of_the_index_are_carried_too(bench: Bench) -> None:
    """Directories only: all that is live is nodes and the bitmap."""
    for number in range(2000):
        bench.make(b"directory-%d" % number, mode=0o40755)
    run(bench.store.checkpoint())
    ring = bench.store._appender.ring
    nodes = set(range(ring.position.segment + 1))
    bench.write(bench.make(b"file"), noise(3 * MIB))
    run(bench.store.sync())
    run(bench.store.unlink(1, b"file"))
    run(bench.store.checkpoint())
    victim = ring.victim()
    assert victim in nodes
    run(bench.store.clean())
    for _ in range(2):
        run(bench.store.checkpoint())
    assert ring.live_bytes(victim) == 0
    audit(bench.store)
    assert len(bench.names()) == 2000


def test_what_fails_its_checksum_is_carried_and_stays_an_error(bench: Bench) -> None:
    good, bad, gone = (bench.make(name) for name in (b"good", b"bad", b"gone"))
    for ino in (good, bad):
        bench.write(ino, painted(ino & 0xFFFF, 0, 60_000))
    bench.write(gone, noise(MIB))
    run(bench.store.sync())
    run(bench.store.unlink(1, b"gone"))
    run(bench.store.close())
    bench.open()
    (extent,) = run(bench.store.extents(bad, 0, 1))
    flip(bench.device.image, extent.address + 100)
    run(bench.store.clean())
    (moved,) = run(bench.store.extents(bad, 0, 1))
    assert moved.address != extent.address
    assert bench.read(good) == painted(good & 0xFFFF, 0, 60_000)
    with pytest.raises(OSError, match="checksum") as failure:
        bench.read(bad)
    assert failure.value.errno == errno.EIO


def test_a_segment_whose_frames_cannot_be_read_is_left_alone(bench: Bench) -> None:
    inos = [bench.make(b"%d" % number) for number in range(4)]
    for ino in inos:
        bench.write(ino, painted(ino & 0xFFFF, 0, 60_000))
        run(bench.store.sync())
    bench.write(bench.make(b"other"), noise(2 * MIB))
    run(bench.store.unlink(1, b"0"))
    run(bench.store.close())
    bench.open()
    (extent,) = run(bench.store.extents(inos[2], 0, 1))
    flip(bench.device.image, extent.address - BLOCK + 20)  # in the head of its frame
    run(bench.store.clean())
    segment = bench.store._appender.ring.geometry.segment(extent.address)
    assert segment in bench.store._appender.ring.unmovable
    for ino in inos[1:]:
        assert bench.read(ino) == painted(ino & 0xFFFF, 0, 60_000)


def test_a_ring_full_of_small_files_can_be_emptied_and_filled_again(tmpfs: Path) -> None:
    bench = Bench(tmpfs, new_device(segments=16))
    counts = []
    for round_number in range(3):
        made = 0
        with pytest.raises(OSError, match="No space left") as failure:
            while True:
                ino = bench.make(b"%d" % made)
                for name in range(4):
                    value = noise(1500, made + name)
                    run(bench.store.set_xattr(ino, b"user.x%d" % name, value))
                bench.write(ino, noise(3000, made))
                made += 1
        assert failure.value.errno == errno.ENOSPC
        counts.append(made)
        for name in bench.names():
            run(bench.store.unlink(1, name))
        if round_number % 2:
            run(bench.store.close())
            bench.open()
    assert min(counts) > 0.85 * max(counts)
    run(bench.store.sync())
    audit(bench.store)
