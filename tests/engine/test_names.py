"""Names: create, link, unlink, rename, directories, and cookies.

Most tests look twice: at what is still in memory, and at the same in the ring, in a
checkpoint, after a clean end, and after a kill (see conftest.py).
"""

from __future__ import annotations

import errno
import stat
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs.engine import names as names_module
from kvfs.engine.format import NAME_COLLISIONS_MAX
from kvfs.engine.io import run
from tests.engine.audit import audit
from tests.engine.kit import DIRECTORY, FILE, SYMLINK, Bench, failure_of


def links(bench: Bench, ino: int) -> int:
    return run(bench.store.node(ino)).inode.nlink


def is_gone(bench: Bench, ino: int) -> bool:
    return failure_of(bench.store.node(ino)) == errno.ENOENT


def synced_audit(bench: Bench) -> None:
    run(bench.store.sync())
    audit(bench.store)


# -- creating and looking up -----------------------------------------------------------


def test_what_is_created_is_found(staged: Bench) -> None:
    directory = staged.make(b"dir", mode=DIRECTORY)
    file = staged.make(b"file", directory, 0o100640)
    link = staged.make(b"link", directory, SYMLINK, target=b"/some/where")
    fifo = staged.make(b"fifo", directory, stat.S_IFIFO | 0o600)
    device = staged.make(b"null", directory, stat.S_IFCHR | 0o666, rdev=259)
    staged.settle()
    assert staged.names() == [b"dir"]
    assert staged.names(directory) == [b"fifo", b"file", b"link", b"null"]
    assert staged.find(b"file", staged.find(b"dir")) == file
    assert run(staged.store.node(file)).inode.mode == 0o100640
    assert run(staged.store.readlink(link)) == b"/some/where"
    assert run(staged.store.node(link)).inode.size == len(b"/some/where")
    assert stat.S_ISFIFO(run(staged.store.node(fifo)).inode.mode)
    assert run(staged.store.node(device)).inode.rdev == 259
    assert (links(staged, 1), links(staged, directory), links(staged, file)) == (3, 2, 1)
    assert staged.store.usage().inodes == 6
    synced_audit(staged)


def test_owner_and_times_are_kept(staged: Bench) -> None:
    node = run(staged.store.create(1, b"file", FILE, 1000, 1001))
    inode = node.inode
    before = (inode.uid, inode.gid, inode.mtime_ns, inode.ctime_ns, inode.birth_ns)
    assert before[:2] == (1000, 1001)
    assert before[2] == before[3] == before[4] > 0
    staged.settle()
    inode = run(staged.store.node(inode.ino)).inode
    assert (inode.uid, inode.gid, inode.mtime_ns, inode.ctime_ns, inode.birth_ns) == before


@pytest.mark.parametrize(
    "name", [b"a", b"x" * 255, bytes(range(1, 47)) + bytes(range(48, 256)), "日本語".encode()]
)
def test_names_of_any_bytes(staged: Bench, name: bytes) -> None:
    ino = staged.make(name)
    staged.settle()
    assert staged.names() == [name]
    assert staged.find(name) == ino


def test_a_name_of_256_bytes_is_too_long(bench: Bench) -> None:
    long, ino = b"x" * 256, bench.make(b"file")
    steps = [
        bench.store.create(1, long, FILE, 0, 0),
        bench.store.lookup(1, long),
        bench.store.unlink(1, long),
        bench.store.rename(1, b"file", 1, long),
        bench.store.rename(1, long, 1, b"file"),
        bench.store.link(ino, 1, long),
    ]
    assert [failure_of(step) for step in steps] == [errno.ENAMETOOLONG] * len(steps)


def test_dot_and_dot_dot_are_found(staged: Bench) -> None:
    outer = staged.make(b"outer", mode=DIRECTORY)
    inner = staged.make(b"inner", outer, DIRECTORY)
    file = staged.make(b"file", outer)
    staged.settle()
    assert staged.find(b".", inner) == inner
    assert staged.find(b".", file) == file
    assert staged.find(b"..", inner) == outer
    assert staged.find(b"..", outer) == 1
    assert staged.find(b"..", 1) == 1


def test_what_cannot_be_created_or_found(bench: Bench) -> None:
    file = bench.make(b"file")
    assert failure_of(bench.store.create(1, b"file", FILE, 0, 0)) == errno.EEXIST
    assert failure_of(bench.store.create(file, b"x", FILE, 0, 0)) == errno.ENOTDIR
    assert failure_of(bench.store.create(12345, b"x", FILE, 0, 0)) == errno.ENOENT
    assert failure_of(bench.store.lookup(1, b"none")) == errno.ENOENT
    assert failure_of(bench.store.lookup(file, b"x")) == errno.ENOTDIR
    assert failure_of(bench.store.readlink(file)) == errno.EINVAL
    assert failure_of(bench.store.node(12345)) == errno.ENOENT
    assert bench.names() == [b"file"]


# -- removing --------------------------------------------------------------------------


def test_what_is_unlinked_is_gone(staged: Bench) -> None:
    ino = staged.make(b"file")
    staged.write(ino, b"data")
    staged.settle()
    assert run(staged.store.unlink(1, b"file")) == ino
    staged.settle()
    assert staged.names() == []
    assert is_gone(staged, ino)
    assert staged.store.usage().inodes == 1
    synced_audit(staged)


def test_an_unlinked_file_lives_while_it_is_held(staged: Bench) -> None:
    ino = staged.make(b"file")
    staged.write(ino, b"before")
    staged.store.pin(ino)
    staged.store.pin(ino)
    run(staged.store.unlink(1, b"file"))
    assert links(staged, ino) == 0
    staged.write(ino, b"after", 3)
    assert staged.read(ino) == b"befafter"
    assert staged.names() == []
    run(staged.store.unpin(ino))
    assert staged.read(ino) == b"befafter"
    run(staged.store.unpin(ino))
    run(staged.store.drop_free())
    assert is_gone(staged, ino)
    synced_audit(staged)


def test_a_held_file_in_a_directory_that_is_gone_can_be_written(staged: Bench) -> None:
    """Its codec comes from the directories above, of which one is missing now."""
    directory = staged.make(b"dir", mode=DIRECTORY)
    ino = staged.make(b"file", directory)
    staged.store.pin(ino)
    run(staged.store.unlink(directory, b"file"))
    run(staged.store.rmdir(1, b"dir"))
    staged.write(ino, b"data")
    assert staged.read(ino) == b"data"


def test_a_file_can_be_written_when_the_directory_of_its_last_link_is_gone(staged: Bench) -> None:
    directory = staged.make(b"dir", mode=DIRECTORY)
    ino = staged.make(b"file")
    run(staged.store.link(ino, directory, b"second"))
    run(staged.store.unlink(directory, b"second"))
    run(staged.store.rmdir(1, b"dir"))
    staged.settle()
    staged.write(ino, b"data")
    staged.settle()
    assert staged.read(ino) == b"data"


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_files_held_without_a_name_are_gone_after_the_end(bench: Bench, end: str) -> None:
    ino = bench.make(b"file")
    bench.write(ino, b"data" * 100_000)
    run(bench.store.sync())
    bench.store.pin(ino)
    run(bench.store.unlink(1, b"file"))
    if end == "closed":
        run(bench.store.close())
    bench.open()
    assert is_gone(bench, ino)
    assert bench.store.usage().inodes == 1
    run(bench.store.sync())
    assert not audit(bench.store).extents


def test_what_cannot_be_removed(bench: Bench) -> None:
    directory = bench.make(b"dir", mode=DIRECTORY)
    bench.make(b"file", directory)
    assert failure_of(bench.store.unlink(1, b"dir")) == errno.EISDIR
    assert failure_of(bench.store.rmdir(1, b"dir")) == errno.ENOTEMPTY
    assert failure_of(bench.store.rmdir(directory, b"file")) == errno.ENOTDIR
    assert failure_of(bench.store.unlink(1, b"none")) == errno.ENOENT
    assert failure_of(bench.store.rmdir(1, b"none")) == errno.ENOENT
    assert bench.names(directory) == [b"file"]


def test_a_directory_that_is_removed_takes_its_link_along(staged: Bench) -> None:
    ino = staged.make(b"dir", mode=DIRECTORY)
    staged.settle()
    run(staged.store.rmdir(1, b"dir"))
    staged.settle()
    assert links(staged, 1) == 2
    assert is_gone(staged, ino)
    synced_audit(staged)


def test_nothing_is_created_in_a_removed_directory_that_is_held(bench: Bench) -> None:
    directory, file = bench.make(b"dir", mode=DIRECTORY), bench.make(b"file")
    bench.store.pin(directory)
    run(bench.store.rmdir(1, b"dir"))
    assert failure_of(bench.store.create(directory, b"x", FILE, 0, 0)) == errno.ENOENT
    assert failure_of(bench.store.link(file, directory, b"x")) == errno.ENOENT
    assert failure_of(bench.store.rename(1, b"file", directory, b"x")) == errno.ENOENT
    run(bench.store.unpin(directory))
    run(bench.store.drop_free())
    assert is_gone(bench, directory)


# -- links -----------------------------------------------------------------------------


def test_hard_links_are_one_file(staged: Bench) -> None:
    directory = staged.make(b"dir", mode=DIRECTORY)
    ino = staged.make(b"file")
    run(staged.store.link(ino, directory, b"second"))
    staged.settle()
    staged.write(staged.find(b"second", directory), b"data")
    assert staged.read(staged.find(b"file")) == b"data"
    assert links(staged, ino) == 2
    run(staged.store.unlink(1, b"file"))
    staged.settle()
    assert links(staged, ino) == 1
    assert staged.read(staged.find(b"second", directory)) == b"data"
    synced_audit(staged)


def test_what_cannot_be_linked(bench: Bench) -> None:
    directory, ino = bench.make(b"dir", mode=DIRECTORY), bench.make(b"file")
    assert failure_of(bench.store.link(directory, 1, b"x")) == errno.EPERM
    assert failure_of(bench.store.link(ino, 1, b"dir")) == errno.EEXIST
    assert failure_of(bench.store.link(ino, ino, b"x")) == errno.ENOTDIR
    bench.store.pin(ino)
    run(bench.store.unlink(1, b"file"))
    assert failure_of(bench.store.link(ino, 1, b"x")) == errno.ENOENT


# -- rename ----------------------------------------------------------------------------


def test_a_rename_moves(staged: Bench) -> None:
    directory, ino = staged.make(b"dir", mode=DIRECTORY), staged.make(b"file")
    staged.write(ino, b"data")
    staged.settle()
    run(staged.store.rename(1, b"file", directory, b"moved"))
    staged.settle()
    assert staged.names() == [b"dir"]
    assert staged.find(b"moved", directory) == ino
    assert staged.read(ino) == b"data"
    synced_audit(staged)


def test_a_rename_replaces(staged: Bench) -> None:
    ino, old = staged.make(b"new"), staged.make(b"old")
    staged.write(ino, b"new data")
    staged.write(old, b"old data")
    staged.settle()
    run(staged.store.rename(1, b"new", 1, b"old"))
    staged.settle()
    assert staged.names() == [b"old"]
    assert staged.read(staged.find(b"old")) == b"new data"
    assert is_gone(staged, old)
    synced_audit(staged)


def test_a_replaced_file_lives_while_it_is_held(bench: Bench) -> None:
    bench.make(b"new")
    old = bench.make(b"old")
    bench.write(old, b"old data")
    bench.store.pin(old)
    run(bench.store.rename(1, b"new", 1, b"old"))
    assert bench.read(old) == b"old data"
    run(bench.store.unpin(old))
    run(bench.store.drop_free())
    assert is_gone(bench, old)


def test_renames_of_directories_keep_links_and_dot_dot(staged: Bench) -> None:
    left, right = staged.make(b"left", mode=DIRECTORY), staged.make(b"right", mode=DIRECTORY)
    moved = staged.make(b"moved", left, DIRECTORY)
    replaced = staged.make(b"replaced", right, DIRECTORY)
    staged.settle()
    run(staged.store.rename(left, b"moved", right, b"replaced"))
    staged.settle()
    assert (links(staged, left), links(staged, right)) == (2, 3)
    assert staged.find(b"..", moved) == right
    assert is_gone(staged, replaced)
    synced_audit(staged)


def test_an_exchange_swaps(staged: Bench) -> None:
    directory = staged.make(b"dir", mode=DIRECTORY)
    inner = staged.make(b"inner", directory, DIRECTORY)
    file = staged.make(b"file")
    staged.settle()
    run(staged.store.rename(1, b"file", directory, b"inner", exchange=True))
    staged.settle()
    assert staged.find(b"file") == inner
    assert staged.find(b"inner", directory) == file
    assert staged.find(b"..", inner) == 1
    assert (links(staged, 1), links(staged, directory)) == (4, 2)
    synced_audit(staged)


def test_renames_that_change_nothing(bench: Bench) -> None:
    ino = bench.make(b"file")
    run(bench.store.link(ino, 1, b"second"))
    run(bench.store.rename(1, b"file", 1, b"file"))
    run(bench.store.rename(1, b"file", 1, b"second"))
    assert bench.names() == [b"file", b"second"], "two names of one file: POSIX keeps both"
    assert links(bench, ino) == 2


def test_what_cannot_be_renamed(bench: Bench) -> None:
    outer = bench.make(b"outer", mode=DIRECTORY)
    inner = bench.make(b"inner", outer, DIRECTORY)
    bench.make(b"file")
    full = bench.make(b"full", mode=DIRECTORY)
    bench.make(b"x", full)
    rename = bench.store.rename
    cases = {
        errno.ENOENT: [
            rename(1, b"none", 1, b"x"),
            rename(1, b"file", 1, b"none", exchange=True),
        ],
        errno.EINVAL: [
            rename(1, b"outer", outer, b"x"),
            rename(1, b"outer", inner, b"x"),
            rename(1, b"outer", outer, b"inner", exchange=True),
            rename(outer, b"inner", 1, b"outer", exchange=True),
        ],
        errno.EEXIST: [rename(1, b"file", 1, b"outer", replace=False)],
        errno.EISDIR: [rename(1, b"file", 1, b"outer")],
        errno.ENOTDIR: [rename(1, b"outer", 1, b"file")],
        errno.ENOTEMPTY: [
            rename(outer, b"inner", 1, b"full"),
            rename(outer, b"inner", 1, b"outer"),
        ],
    }
    for expected, steps in cases.items():
        assert [failure_of(step) for step in steps] == [expected] * len(steps)
    assert bench.names() == [b"file", b"full", b"outer"]
    assert bench.names(outer) == [b"inner"]


# -- names with one hash ---------------------------------------------------------------


@pytest.fixture
def four_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keyed hash of two bits instead of 55: real collisions of those cannot be found."""

    def slot(hash_key: bytes, name: bytes) -> int:
        return (xxhash.xxh3_64_intdigest(hash_key + name) % 4 + 1) << 8

    monkeypatch.setattr(names_module, "name_slot", slot)


@pytest.mark.usefixtures("four_hashes")
def test_names_that_collide_are_told_apart(staged: Bench) -> None:
    inos = {b"name %d" % number: staged.make(b"name %d" % number) for number in range(60)}
    staged.settle()
    for name in list(inos)[::3]:
        run(staged.store.unlink(1, name))
        del inos[name]
    run(staged.store.rename(1, b"name 1", 1, b"another"))
    inos[b"another"] = inos.pop(b"name 1")
    run(staged.store.rename(1, b"name 2", 1, b"name 4"))
    inos[b"name 4"] = inos.pop(b"name 2")
    inos[b"again"] = staged.make(b"again")
    staged.settle()
    assert staged.names() == sorted(inos)
    for name, ino in inos.items():
        assert staged.find(name) == ino
    assert failure_of(staged.store.lookup(1, b"name 0")) == errno.ENOENT
    synced_audit(staged)


@pytest.mark.usefixtures("four_hashes")
def test_xattrs_that_collide_are_told_apart(staged: Bench) -> None:
    ino = staged.make(b"file")
    values = {b"user.%d" % number: b"value %d" % number for number in range(40)}
    for name, value in values.items():
        run(staged.store.set_xattr(ino, name, value))
    staged.settle()
    for name in list(values)[::2]:
        run(staged.store.remove_xattr(ino, name))
        del values[name]
    staged.settle()
    assert sorted(run(staged.store.xattr_names(ino))) == sorted(values)
    for name, value in values.items():
        assert run(staged.store.xattr(ino, name)) == value
    assert run(staged.store.xattr(ino, b"user.0")) is None


def test_more_names_with_one_hash_than_numbers_are_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names_module, "name_slot", lambda key, name: 256)
    for number in range(NAME_COLLISIONS_MAX):
        bench.make(b"%d" % number)
    assert failure_of(bench.store.create(1, b"one more", FILE, 0, 0)) == errno.ENOSPC
    run(bench.store.unlink(1, b"77"))
    bench.make(b"one more")
    assert len(bench.names()) == NAME_COLLISIONS_MAX


# -- readdir ---------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    count=st.integers(0, 40),
    batch=st.integers(1, 10),
    changes=st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=30),
)
def test_a_listing_has_each_name_that_was_there_all_the_time_once(
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    batch: int,
    changes: list[tuple[bool, int]],
) -> None:
    """Names come and go while the directory is read in parts: cookies stay what they are."""
    bench = Bench(tmp_path_factory.mktemp("log"))
    there = {b"%d" % number for number in range(count)}
    for name in there:
        bench.make(name)
    stayed, ever, listed, cookie = set(there), set(there), [], 0
    while True:
        entries = run(bench.store.list_directory(1, cookie, batch))
        if not entries:
            break
        listed += [entry.name for _, entry in entries]
        assert [slot for slot, _ in entries] == sorted({slot for slot, _ in entries})
        assert entries[0][0] > cookie
        cookie = entries[-1][0]
        for comes, number in changes[:3]:
            name = b"%d" % number
            if comes and name not in there:
                bench.make(name)
                there.add(name)
                ever.add(name)
            elif not comes and name in there:
                run(bench.store.unlink(1, name))
                there.discard(name)
                stayed.discard(name)
        del changes[:3]
    assert len(listed) == len(set(listed)) or ever != stayed
    assert stayed <= set(listed) <= ever
    for name in stayed:
        assert listed.count(name) == 1


def test_cookies_are_the_same_after_a_new_mount(bench: Bench) -> None:
    for number in range(30):
        bench.make(b"%d" % number)
    before = run(bench.store.list_directory(1, 0, 100))
    run(bench.store.close())
    bench.open()
    after = run(bench.store.list_directory(1, 0, 100))
    assert [(slot, entry.name) for slot, entry in after] == [(s, e.name) for s, e in before]
    assert all(slot > 2 for slot, _ in after)


def test_a_large_directory(tmpfs: Path) -> None:
    """In batches that are sealed on the way."""
    bench = Bench(tmpfs)
    names = sorted(b"name %d" % number for number in range(6000))
    directory = bench.make(b"dir", mode=DIRECTORY)
    for name in names:
        bench.make(name, directory)
    run(bench.store.close())
    bench.open()
    assert bench.names(directory) == names
    for name in names:
        run(bench.store.unlink(directory, name))
    run(bench.store.rmdir(1, b"dir"))
    run(bench.store.sync())
    assert len(audit(bench.store).inodes) == 1


def test_a_name_without_an_inode_does_not_hang_who_lists_it(bench: Bench) -> None:
    ino = bench.make(b"file")
    bench.store._state.nodes.drop(ino)
    assert failure_of(bench.store.list_children(1, 0, 32)) == errno.ENOENT
