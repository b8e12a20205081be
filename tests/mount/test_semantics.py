"""What docs/semantics.md promises, or says is missing, beyond the other tests of the mount.

One mount serves them all; each test has a directory of its own.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.calls import (
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    RENAME_WHITEOUT,
    errno_of,
    fallocate,
    name_to_handle,
    open_by_handle,
    renameat2,
    syncfs,
)
from tests.support.mounter import Mounter

MIB = 1024 * 1024
FILE_SIZE_MAX = 1 << 62
NOBODY = 65534
FS_IOC_GETFLAGS, FICLONE = 0x80086601, 0x40049409
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may do this")


@pytest.fixture(scope="module")
def shared(fuse: None) -> Iterator[Mounter]:
    """A mount that all users may enter, where that is possible."""
    mounter = Mounter()
    try:
        mounter.mount(*(["-o", "allow_other"] if os.geteuid() == 0 else []))
        for directory in (mounter.directory, mounter.mountpoint):
            directory.chmod(0o755)
        yield mounter
    finally:
        mounter.close()


@pytest.fixture
def home(shared: Mounter, request: pytest.FixtureRequest) -> Path:
    directory: Path = shared.mountpoint / request.node.name
    directory.mkdir()
    return directory


@pytest.fixture
def file(home: Path) -> Path:
    path = home / "f"
    path.write_bytes(b"content")
    return path


def forget_pages() -> None:
    """Have the kernel forget pages and inodes, so that we are asked. Needs root; elsewhere
    it is a no-op."""
    if os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("3")


# -- names -----------------------------------------------------------------------------


def test_a_tree_may_be_deeper_than_a_path_is_long(home: Path) -> None:
    name, depth = "d" * 100, 100
    here = os.open(home, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    assert os.listdir(here) == ["f"]
    os.close(here)
    subprocess.run(["rm", "-r", home / name], check=True)
    assert list(home.iterdir()) == []


def test_case_and_unicode_form_tell_names_apart(home: Path) -> None:
    names = ["layer", "LAYER", "caf\u00e9", "cafe\u0301"]
    for name in names:
        (home / name).write_text(name)
    assert sorted(os.listdir(home)) == sorted(names)
    assert [(home / name).read_text() for name in names] == names


def test_a_listing_has_dot_and_dot_dot(home: Path) -> None:
    (home / "d").mkdir()
    listed = subprocess.run(["ls", "-ia", home / "d"], capture_output=True, text=True, check=True)
    found = {name: int(ino) for ino, name in map(str.split, listed.stdout.splitlines())}
    assert found == {".": (home / "d").stat().st_ino, "..": home.stat().st_ino}


def test_renames_that_linux_knows_and_kvfs_does_not_are_refused(home: Path, file: Path) -> None:
    for flags in (RENAME_WHITEOUT, RENAME_NOREPLACE | RENAME_EXCHANGE):
        assert errno_of(renameat2, file, home / "g", flags) == errno.EINVAL
    assert os.listdir(home) == ["f"]


def test_a_rename_to_another_name_of_the_same_file_does_nothing(home: Path, file: Path) -> None:
    os.link(file, home / "g")
    file.rename(home / "g")
    assert sorted(os.listdir(home)) == ["f", "g"]


def test_links_across_directories_and_of_symlinks(home: Path, file: Path) -> None:
    (home / "d").mkdir()
    os.link(file, home / "d" / "g")
    os.symlink("f", home / "s")
    os.link(home / "s", home / "d" / "t", follow_symlinks=False)
    assert os.path.samefile(file, home / "d" / "g")
    assert os.readlink(home / "d" / "t") == "f"
    assert (home / "s").lstat().st_nlink == 2
    assert (home / "s").lstat().st_size == 1


def test_pipes_and_sockets_connect_processes(home: Path) -> None:
    os.mkfifo(home / "p", 0o600)
    with subprocess.Popen(["cat", home / "p"], stdout=subprocess.PIPE) as reader:
        (home / "p").write_bytes(b"through")
        assert reader.communicate(timeout=30)[0] == b"through"
    # An address has 107 bytes at most, and a directory of its own may be deep.
    here = os.open(home, os.O_RDONLY)
    address = f"/proc/self/fd/{here}/s"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(address)
        server.listen()
        client.connect(address)
    os.close(here)
    assert stat.S_ISSOCK((home / "s").stat().st_mode)


@needs_root
def test_devices_are_kept_and_cannot_be_opened(home: Path) -> None:
    os.mknod(home / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    assert (home / "null").stat().st_rdev == os.makedev(1, 3)
    assert errno_of(os.open, home / "null", os.O_RDONLY) == errno.EACCES


@needs_root
def test_a_file_is_found_by_its_handle_also_after_a_new_mount(mounter: Mounter) -> None:
    mounter.mount()
    (mounter.mountpoint / "d").mkdir()
    (mounter.mountpoint / "d" / "f").write_bytes(b"content")
    handle = name_to_handle(mounter.mountpoint / "d" / "f")
    mounter.umount()
    mounter.mount()
    with os.fdopen(open_by_handle(mounter.mountpoint, handle, os.O_RDONLY), "rb") as found:
        assert found.read() == b"content"
    (mounter.mountpoint / "d" / "f").unlink()
    forget_pages()
    assert errno_of(open_by_handle, mounter.mountpoint, handle, os.O_RDONLY) == errno.ESTALE


# -- owners and modes ------------------------------------------------------------------


@needs_root
def test_others_are_held_to_the_mode(home: Path, file: Path) -> None:
    def others_read() -> bool:
        result = subprocess.run(["cat", file], user=NOBODY, group=NOBODY, capture_output=True)
        return result.returncode == 0

    file.chmod(0o640)
    assert not others_read()
    file.chmod(0o644)
    assert others_read()
    home.chmod(0o700)
    assert not others_read()


@needs_root
def test_without_allow_other_no_other_user_may_enter(mounter: Mounter) -> None:
    mounter.mount()
    for directory in (mounter.directory, mounter.mountpoint):
        directory.chmod(0o755)
    enter: list[str | Path] = ["ls", mounter.mountpoint]
    assert subprocess.run(enter, user=NOBODY, capture_output=True).returncode != 0
    assert subprocess.run(enter, capture_output=True).returncode == 0


def test_a_new_file_gets_the_mode_less_the_umask(home: Path) -> None:
    before = os.umask(0o027)
    try:
        (home / "d").mkdir(0o777)
        os.close(os.open(home / "f", os.O_CREAT | os.O_WRONLY, 0o666))
    finally:
        os.umask(before)
    assert stat.S_IMODE((home / "d").stat().st_mode) == 0o750
    assert stat.S_IMODE((home / "f").stat().st_mode) == 0o640


@needs_root
def test_what_is_made_in_a_setgid_directory_has_its_group(home: Path) -> None:
    os.chown(home, 0, 4321)
    home.chmod(0o2755)
    (home / "d").mkdir()
    (home / "f").touch()
    assert (home / "f").stat().st_gid == (home / "d").stat().st_gid == 4321
    assert (home / "d").stat().st_mode & stat.S_ISGID


@needs_root
def test_setuid_programs_run_as_their_caller(home: Path) -> None:
    program = home / "id"
    program.write_bytes(Path("/usr/bin/id").read_bytes())
    program.chmod(0o4755)
    shown = subprocess.run([program, "-u"], user=NOBODY, capture_output=True, text=True)
    assert shown.stdout.strip() == str(NOBODY)


_CHANGES = {
    "write": "dd if=/dev/zero of={} bs=1 count=1 conv=notrunc",
    "append": "dd if=/dev/zero of={} bs=1 count=1 conv=notrunc oflag=append",
    "direct": "dd if=/dev/zero of={} bs=4096 count=1 conv=notrunc oflag=direct",
    "truncate": "truncate -s 1 {}",
    "open": "dd if=/dev/null of={}",
}


@needs_root
@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
@pytest.mark.parametrize(
    ("user", "mode", "left"),
    [
        (NOBODY, 0o6777, 0o777),  # who may not keep them by a capability of its own
        (NOBODY, 0o2766, 0o2766),  # without a right to execute it is no set-group-ID bit
        (0, 0o6777, 0o6777),
    ],
)
def test_who_changes_a_program_takes_its_rights(
    file: Path, change: str, user: int, mode: int, left: int
) -> None:
    file.write_bytes(b"program")
    file.chmod(mode)
    capability = struct.pack("<IIIII", 0x02000001, 1, 0, 0, 0)
    os.setxattr(file, "security.capability", capability)
    command = [part.format(file) for part in change.split()]
    subprocess.run(command, user=user, check=True, capture_output=True)
    assert stat.S_IMODE(file.stat().st_mode) == left
    assert "security.capability" not in os.listxattr(file)
    # One that was given anew goes too.
    os.setxattr(file, "security.capability", capability)
    subprocess.run(command, user=user, check=True, capture_output=True)
    assert "security.capability" not in os.listxattr(file)


@needs_root
def test_a_new_owner_takes_a_programs_rights(home: Path, file: Path) -> None:
    file.chmod(0o6755)
    os.setxattr(file, "security.capability", struct.pack("<IIIII", 0x02000001, 1, 0, 0, 0))
    os.chown(file, 1234, 4321)
    assert stat.S_IMODE(file.stat().st_mode) == 0o755
    assert os.listxattr(file) == []
    os.mkfifo(home / "fifo")
    (home / "fifo").chmod(0o6755)
    os.chown(home / "fifo", 1234, 4321)
    assert stat.S_IMODE((home / "fifo").stat().st_mode) == 0o755
    home.chmod(0o2755)
    os.chown(home, 0, 4321)
    assert stat.S_IMODE(home.stat().st_mode) == 0o2755


@needs_root
def test_the_kernel_makes_a_mount_read_only_and_writable_again(shared: Mounter, home: Path) -> None:
    def remount(option: str) -> None:
        subprocess.run(["mount", "-i", "-o", f"remount,{option}", shared.mountpoint], check=True)

    remount("ro")
    try:
        assert errno_of(os.mkdir, home / "new") == errno.EROFS
    finally:
        remount("rw")
    (home / "new").mkdir()


def test_there_are_no_access_control_lists(file: Path) -> None:
    version, read_and_write, nobody = 2, 6, 0xFFFFFFFF
    entries = [(tag, read_and_write, nobody) for tag in (0x01, 0x04, 0x20)]
    acl = struct.pack("<I", version) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    assert errno_of(os.setxattr, file, "system.posix_acl_access", acl) == errno.EOPNOTSUPP


# -- times -----------------------------------------------------------------------------


def test_reading_leaves_the_access_time(home: Path, file: Path) -> None:
    os.utime(file, ns=(1, 1))
    os.utime(home, ns=(1, 1))
    forget_pages()
    file.read_bytes()
    os.listdir(home)
    forget_pages()
    assert file.stat().st_atime_ns == home.stat().st_atime_ns == 1


def _store_through_mapping(path: Path) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
        shared[0:1] = b"X"
        shared.flush()


@pytest.mark.parametrize(
    ("change", "of_file", "of_directory"),
    [
        pytest.param(lambda f: f.write_bytes(b"longer content"), "mc", "", id="write"),
        pytest.param(lambda f: os.truncate(f, 3), "mc", "", id="truncate"),
        pytest.param(_store_through_mapping, "mc", "", id="mapping"),
        pytest.param(lambda f: f.chmod(0o600), "c", "", id="chmod"),
        pytest.param(lambda f: os.chown(f, -1, os.getegid()), "c", "", id="chown"),
        pytest.param(lambda f: os.setxattr(f, "user.x", b"1"), "c", "", id="xattr"),
        pytest.param(lambda f: os.link(f, f"{f}2"), "c", "mc", id="link"),
        pytest.param(lambda f: (f.parent / "new").touch(), "", "mc", id="create"),
        pytest.param(lambda f: (f.parent / "new").mkdir(), "", "mc", id="mkdir"),
        pytest.param(lambda f: (f.parent / "old").unlink(), "", "mc", id="unlink"),
        pytest.param(lambda f: (f.parent / "old").rename(f.parent / "new"), "", "mc", id="rename"),
        pytest.param(lambda f: f.read_bytes(), "", "", id="read"),
    ],
)
def test_changes_move_the_times_that_posix_names(
    home: Path, file: Path, change: Callable[[Path], object], of_file: str, of_directory: str
) -> None:
    def times(path: Path) -> dict[str, int]:
        status = path.stat()
        return {"m": status.st_mtime_ns, "c": status.st_ctime_ns}

    def moved(before: dict[str, int], after: dict[str, int]) -> str:
        assert all(after[kind] >= before[kind] for kind in before)
        return "".join(kind for kind in before if after[kind] != before[kind])

    (home / "old").touch()
    before = times(file), times(home)
    change(file)
    assert moved(before[0], times(file)) == of_file
    assert moved(before[1], times(home)) == of_directory


def test_what_loses_its_name_changes_its_status(home: Path, file: Path) -> None:
    os.link(file, home / "g")
    before = file.stat().st_ctime_ns
    (home / "g").unlink()
    assert file.stat().st_ctime_ns > before
    before = file.stat().st_ctime_ns
    file.rename(home / "h")
    assert (home / "h").stat().st_ctime_ns > before


# -- data ------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [0, os.O_DIRECT], ids=["buffered", "O_DIRECT"])
def test_only_the_end_of_a_file_makes_a_read_short(home: Path, direct: int) -> None:
    data = os.urandom(9 * MIB + 77)
    (home / "f").write_bytes(data)
    forget_pages()
    fd = os.open(home / "f", os.O_RDONLY | direct)
    into = mmap.mmap(-1, 16 * MIB)
    assert os.preadv(fd, [into], 0) == len(data)
    assert into[: len(data)] == data
    assert os.preadv(fd, [memoryview(into)[: 8 * MIB]], MIB) == 8 * MIB
    assert os.preadv(fd, [memoryview(into)[:4096]], len(data) - 10) == 10
    assert os.preadv(fd, [memoryview(into)[:4096]], len(data)) == 0
    os.close(fd)


def test_a_file_may_be_as_large_as_no_device(file: Path) -> None:
    os.truncate(file, FILE_SIZE_MAX)
    assert file.stat().st_size == FILE_SIZE_MAX
    fd = os.open(file, os.O_RDWR)
    assert os.pwrite(fd, b"end", FILE_SIZE_MAX - 3) == 3
    assert os.pread(fd, 100, FILE_SIZE_MAX - 5) == b"\0\0end"
    assert errno_of(os.pwrite, fd, b"x", FILE_SIZE_MAX) == errno.EFBIG
    assert errno_of(os.ftruncate, fd, FILE_SIZE_MAX + 1) == errno.EFBIG
    os.close(fd)
    assert file.stat().st_blocks * 512 <= 3 * 128 * 1024


def test_a_process_is_held_to_its_file_size_limit(file: Path) -> None:
    write = (
        f"import os; fd = os.open({str(file)!r}, os.O_WRONLY);"
        "print(os.pwrite(fd, b'x' * 5000, 0)); os.pwrite(fd, b'x', 4096)"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    result = subprocess.run(
        [sys.executable, "-c", write], preexec_fn=limit, capture_output=True, text=True
    )
    assert result.stdout.strip() == "4096"
    assert "File too large" in result.stderr
    assert file.stat().st_size == 4096


def test_holes_take_no_space(file: Path) -> None:
    os.truncate(file, 0)
    os.truncate(file, 64 * MIB)
    with file.open("r+b") as opened:
        opened.seek(32 * MIB)
        opened.write(b"x")
        os.fsync(opened.fileno())
    assert file.stat().st_size == 64 * MIB
    assert 0 < file.stat().st_blocks * 512 <= 128 * 1024


def test_a_mapping_and_reads_and_writes_see_each_other(file: Path) -> None:
    with file.open("r+b", buffering=0) as opened, mmap.mmap(opened.fileno(), 0) as shared:
        opened.write(b"WRITTEN")
        assert shared[:] == b"WRITTEN"
        shared[0:1] = b"!"
        assert os.pread(opened.fileno(), 3, 0) == b"!RI"


def test_a_mapping_outlives_descriptor_and_name(file: Path) -> None:
    with file.open("r+b") as opened:
        shared = mmap.mmap(opened.fileno(), 0)
    file.unlink()
    shared[0:1] = b"C"
    shared.flush()
    assert shared[:] == b"Content"
    shared.close()


def test_sendfile_and_splice_read_what_is_there(home: Path) -> None:
    data = os.urandom(3 * MIB)
    (home / "a").write_bytes(data)
    with (home / "a").open("rb") as source, (home / "b").open("wb") as target:
        sent = 0
        while sent < len(data):
            sent += os.sendfile(target.fileno(), source.fileno(), sent, len(data) - sent)
    assert (home / "b").read_bytes() == data
    read_end, write_end = os.pipe()
    with (home / "a").open("rb") as source:
        moved = os.splice(source.fileno(), write_end, 4096, offset_src=12345)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        assert pipe.read() == data[12345 : 12345 + moved]
    assert moved > 0


# -- xattrs ----------------------------------------------------------------------------


def test_names_and_values_of_xattrs_have_limits(file: Path) -> None:
    longest = "user." + "n" * 250
    os.setxattr(file, longest, b"v" * 65536)
    assert os.getxattr(file, longest) == b"v" * 65536
    assert errno_of(os.setxattr, file, longest + "n", b"") == errno.ERANGE
    assert errno_of(os.setxattr, file, "user.x", b"v" * 65537) == errno.E2BIG


def test_only_files_and_directories_have_user_xattrs(home: Path) -> None:
    os.symlink("x", home / "s")
    os.mkfifo(home / "p")
    for name in ("s", "p"):
        with pytest.raises(PermissionError):
            os.setxattr(home / name, "user.x", b"1", follow_symlinks=False)
    os.setxattr(home, "user.x", b"1")
    assert os.listxattr(home) == ["user.x"]


@needs_root
def test_namespaces_of_root_are_kept_and_trusted_is_for_its_eyes(file: Path) -> None:
    for name in ("trusted.x", "security.x", "user.x"):
        os.setxattr(file, name, b"1")
        assert os.getxattr(file, name) == b"1"
    assert set(os.listxattr(file)) == {"trusted.x", "security.x", "user.x"}
    names = ["getfattr", "--match=-", "--absolute-names", str(file)]
    seen = subprocess.run(names, user=NOBODY, capture_output=True, text=True, check=True).stdout
    assert set(seen.splitlines()[1:-1]) == {"security.x", "user.x"}


# -- what there is not -----------------------------------------------------------------


def test_space_cannot_be_reserved_and_holes_not_be_punched(file: Path) -> None:
    with file.open("r+b") as opened:
        for mode in (0, FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE):
            assert errno_of(fallocate, opened.fileno(), mode, 0, MIB) == errno.EOPNOTSUPP
        # The C library then writes a byte into each block.
        os.posix_fallocate(opened.fileno(), 0, 100_000)
    assert file.read_bytes() == b"content" + bytes(100_000 - 7)


def test_seeking_for_holes_finds_none(file: Path) -> None:
    os.truncate(file, 10 * MIB)
    with file.open("rb") as opened:
        assert os.lseek(opened.fileno(), 0, os.SEEK_HOLE) == 10 * MIB
        assert os.lseek(opened.fileno(), MIB, os.SEEK_DATA) == MIB


def test_there_are_no_files_without_a_first_name(home: Path) -> None:
    assert errno_of(os.open, home, os.O_TMPFILE | os.O_RDWR) == errno.EOPNOTSUPP


def test_there_are_no_flags_and_no_clones(home: Path, file: Path) -> None:
    with file.open("rb") as opened, (home / "g").open("wb") as other:
        flags = bytearray(8)
        assert errno_of(fcntl.ioctl, opened.fileno(), FS_IOC_GETFLAGS, flags) == errno.ENOTTY
        clone = errno_of(fcntl.ioctl, other.fileno(), FICLONE, opened.fileno())
        assert clone in (errno.EOPNOTSUPP, errno.ENOTTY)


def test_copy_file_range_copies_by_way_of_the_kernel(home: Path) -> None:
    data = os.urandom(2 * MIB + 3)
    (home / "a").write_bytes(data)
    with (home / "a").open("rb") as source, (home / "b").open("wb") as target:
        copied = 0
        while copied < len(data):
            copied += os.copy_file_range(source.fileno(), target.fileno(), len(data) - copied)
    assert (home / "b").read_bytes() == data


def test_reads_that_must_not_wait_are_refused(file: Path) -> None:
    with file.open("rb") as opened:
        read = errno_of(os.preadv, opened.fileno(), [bytearray(4)], 0, os.RWF_NOWAIT)
    assert read == errno.EOPNOTSUPP


def test_there_is_no_time_of_birth(file: Path) -> None:
    shown = subprocess.run(["stat", "-c", "%w", file], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "-"


def test_syncfs_does_not_reach_the_daemon(shared: Mounter, file: Path) -> None:
    with file.open("r+b", buffering=0) as opened:
        opened.write(os.urandom(MIB))
        before = shared.stats()
        syncfs(opened.fileno())
        assert shared.stats()["counters"]["frames"] == before["counters"]["frames"]
        os.fsync(opened.fileno())
        assert shared.stats()["counters"]["frames"] > before["counters"]["frames"]
