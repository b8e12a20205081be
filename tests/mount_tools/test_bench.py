"""`kvfs bench` on a real mount."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvfs.engine.codec import Codec, Layout, encode
from mount_tools.bench import kv
from mount_tools.bench.device import BLOCK, Device, opened_device
from mount_tools.bench.verdict import verdict
from mount_tools.bench.work import LAYER, Row, Work
from mount_tools.common import CommandError
from mount_tools.stat import extents_of
from tests.conftest import MounterMaker
from tests.support.command import error_line
from tests.support.mounter import KVFS, Mounter, kvfs

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def shared(fuse: None) -> Iterator[Mounter]:
    mounter = Mounter("512M")
    try:
        mounter.mount()
        (mounter.mountpoint / "kept").write_bytes(b"kept")
        yield mounter
    finally:
        mounter.close()


@pytest.fixture(scope="module")
def measured(shared: Mounter) -> dict[str, Any]:
    result = kvfs("bench", shared.mountpoint, "--seconds", "1", "--json")
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_all_is_measured_beside_the_image(measured: dict[str, Any], shared: Mounter) -> None:
    rows = {row["name"]: row for row in measured["rows"]}
    assert all(row["kvfs"] > 0 and row["rounds"] > 0 for row in rows.values())
    beside = {name for name, row in rows.items() if row["device"] is not None}
    assert beside == {
        "save, one fsync", "restore, cold, O_DIRECT", "restore, cold, plain reads",
        "256 KiB files, cold", "4 KiB reads, cold",
    }  # fmt: skip
    for name in beside:
        assert rows[name]["device"] > 0 and rows[name]["ratio"] > 0
    assert measured["left_out"] == []
    assert measured["source"] == str(shared.image)
    assert measured["session_bytes"] >= 4 * LAYER
    assert measured["verdict"].startswith("restore reaches ")


def test_nothing_is_left_of_it(measured: dict[str, Any], shared: Mounter) -> None:
    assert os.listdir(shared.mountpoint) == ["kept"]
    assert (shared.mountpoint / "kept").read_bytes() == b"kept"
    assert sorted(os.listdir(shared.directory)) == ["kvfs.log", "mnt", "ring.img"]


def test_a_directory_of_a_mount_is_enough_and_people_get_a_table(shared: Mounter) -> None:
    place = shared.mountpoint / "place"
    place.mkdir()
    shown = kvfs("bench", place, "--seconds", "1").stdout.splitlines()
    assert list(place.iterdir()) == []
    place.rmdir()
    assert shown[0].startswith(f"{shared.mountpoint} on {shared.image}: ")
    assert shown[1].split() == ["work", "KVFS", "device", "unit", "ratio", "rounds"]
    assert shown[-1].startswith("restore reaches ")


def test_an_interrupt_leaves_nothing(shared: Mounter) -> None:
    command = [KVFS, "bench", shared.mountpoint, "--seconds", "600"]
    # Who runs the tests in the background may have it ignored.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, preexec_fn=heard) as process:
        try:
            deadline = time.monotonic() + 60
            while not list(shared.mountpoint.glob(".kvfs-bench-*/session/layer.003")):
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out) == (1, "")
    assert errors == "kvfs: interrupted; what it wrote is removed\n"
    assert os.listdir(shared.mountpoint) == ["kept"]
    assert sorted(os.listdir(shared.directory)) == ["kvfs.log", "mnt", "ring.img"]


def test_it_refuses_what_it_cannot_measure(make_mounter: MounterMaker, tmp_path: Path) -> None:
    mounter = make_mounter("64M")
    mounter.mount()
    line = error_line(kvfs("bench", mounter.mountpoint, check=False))
    assert "free" in line and "this would make sessions of others go" in line
    mounter.umount()
    mounter.mount("-o", "ro")
    line = error_line(kvfs("bench", mounter.mountpoint, check=False))
    assert line == f"{mounter.mountpoint} is read-only, and nothing can be measured without writing"
    assert "is not on KVFS" in error_line(kvfs("bench", tmp_path, check=False))


def test_a_block_device_is_read_and_not_written(loop_device: Path, tmp_path: Path) -> None:
    with opened_device(loop_device, MIB) as device:
        assert device.fd is not None
        assert device.beside is None
        assert device.missing == ["writes of the device are left out: they would destroy the ring"]


def test_what_may_not_be_read_is_left_out(tmp_path: Path) -> None:
    with opened_device(tmp_path / "gone", MIB) as device:
        assert device.read_speed([tmp_path]) is None
        assert device.reads([tmp_path], BLOCK) is None
        assert device.write_speed([]) is None
        assert device.missing[0].startswith("reads of the device are left out: ")


def test_the_device_is_read_where_the_file_lies(shared: Mounter) -> None:
    path = shared.mountpoint / "where"
    path.touch()
    os.setxattr(path, "user.kvfs.codec", b"none")
    data = os.urandom(3 * MIB + 5)
    path.write_bytes(data)
    os.setxattr(path, "user.kvfs.demote", b"1")
    with path.open("rb") as file:
        os.fsync(file.fileno())
    assert len(list(extents_of(path))) > 1
    reads: list[tuple[int, int]] = []

    class Watched(Device):
        def _read_all(self, requests: Any) -> None:
            reads.extend(requests)
            super()._read_all(requests)

    with opened_device(shared.image, MIB) as device:
        assert device.fd is not None
        speed = Watched(device.fd, None).read_speed([path])
        assert speed is not None and speed > 0
        places = sorted(reads)
        found = _read(device.fd, places)
    path.unlink()
    assert sum(length for _, length in places) == -(-len(data) // BLOCK) * BLOCK
    assert found[: len(data)] == data


def _read(fd: int, places: list[tuple[int, int]]) -> bytes:
    found = b""
    for address, length in places:
        buffer = kv.aligned(length)
        assert os.preadv(fd, [buffer], address) == length
        found += buffer
    return found


def test_other_bytes_than_were_written_end_it(shared: Mounter) -> None:
    directory = shared.mountpoint / "work"
    directory.mkdir()
    work = Work(directory, Device(None, None), 4, 32)
    steps = work.steps()
    next(steps)[1]()
    with (work.session / "layer.002").open("r+b") as file:
        file.seek(LAYER - 1)
        last = work._layer(2)[-1]
        file.write(bytes([last ^ 1]))
    with pytest.raises(CommandError, match=r"layer\.002 has other bytes than were written"):
        next(steps)[1]()
    subprocess.run(["rm", "-r", directory], check=True)


def test_what_is_written_compresses_like_a_kv_cache() -> None:
    (layer,) = kv.layers(1, MIB)
    stored = encode(Codec.PLANES, Layout(2, int(np.prod(kv.ROW))), layer)
    assert stored is not None
    assert 1.3 < MIB / len(stored) < 1.7


def rows(direct: float, plain: float, device: float | None) -> dict[str, Row]:
    raw = [] if device is None else [device]
    figures = {"restore, cold, O_DIRECT": direct, "restore, cold, plain reads": plain}
    return {name: Row(name, "MB/s", [value], raw) for name, value in figures.items()}


@pytest.mark.parametrize(
    ("figures", "compressed", "load", "expected"),
    [
        ((900, 800, 1000), 1.0, 9.0, "restore reaches 0.90 of the device: good"),
        ((900, 300, 1000), 1.0, 0.1, "restore reaches 0.90 of the device: good; plain reads are"),
        ((600, 600, 1000), 1.5, 0.1, "restore reaches 0.60 of the device: fair; it is stored 1.5"),
        ((300, 300, 1000), 1.0, 0.1, "restore reaches 0.30 of the device: poor; look at what else"),
        ((300, 300, 1000), 1.5, 3.0, "restore reaches 0.30 of the device: poor; others kept the"),
        ((3500, 3000, 7000), 1.0, 0.1, "restore reaches 0.50 of the device: fair; FUSE carries no"),
        ((900, 800, None), 1.0, 0.1, "restore reaches 900 MB/s; the device was not measured"),
    ],
)
def test_the_verdict_says_what_to_look_at(
    figures: tuple[float, float, float | None], compressed: float, load: float, expected: str
) -> None:
    said = verdict(rows(*figures), compressed, load, Path("/"))
    assert said.startswith(expected)
    assert "\n" not in said
