"""Whatever is wrong: one line that says so, a status that is not 0, and nothing is lost."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvfs.engine.format import BLOCK, SUPERBLOCK_ADDRESSES
from kvfs.mount.mounts import find_mount
from tests.support.command import error_line
from tests.support.images import digest
from tests.support.mounter import COMMAND_SECONDS, KVFS, Mounter, kvfs
from tests.support.users import kvfs_as_nobody

MIB = 1024**2
FSCK_FAILED = 8


def refusal(mounter: Mounter, device: Path, *arguments: str) -> str:
    """The line of a mount that must fail, and leaves the mountpoint as it was."""
    line = error_line(
        kvfs("mount", mounter.mountpoint, device, "--log", mounter.log, *arguments, check=False)
    )
    assert not find_mount(mounter.mountpoint)
    return line


@pytest.fixture
def make_tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`make_tmpfs("64M")`: the directory of a filesystem of that size."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a tmpfs")
    made: list[Path] = []

    def make(size: str) -> Path:
        directory = tmp_path / f"tmpfs-{len(made)}"
        directory.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", directory], check=True
        )
        made.append(directory)
        return directory

    yield make
    for directory in made:
        # Lazily: the mount of a test that failed may still use it.
        subprocess.run(["umount", "--lazy", directory], check=True)


def fill(directory: Path) -> Path:
    """A file that takes all the space there is."""
    path = directory / "fill"
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(MIB))
    return path


# -- the mountpoint, the log, the warm directory, the user


def test_a_mountpoint_must_be_an_empty_directory(mounter: Mounter) -> None:
    missing, file, full = (mounter.directory / name for name in ("missing", "file", "full"))
    file.touch()
    full.mkdir()
    (full / "x").touch()

    def line_for(mountpoint: Path) -> str:
        return error_line(
            kvfs("mount", mountpoint, mounter.image, "--log", mounter.log, check=False)
        )

    assert line_for(missing) == f"{missing} does not exist; make it with: mkdir -p {missing}"
    assert "is not a directory; the mountpoint comes first" in line_for(file)
    assert "is not empty" in line_for(full)
    assert (full / "x").exists()


def test_a_device_that_is_no_ring_is_refused_with_what_to_do(mounter: Mounter) -> None:
    missing, garbage, small = (mounter.directory / name for name in ("missing", "garbage", "small"))
    garbage.write_bytes(os.urandom(16 * MIB))
    small.write_bytes(b"x" * 100)

    def line_for(device: Path) -> str:
        return error_line(
            kvfs("mount", mounter.mountpoint, device, "--log", mounter.log, check=False)
        )

    assert line_for(missing) == f"{missing} does not exist; make it with: kvfs mkfs {missing}"
    assert line_for(garbage).endswith(f"format it with: kvfs mkfs {garbage} --force")
    assert line_for(small).endswith(f"make one with: kvfs mkfs {small}")
    assert "neither a block device nor an image file" in line_for(mounter.directory)
    assert not find_mount(mounter.mountpoint)


def test_a_second_mount_is_refused_and_harms_nothing(mounted: Mounter) -> None:
    other = mounted.directory / "other"
    other.mkdir()
    same_device = error_line(kvfs("mount", other, mounted.image, "--log", mounted.log, check=False))
    assert "is in use by another KVFS process" in same_device
    same_place = error_line(mounted.mount(check=False))
    assert f"has {mounted.image} mounted already" in same_place
    assert (mounted.mountpoint / "kept").read_text() == "kept"


def test_a_log_that_cannot_be_written_is_named(mounter: Mounter) -> None:
    log = mounter.directory
    line = error_line(kvfs("mount", mounter.mountpoint, mounter.image, "--log", log, check=False))
    assert line == f"the log {log} cannot be written (Is a directory); choose one with --log FILE"


def test_too_little_memory_for_the_operation_log_is_said_at_once(mounter: Mounter) -> None:
    refused = mounter.mount("--warm", "1M", check=False)
    assert refused.returncode == 1
    assert "32 MiB" in error_line(refused)
    assert "--warm" in error_line(refused)


def test_a_warm_directory_that_others_may_write_is_refused(mounter: Mounter) -> None:
    planted = mounter.warm_directory / f"kvfs-{os.geteuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    refused = mounter.mount(check=False)
    assert refused.returncode == 1
    assert str(planted) in error_line(refused)
    planted.rmdir()
    mounter.mount()
    assert planted.stat().st_mode & 0o777 == 0o700


def test_a_full_tmpfs_is_no_warm_directory(
    mounter: Mounter, make_tmpfs: Callable[[str], Path]
) -> None:
    warm = make_tmpfs("80M")
    fill(warm)
    refused = refusal(mounter, mounter.image, "--warm-dir", str(warm))
    assert "the warm tier needs 32 MiB, and gets 0 MiB" in refused


def test_a_tmpfs_that_others_fill_costs_nothing_that_was_answered(
    mounter: Mounter, make_tmpfs: Callable[[str], Path]
) -> None:
    warm = make_tmpfs("80M")
    mounter.mount("--warm-dir", str(warm))
    (mounter.mountpoint / "before").write_bytes(b"before")
    answered = {"before": b"before"}
    other = fill(warm)
    for number in range(100):
        name, data = f"f{number}", os.urandom(MIB)
        try:
            (mounter.mountpoint / name).write_bytes(data)
            answered[name] = data
        except OSError as failure:
            assert failure.errno == errno.ENOSPC
    other.unlink()
    (mounter.mountpoint / "later").write_text("later")
    mounter.umount()
    mounter.mount()
    assert (mounter.mountpoint / "later").read_text() == "later"
    for name, data in answered.items():
        assert (mounter.mountpoint / name).read_bytes() == data


def test_a_missing_dev_fuse_is_told(mounter: Mounter) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root, with unshare, can hide /dev/fuse")
    result = subprocess.run(
        [
            "unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev && exec "$@"', "sh",
            KVFS, "mount", mounter.mountpoint, mounter.image,
        ],
        check=False, capture_output=True, text=True, timeout=COMMAND_SECONDS,
    )  # fmt: skip
    assert error_line(result).startswith("/dev/fuse is missing: load the kernel's module")


def test_who_may_not_use_dev_fuse_is_told(mounter: Mounter) -> None:
    if Path("/dev/fuse").stat().st_mode & stat.S_IWOTH:
        pytest.skip("everybody may use /dev/fuse here")
    mounter.directory.chmod(0o777)
    result = kvfs_as_nobody("mount", mounter.mountpoint, mounter.image)
    assert error_line(result).startswith("/dev/fuse: permission denied; run as root")


def test_who_may_not_mount_is_told(mounter: Mounter) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root, with setpriv, can give up a capability")
    result = subprocess.run(
        [
            "setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin", "--",
            KVFS, "mount", mounter.mountpoint, mounter.image, "--log", mounter.log,
        ],
        check=False, capture_output=True, text=True, timeout=COMMAND_SECONDS,
    )  # fmt: skip
    line = error_line(result)
    assert "may this user mount? (in a container: --cap-add SYS_ADMIN)" in line
    assert line.endswith(f"see {mounter.log}")
    assert "Operation not permitted" in mounter.log.read_text()


# -- the image


def test_a_truncated_image_is_refused_until_it_is_whole(mounted: Mounter) -> None:
    mounted.umount()
    with mounted.image.open("r+b") as image:
        image.seek(300 * MIB)
        tail = image.read()
        image.truncate(300 * MIB)
    line = refusal(mounted, mounted.image)
    assert "is cut: it was formatted with" in line
    assert line.endswith("restore its full size before mounting")
    with mounted.image.open("ab") as image:
        image.write(tail)
    mounted.mount()
    assert (mounted.mountpoint / "kept").read_text() == "kept"


@pytest.mark.parametrize("address", SUPERBLOCK_ADDRESSES)
def test_one_bad_superblock_is_a_warning_and_healed(mounted: Mounter, address: int) -> None:
    mounted.umount()
    overwrite(mounted.image, address)
    result = mounted.mount()
    assert "one of the two superblocks could not be read" in result.stderr
    assert mounted.stats()["superblock_lost"]
    assert (mounted.mountpoint / "kept").read_text() == "kept"
    mounted.umount()
    assert mounted.mount().stderr == ""


def test_two_bad_superblocks_are_refused_and_nothing_is_written(mounted: Mounter) -> None:
    mounted.umount()
    for address in SUPERBLOCK_ADDRESSES:
        overwrite(mounted.image, address)
    before = digest(mounted.image)
    line = refusal(mounted, mounted.image)
    assert line.endswith(f"format it with: kvfs mkfs {mounted.image} --force")
    assert digest(mounted.image) == before


def overwrite(image: Path, address: int) -> None:
    with image.open("r+b") as file:
        file.seek(address)
        file.write(os.urandom(BLOCK))


def test_another_filesystem_is_not_mounted_nor_formatted(mounter: Mounter, tmp_path: Path) -> None:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is missing")
    image = tmp_path / "ext4.img"
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    before = digest(image)
    assert "no KVFS superblock" in refusal(mounter, image)
    assert digest(image) == before


def test_a_device_of_another_filesystem_is_not_formatted(loop_device: Path) -> None:
    if shutil.which("mkfs.ext4") is None or shutil.which("blkid") is None:
        pytest.skip("mkfs.ext4 or blkid is missing")
    subprocess.run(["mkfs.ext4", "-q", loop_device], check=True)
    line = error_line(kvfs("mkfs", loop_device, check=False))
    assert f"{loop_device} carries a signature of ext4" in line
    subprocess.run(["e2fsck", "-fn", loop_device], check=True, capture_output=True)


def test_an_image_on_a_read_only_filesystem_can_be_looked_at(
    mounted: Mounter, make_tmpfs: Callable[[str], Path]
) -> None:
    mounted.umount()
    directory = make_tmpfs("600M")
    image = directory / "ring.img"
    subprocess.run(["cp", "--sparse=always", mounted.image, image], check=True)
    subprocess.run(["mount", "-o", "remount,ro", directory], check=True)
    assert refusal(mounted, image).startswith(f"{image} may only be read: mount it with -o ro")
    formatted = error_line(kvfs("mkfs", image, "--force", check=False))
    assert formatted == f"{image}: Read-only file system"
    made = error_line(kvfs("mkfs", directory / "new.img", check=False))
    assert made.endswith("cannot be made: Read-only file system")
    kvfs("mount", mounted.mountpoint, image, "--log", mounted.log, "-o", "ro")
    try:
        assert (mounted.mountpoint / "kept").read_text() == "kept"
    finally:
        kvfs("umount", mounted.mountpoint)


def test_an_image_that_one_may_not_write_is_refused(mounter: Mounter) -> None:
    mounter.directory.chmod(0o755)
    mounter.image.chmod(0o444)
    line = error_line(kvfs_as_nobody("mkfs", mounter.image, "--force"))
    assert line == f"{mounter.image}: permission denied; run as its owner or as root"


def test_a_full_disk_leaves_no_image(make_tmpfs: Callable[[str], Path]) -> None:
    image = make_tmpfs("16M") / "ring.img"
    line = error_line(kvfs("mkfs", image, "--size", "64M", check=False))
    assert line.endswith("an image of 64.0 MiB cannot be made: No space left on device")
    assert not image.exists()


def test_a_full_disk_under_a_sparse_image_costs_nothing_that_was_answered(
    mounter: Mounter, make_tmpfs: Callable[[str], Path]
) -> None:
    directory = make_tmpfs("64M")
    mounter.image = directory / "ring.img"
    with mounter.image.open("wb") as file:
        file.truncate(128 * MIB)
    kvfs("mkfs", mounter.image)
    mounter.mount()
    answered: dict[str, bytes] = {}
    with pytest.raises(OSError, match="Input/output error"):
        for number in range(100):
            data = os.urandom(MIB)
            with (mounter.mountpoint / f"f{number}").open("wb", buffering=0) as file:
                assert file.write(data) == MIB
                answered[f"f{number}"] = data
                os.fsync(file.fileno())
    line = error_line(mounter.umount(check=False))
    assert "is kept in memory and recovered by the next kvfs mount" in line
    subprocess.run(["mount", "-o", "remount,size=256M", directory], check=True)
    assert mounter.mount().stdout.startswith("recovered ")
    for name, data in answered.items():
        assert (mounter.mountpoint / name).read_bytes() == data
    mounter.umount()


# -- the same image twice


def bound(image: Path, name: Path) -> None:
    name.touch()
    made = subprocess.run(["mount", "--bind", image, name], check=False, capture_output=True)
    if made.returncode:
        pytest.skip("only root, with mount, can bind a file")


@pytest.mark.parametrize("kind", ["symlink", "hard link", "bind mount", "descriptor"])
def test_another_name_of_a_mounted_image_is_refused(
    mounted: Mounter, tmp_path: Path, kind: str
) -> None:
    other, name = tmp_path / "mnt", mounted.directory / "name"
    other.mkdir()
    fd = os.open(mounted.image, os.O_RDONLY)
    match kind:
        case "symlink":
            name.symlink_to(mounted.image)
        case "hard link":
            name.hardlink_to(mounted.image)
        case "bind mount":
            bound(mounted.image, name)
        case "descriptor":
            name = Path(f"/proc/{os.getpid()}/fd/{fd}")
    try:
        refusals = [
            error_line(kvfs("mount", other, name, "--log", mounted.log, check=False)),
            error_line(kvfs("mount", other, name, "-o", "ro", check=False)),
            error_line(kvfs("mkfs", "--force", name, check=False)),
            error_line(kvfs("fsck", "--repair", name, check=False), FSCK_FAILED),
            error_line(kvfs("fsck", name, check=False), FSCK_FAILED),
        ]
    finally:
        os.close(fd)
        if kind == "bind mount":
            subprocess.run(["umount", name], check=True)
    for line in refusals:
        assert "is in use by another KVFS process" in line or "is mounted on" in line
    assert (mounted.mountpoint / "kept").read_text() == "kept"
    mounted.umount()
    assert kvfs("fsck", mounted.image).returncode == 0


def loop_over(image: Path) -> Path:
    """A loop device; the caller detaches it."""
    command = ["losetup", "--find", "--show", image]
    made = subprocess.run(command, check=False, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no loop device may be made: {made.stderr.strip()}")
    return Path(made.stdout.strip())


@pytest.mark.parametrize("first_is_loop", [False, True])
def test_a_loop_device_and_the_image_behind_it_are_one_ring(
    mounter: Mounter, tmp_path: Path, first_is_loop: bool
) -> None:
    if shutil.which("losetup") is None:
        pytest.skip("losetup is missing")
    other, image = tmp_path / "mnt", mounter.image
    other.mkdir()
    loop = loop_over(image)
    try:
        mounter.image, second = (loop, image) if first_is_loop else (image, loop)
        mounter.mount()
        (mounter.mountpoint / "kept").write_text("kept")
        for command in (
            ["mount", other, second, "--warm-dir", tmp_path, "--log", mounter.log],
            ["mkfs", "--force", second],
        ):
            line = error_line(kvfs(*command, check=False))
            assert line.startswith(f"{image} is in use by another KVFS process")
        line = error_line(kvfs("fsck", "--repair", second, check=False), FSCK_FAILED)
        assert line.startswith(f"{image} is in use by another KVFS process")
        mounter.umount()
        mounter.image = second
        mounter.mount()
        assert (mounter.mountpoint / "kept").read_text() == "kept"
        mounter.umount()
    finally:
        subprocess.run(["losetup", "--detach", loop], check=True)


# -- a daemon that hangs, and what lies on its mount


def test_nothing_waits_for_a_mount_that_hangs(mounted: Mounter, tmp_path: Path) -> None:
    inside, link, free = mounted.mountpoint / "sub", tmp_path / "link", tmp_path / "free"
    inside.mkdir()
    free.mkdir()
    link.symlink_to(inside)
    ring = tmp_path / "ring.img"
    kvfs("mkfs", ring, "--size", "16M")
    os.kill(mounted.pid, signal.SIGSTOP)
    try:
        hung = f"{mounted.mountpoint} does not answer; detach it with: kvfs umount --force"
        other = "does not answer: is the daemon of a mount on the way hung?"
        expected = {
            ("mount", inside, mounted.image): hung,
            ("mount", link, mounted.image): other,
            ("mount", free, inside / "ring.img"): hung,
            ("mount", free, mounted.image, "--warm-dir", inside): hung,
            ("mount", free, ring, "--log", inside / "log"): hung,
            ("mkfs", inside / "ring.img"): hung,
            ("umount", inside): hung,
            ("ls", inside): hung,
            ("ls", link): other,
            ("stat", inside): hung,
        }
        with ThreadPoolExecutor() as pool:
            results = pool.map(lambda command: kvfs(*command, check=False), expected)
        for result, message in zip(results, expected.values(), strict=True):
            assert message in error_line(result)
    finally:
        os.kill(mounted.pid, signal.SIGCONT)
    assert (mounted.mountpoint / "kept").read_text() == "kept"


def test_what_lies_on_a_dead_mount_is_refused(mounted: Mounter) -> None:
    mounted.kill()
    line = error_line(kvfs("mount", mounted.mountpoint / "sub", mounted.image, check=False))
    assert "its daemon has ended; mount it again with: kvfs mount" in line
