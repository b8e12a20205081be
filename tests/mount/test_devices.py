"""A mount whose device refuses, is full, or does not answer: see tests/support/disk.py."""

from __future__ import annotations

import errno
import json
import mmap
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from kvfs.engine.device import DeviceError, FileDevice
from kvfs.engine.format import DATA_START, ROOT_INODE
from kvfs.engine.io import InlineExecutor, run
from kvfs.engine.store import Store
from kvfs.mount.mounts import find_mount
from kvfs.tiers.oplog import OperationLog
from mount_tools.processes import wait_for_end
from tests.conftest import MounterMaker
from tests.support.calls import errno_of
from tests.support.command import error_line
from tests.support.disk import Disk, Rule
from tests.support.images import digest
from tests.support.mounter import Mounter, kvfs

KIB, MIB = 1024, 1024 * 1024
DEADLINE = "2"
# What the slowest machine needs for what must not wait for the device at all.
SOON_SECONDS = 60


@pytest.fixture
def on_disk(make_mounter: MounterMaker) -> Iterator[tuple[Mounter, Disk]]:
    """Not mounted yet, on an image that can be told to fail."""
    mounter = make_mounter("256M")
    with closing(Disk(mounter.image, mounter.directory / "disk")) as disk:
        mounter.image = disk.path
        yield mounter, disk
        disk.work()
        mounter.end()


def mount(mounter: Mounter, *arguments: str) -> Path:
    mounter.mount("--deadline", DEADLINE, *arguments)
    return mounter.mountpoint


def content(number: int, size: int) -> bytes:
    return number.to_bytes(4, "little") * (size // 4)


def make_cold(mounter: Mounter, count: int, size: int, *arguments: str) -> Path:
    """Files of the content that their names say, which are on the device alone."""
    point = mount(mounter)
    for number in range(count):
        os.setxattr(point, "user.kvfs.codec", b"none")
        (point / str(number)).write_bytes(content(number, size))
    mounter.umount()
    mount(mounter, *arguments)
    for number in range(count):
        extents(point / str(number))  # the index is in memory
    return point


def extents(path: Path) -> list[tuple[int, int]]:
    """Where the extents of a file lie: addresses and lengths."""
    found = json.loads(os.getxattr(path, "user.kvfs.extents"))
    return [(one["address"], one["stored"]) for one in found]


def read_direct(path: Path, offset: int = 0, size: int | None = None) -> bytes:
    """Past the kernel's page cache."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        length = os.fstat(fd).st_size if size is None else size
        buffer = mmap.mmap(-1, length)
        got = os.preadv(fd, [buffer], offset)
        return buffer[:got]
    finally:
        os.close(fd)


def write_synced(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.pwrite(fd, data, 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def at_once(calls: list[Callable[[], int | None]]) -> tuple[ThreadPoolExecutor, list]:
    clients = ThreadPoolExecutor(len(calls))
    return clients, [clients.submit(call) for call in calls]


def outcome(call: Callable[[], object]) -> int | None:
    try:
        call()
    except OSError as failure:
        return failure.errno
    return None


def soon(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + SOON_SECONDS
    while not holds():
        assert time.monotonic() < until, "it does not come"
        time.sleep(0.02)


def in_time(work: Callable[[], None]) -> None:
    """Where it hangs the test fails, and does not hang too."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SOON_SECONDS)
    assert not thread.is_alive(), "it waits for the device"
    if failures:
        raise failures[0]


# -- reads ---------------------------------------------------------------------------------


def test_one_bad_place_is_eio_and_what_lies_beside_it_is_read(
    on_disk: tuple[Mounter, Disk],
) -> None:
    mounter, disk = on_disk
    point = make_cold(mounter, 8, 512 * KIB)
    bad = extents(point / "3")[1]
    disk.fail(Rule(("read",), errno.EIO, bad[0], bad[0] + 1))
    for number in (0, 1, 2, 4, 5, 6, 7):
        assert (point / str(number)).read_bytes() == content(number, 512 * KIB)
    assert errno_of((point / "3").read_bytes) == errno.EIO
    first = extents(point / "3")[0][1]
    assert read_direct(point / "3", 0, first) == content(3, first)
    disk.work()
    assert read_direct(point / "3") == content(3, 512 * KIB)
    mounter.umount()


def test_reads_that_hang_hold_up_nothing_else(on_disk: tuple[Mounter, Disk]) -> None:
    """Small ones, that io_uring has, and large ones, that threads have, and more of them than
    there are of either. All else is done before the first of them has ended."""
    mounter, disk = on_disk
    count = 110
    point = make_cold(mounter, count + 2, 600 * KIB, "--deadline", "100")
    warm = point / "warm"
    write_synced(warm, content(7, MIB))
    read_direct(point / str(count))
    cold = extents(point / str(count + 1))
    # Everything but what one file needs.
    disk.fail(
        Rule(("read",), None, DATA_START, cold[0][0]),
        Rule(("read",), None, cold[-1][0] + cold[-1][1] + 4096),
    )
    sizes = [4096, 600 * KIB]
    hung = [
        lambda number=number: outcome(
            lambda: read_direct(point / str(number), 0, sizes[number % 2])
        )
        for number in range(count)
    ]
    clients, answers = at_once(hung)
    soon(lambda: disk.waiting > 60)

    def others() -> None:
        for _ in range(3):
            assert read_direct(warm) == content(7, MIB)
            assert len(os.listdir(point)) >= count
            assert os.stat(point / "5").st_size == 600 * KIB
            assert os.statvfs(point).f_bsize == 4096
            write_synced(point / "new", content(9, 300 * KIB))
            assert read_direct(point / "new") == content(9, 300 * KIB)
            assert os.getxattr(point, "user.kvfs.tier") == b"mixed"
        assert read_direct(point / str(count + 1)) == content(count + 1, 600 * KIB)

    in_time(others)
    assert not any(answer.done() for answer in answers)
    disk.work()
    assert {answer.result(SOON_SECONDS) for answer in answers} == {None}
    clients.shutdown()
    mounter.umount()


def test_reads_that_hang_take_no_memory_without_end(on_disk: tuple[Mounter, Disk]) -> None:
    mounter, disk = on_disk
    count = 200
    point = make_cold(mounter, count, 512 * KIB)
    disk.fail(Rule(("read",), None))
    clients = ThreadPoolExecutor(count)
    calls = [
        lambda number=number: outcome(lambda: read_direct(point / str(number)))
        for number in range(count)
    ]
    assert set(clients.map(lambda call: call(), calls)) == {errno.ETIMEDOUT}
    assert disk.waiting <= 128 + 8
    clients.shutdown()
    disk.work()


# -- writes --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["write", "flush"])
def test_after_a_failure_no_fsync_claims_anything_again(
    on_disk: tuple[Mounter, Disk], kind: str
) -> None:
    """Each that waits is told, and a later flush that succeeds proves nothing. What was
    answered is there after the next mount."""
    mounter, disk = on_disk
    point = mount(mounter)
    write_synced(point / "before", content(1, MIB))
    for number in range(8):
        (point / str(number)).write_bytes(content(number, 64 * KIB))
    disk.fail(Rule((kind,), errno.EIO, times=1))
    clients, answers = at_once(
        [lambda number=number: outcome(lambda: fsync(point / str(number))) for number in range(8)]
    )
    assert {answer.result(SOON_SECONDS) for answer in answers} == {errno.EIO}
    clients.shutdown()
    assert errno_of(fsync, point / "before") == errno.EIO
    assert errno_of((point / "0").write_bytes, b"more") == errno.EIO
    assert read_direct(point / "before") == content(1, MIB)
    assert "Input/output error" in mounter.stats()["failure"]
    assert "did not end well" in error_line(mounter.umount(check=False))
    mount(mounter)
    for number in range(1, 8):
        assert read_direct(point / str(number)) == content(number, 64 * KIB)
    mounter.umount()
    kvfs("fsck", mounter.image)


def test_writes_that_hang_end_at_the_deadline_and_go_on_when_the_device_does(
    on_disk: tuple[Mounter, Disk],
) -> None:
    mounter, disk = on_disk
    point = mount(mounter)
    write_synced(point / "before", content(1, MIB))
    disk.fail(Rule(("write", "flush"), None))
    for number in range(20):
        (point / str(number)).write_bytes(content(number, 64 * KIB))
    clients, answers = at_once(
        [lambda number=number: outcome(lambda: fsync(point / str(number))) for number in range(20)]
    )
    in_time(lambda: fsync_free(point))
    assert {answer.result(SOON_SECONDS) for answer in answers} == {errno.ETIMEDOUT}
    clients.shutdown()
    disk.work()
    fsync(point / "0")
    mounter.umount()
    kvfs("fsck", mounter.image)


def fsync_free(point: Path) -> None:
    """What needs no device, while others wait for it."""
    assert read_direct(point / "before") == content(1, MIB)
    assert read_direct(point / "3") == content(3, 64 * KIB)
    (point / "3").rename(point / "three")
    (point / "three").rename(point / "3")
    assert "before" in os.listdir(point)


@pytest.fixture
def small_filesystem() -> Iterator[Path]:
    """An ext4 of 96 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small filesystem")
    directory = Path(tempfile.mkdtemp(prefix="kvfs-small-", dir="/dev/shm"))
    image, point = directory / "ext4.img", directory / "mnt"
    point.mkdir()
    image.touch()
    os.truncate(image, 96 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", image, point], check=False)
    if mounted.returncode:
        pytest.skip("no loop devices here")
    yield point
    subprocess.run(["umount", point], check=True)
    image.unlink()
    point.rmdir()
    directory.rmdir()


def test_a_sparse_image_whose_filesystem_is_full(
    make_mounter: MounterMaker, small_filesystem: Path
) -> None:
    """KVFS has room, what is below it has none."""
    mounter = make_mounter("512M")
    # Only what is formatted takes space there.
    subprocess.run(
        ["cp", "--sparse=always", mounter.image, small_filesystem / "ring.img"], check=True
    )
    mounter.image = small_filesystem / "ring.img"
    point = mount(mounter)

    def write(number: int) -> int | None:
        return outcome(lambda: write_synced(point / str(number), os.urandom(MIB)))

    outcomes = list(map(write, range(100)))
    written = outcomes.index(errno.EIO)
    assert outcomes == [None] * written + [errno.EIO] * (100 - written) and written > 20
    assert "No space left" in mounter.stats()["failure"]
    for number in range(written):
        assert len(read_direct(point / str(number))) == MIB
    assert errno_of(fsync, point / "0") == errno.EIO
    assert "did not end well" in error_line(mounter.umount(check=False))
    # Nothing that was confirmed is lost, full as it is.
    kvfs("mount", point, mounter.image, "-o", "ro", "--warm-dir", mounter.warm_directory)
    assert all((point / str(number)).stat().st_size == MIB for number in range(written))
    kvfs("umount", point)


# -- the end -------------------------------------------------------------------------------


def test_a_mount_whose_device_is_dead_is_unmounted_and_its_daemon_ends(
    on_disk: tuple[Mounter, Disk],
) -> None:
    mounter, disk = on_disk
    point = make_cold(mounter, 20, 600 * KIB)
    disk.fail(Rule(("read", "write", "flush"), None))
    clients, answers = at_once(
        [
            lambda number=number: outcome(
                lambda: read_direct(point / str(number), 0, [4096, 600 * KIB][number % 2])
            )
            for number in range(20)
        ]
    )
    assert {answer.result(SOON_SECONDS) for answer in answers} == {errno.ETIMEDOUT}
    clients.shutdown()
    (point / "new").write_bytes(content(5, MIB))

    def end() -> None:
        told = error_line(mounter.umount(check=False))
        assert "device" in told or "did not end well" in told
        assert find_mount(point) is None

    in_time(end)
    disk.work()
    daemon = mounter.daemon
    assert wait_for_end(daemon, SOON_SECONDS)
    mount(mounter)
    assert read_direct(point / "3") == content(3, 600 * KIB)
    assert read_direct(point / "new") == content(5, MIB)
    mounter.umount()
    kvfs("fsck", mounter.image)


# -- a shadow ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        "refuses and loses its cache",
        "does not answer",
        pytest.param("is full", marks=pytest.mark.crash_long),
    ],
)
def test_with_a_shadow_writes_go_on_and_are_brought_home(
    on_disk: tuple[Mounter, Disk], how: str
) -> None:
    mounter, disk = on_disk
    point = make_cold(mounter, 4, 600 * KIB, "--shadow", "8M", "--warm", "64M")
    write_synced(point / "before", content(1, MIB))
    kinds = ("write", "flush") if how == "is full" else ("read", "write", "flush")
    error = {"is full": errno.ENOSPC, "does not answer": None}.get(how, errno.EIO)
    disk.fail(Rule(kinds, error))
    (point / "during").write_bytes(content(2, MIB))
    assert outcome(lambda: fsync(point / "during")) in (errno.EIO, errno.ETIMEDOUT)
    soon(lambda: mounter.stats()["failure"] is not None)

    # It is loud, does not lie, and goes on.
    assert mounter.stats()["shadow"]["device_failed"]
    assert "kvfs_device_failed 1.0" in metrics(mounter)
    assert "ERROR" in mounter.log.read_text() and "the device failed" in mounter.log.read_text()
    for number in range(5):
        write_synced_refused(point / f"shadow{number}", content(number, 512 * KIB))
    (point / "before").rename(point / "renamed")
    assert read_direct(point / "renamed") == content(1, MIB)
    assert read_direct(point / "during") == content(2, MIB)
    assert read_direct(point / "shadow4") == content(4, 512 * KIB)
    assert mounter.stats()["shadow"]["used"] >= 5 * 512 * KIB
    assert "shadow4" in os.listdir(point)
    kvfs("ls", point)
    if how != "is full":
        soon(lambda: outcome(lambda: read_direct(point / "3")) == errno.EIO)
    full = outcome(lambda: (point / "too much").write_bytes(content(3, 16 * MIB)))
    assert full == errno.ENOSPC
    (point / "too much").unlink()
    if how.startswith("refuses"):
        disk.lose_unflushed()

    disk.work()
    soon(lambda: mounter.stats()["failure"] is None)
    fsync(point / "during")
    soon(lambda: mounter.stats()["shadow"]["used"] == 0)
    assert mounter.stats()["shadow"]["counters"] | {"rewritten_frames": 0} == {
        "failures": 1, "returns": 1, "rewritten_frames": 0,
    }  # fmt: skip
    assert "kvfs_device_returns_total 1.0" in metrics(mounter)
    assert "kvfs_device_failed 0.0" in metrics(mounter)
    mounter.umount()
    kvfs("fsck", mounter.image)
    mount(mounter)
    assert read_direct(point / "renamed") == content(1, MIB)
    assert read_direct(point / "during") == content(2, MIB)
    for number in range(5):
        assert read_direct(point / f"shadow{number}") == content(number, 512 * KIB)
    for number in range(4):
        assert read_direct(point / str(number)) == content(number, 600 * KIB)
    mounter.umount()


def write_synced_refused(path: Path, data: bytes) -> None:
    """Written, and not said to be durable."""
    path.write_bytes(data)
    assert errno_of(fsync, path) == errno.EIO


def metrics(mounter: Mounter) -> str:
    return (mounter.mountpoint / ".kvfs" / "metrics").read_text()


def test_a_daemon_that_is_killed_while_the_device_is_away_loses_nothing(
    on_disk: tuple[Mounter, Disk],
) -> None:
    mounter, disk = on_disk
    point = mount(mounter, "--shadow", "16M", "--warm", "64M")
    write_synced(point / "before", content(1, MIB))
    (point / "written").write_bytes(content(2, MIB))
    disk.fail(Rule(("read", "write", "flush"), errno.EIO))
    assert errno_of(fsync, point / "written") == errno.EIO
    write_synced_refused(point / "shadow", content(3, MIB))
    (point / "before").unlink()
    disk.lose_unflushed()
    mounter.kill()
    disk.work()
    mount(mounter)
    assert sorted(os.listdir(point)) == ["shadow", "written"]
    assert read_direct(point / "written") == content(2, MIB)
    assert read_direct(point / "shadow") == content(3, MIB)
    mounter.umount()
    kvfs("fsck", mounter.image)


def test_a_device_that_went_away_and_came_back_anew_is_opened_again(
    on_disk: tuple[Mounter, Disk],
) -> None:
    """What was open of it never works again."""
    mounter, disk = on_disk
    point = mount(mounter, "--shadow", "16M", "--warm", "64M")
    write_synced(point / "before", content(1, MIB))
    disk.vanish()
    write_synced_refused(point / "during", content(2, MIB))
    disk.come_back()
    soon(lambda: mounter.stats()["failure"] is None)
    fsync(point / "during")
    # Locked anew: no second writer.
    with pytest.raises(DeviceError, match="in use"):
        FileDevice(mounter.image)
    mounter.umount()
    mount(mounter)
    assert read_direct(point / "before") == content(1, MIB)
    assert read_direct(point / "during") == content(2, MIB)
    mounter.umount()


def test_a_device_that_somebody_else_has_written_to_is_never_written_again(
    on_disk: tuple[Mounter, Disk], tmp_path: Path
) -> None:
    mounter, disk = on_disk
    point = mount(mounter, "--shadow", "16M", "--warm", "64M")
    write_synced(point / "before", content(1, MIB))
    disk.fail(Rule(("read", "write", "flush"), errno.EIO))
    write_synced_refused(point / "during", content(2, MIB))
    with closing(FileDevice(disk.backing)) as device:
        # From another machine: it knows nothing of the log in this one's memory.
        buffer = OperationLog(tmp_path / "log", 64 * MIB, boot="another")
        other = Store.open(device, "ring", InlineExecutor(), buffer)
        run(other.create(ROOT_INODE, b"theirs", 0o100600, 0, 0))
        run(other.close())
    before = digest(disk.backing)
    disk.work()
    soon(lambda: mounter.stats()["shadow"]["gave_up"])
    assert "not what it was" in mounter.log.read_text()
    assert errno_of(fsync, point / "during") == errno.EIO
    assert read_direct(point / "during") == content(2, MIB)
    mounter.umount(check=False)
    assert digest(disk.backing) == before


def test_a_shadow_that_does_not_fit_into_memory_is_refused(mounter: Mounter) -> None:
    refused = error_line(mounter.mount("--shadow", "60M", "--warm", "64M", check=False))
    assert "--shadow 60M is memory of the warm tier, which has 64 MiB" in refused
