"""Users of one mount: what each may do with what belongs to another, and what it gets to know."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvfs.mount import control
from tests.support.calls import RENAME_NOREPLACE, name_to_handle, open_by_handle, renameat2
from tests.support.mounter import Mounter
from tests.support.users import as_user, needs_root

pytestmark = needs_root

OWNER, OTHER, SHARED_GROUP = 12345, 54321, 4321
DENIED = (errno.EACCES, errno.EPERM)


@pytest.fixture(scope="module")
def shared(fuse: None) -> Iterator[Mounter]:
    """A mount that all may enter, and make names at its top, as in /tmp."""
    mounter = Mounter("64M")
    try:
        mounter.mount("-o", "allow_other")
        mounter.directory.chmod(0o755)
        mounter.mountpoint.chmod(0o1777)
        yield mounter
    finally:
        mounter.close()


@pytest.fixture
def top(shared: Mounter, request: pytest.FixtureRequest) -> Path:
    """A directory like /tmp for one test."""
    made = shared.mountpoint / request.node.originalname
    made.mkdir(exist_ok=True)
    made.chmod(0o1777)
    return made


def make_session(top: Path, name: str = "session", mode: int = 0o700) -> Path:
    """What the adapter would make, as whoever runs this."""
    session = top / name
    session.mkdir(mode=0o700)
    (session / "session.json").write_text("{}")
    (session / "layer.000").write_bytes(name.encode() * 10_000)
    for file in session.iterdir():
        file.chmod(mode & 0o666)
    session.chmod(mode)
    return session


def failure(
    uid: int, work: Callable[..., Any], *arguments: Any, groups: tuple[int, ...] = ()
) -> int | None:
    """The errno that a user's work ends with; None if it succeeds."""
    try:
        as_user(uid, partial(work, *arguments), groups)
    except OSError as error:
        return error.errno
    return None


# -- another user's session

CONTROL_VALUES = {
    "prefetch": b"1", "demote": b"1", "hint": b"tool_done", "fork": b"copy", "pin": b"1",
    "ttl": b"1", "unit": b"pool", "codec": b"none", "model": b"x", "device_id": b"7",
}  # fmt: skip

ON_A_SESSION: dict[str, Callable[[Path], Any]] = {
    "list": os.listdir,
    "walk": lambda session: os.open(session, os.O_RDONLY),
    "stat of a file": lambda session: (session / "layer.000").stat(),
    "read": lambda session: (session / "layer.000").read_bytes(),
    "write": lambda session: (session / "layer.000").write_bytes(b"x"),
    "create": lambda session: (session / "new").touch(),
    "unlink": lambda session: (session / "layer.000").unlink(),
    "truncate": lambda session: os.truncate(session / "layer.000", 0),
    "link out": lambda session: (session.parent / "l").hardlink_to(session / "layer.000"),
    "move out": lambda session: (session / "layer.000").rename(session.parent / "l"),
    "chmod": lambda session: session.chmod(0o777),
    "chown": lambda session: os.chown(session, OTHER, OTHER),
    "utime": lambda session: os.utime(session, (1, 1)),
    "rename": lambda session: session.rename(session.parent / "mine"),
    "rename to a new name": lambda session: renameat2(
        session, session.parent / "mine", RENAME_NOREPLACE
    ),
    "rmdir": lambda session: session.rmdir(),
    "map of a file": lambda session: os.getxattr(session / "layer.000", "user.kvfs.map"),
    "handle": lambda session: open_by_handle(
        session.parent, name_to_handle(session), os.O_RDONLY
    ),
    **{
        f"get {name}": lambda session, name=name: os.getxattr(session, f"user.kvfs.{name}")
        for name in ("map", "tier", "heat", "pin", "ttl", "unit", "extents")
    },
    **{
        f"set {name}": lambda session, name=name, value=value: os.setxattr(
            session, f"user.kvfs.{name}", value
        )
        for name, value in CONTROL_VALUES.items()
    },
    "remove a setting": lambda session: os.removexattr(session, "user.kvfs.ttl"),
    "set trusted": lambda session: os.setxattr(session, "trusted.x", b"x"),
    "set security": lambda session: os.setxattr(session, "security.x", b"x"),
}  # fmt: skip


def test_nothing_can_be_done_with_another_users_session(top: Path) -> None:
    session = as_user(OWNER, lambda: make_session(top))
    as_user(OWNER, lambda: os.setxattr(session, "user.kvfs.ttl", b"9999"))
    before = session.stat(), (session / "layer.000").stat()
    found = {what: failure(OTHER, call, session) for what, call in ON_A_SESSION.items()}
    assert {what: number for what, number in found.items() if number not in DENIED} == {}
    assert before == (session.stat(), (session / "layer.000").stat())
    assert os.listdir(top) == ["session"]
    assert as_user(OWNER, (session / "layer.000").read_bytes) == b"session" * 10_000


def test_who_may_read_a_session_may_not_steer_it(top: Path) -> None:
    session = as_user(OWNER, lambda: make_session(top, mode=0o755))
    layer = session / "layer.000"
    assert as_user(OTHER, layer.read_bytes) == b"session" * 10_000
    assert as_user(OTHER, lambda: os.getxattr(session, "user.kvfs.ttl")) == b"0"
    for path in (session, layer):
        for name, value in CONTROL_VALUES.items():
            assert failure(OTHER, os.setxattr, path, f"user.kvfs.{name}", value) in DENIED, name
        assert failure(OTHER, os.getxattr, path, "user.kvfs.map") == errno.ENODATA
    assert sorted(os.listdir(top)) == ["session"]


def test_only_its_owner_forks_a_session_and_only_where_it_may_make_names(top: Path) -> None:
    top.chmod(0o777)
    session = as_user(OWNER, lambda: make_session(top, mode=0o777))

    def fork(name: str) -> Callable[[], None]:
        return lambda: os.setxattr(session, "user.kvfs.fork", name.encode())

    assert failure(OTHER, fork("theirs")) == errno.EACCES
    assert failure(OWNER, fork("own")) is None
    copy = (top / "own").stat()
    assert (copy.st_uid, stat.S_IMODE(copy.st_mode)) == (OWNER, 0o777)

    here = os.open(session, os.O_RDONLY)

    def fork_from_within() -> None:
        os.setxattr(here, "user.kvfs.fork", b"from within")

    os.chown(top, 0, SHARED_GROUP)
    for mode, groups, expected in [
        (0o770, (), errno.EACCES),
        (0o730, (SHARED_GROUP,), None),
        (0o720, (SHARED_GROUP,), errno.EACCES),  # they may not enter
        (0o750, (SHARED_GROUP,), errno.EACCES),
        (0o707, (SHARED_GROUP,), errno.EACCES),  # the group's rights are what counts for them
        (0o703, (), None),
        (0o702, (), errno.EACCES),
    ]:
        top.chmod(mode)
        assert failure(OWNER, fork_from_within, groups=groups) == expected, oct(mode)
        if expected is None:
            os.rename(top / "from within", top / f"made {mode:o}")
    os.close(here)


# -- warm memory


def test_warm_memory_is_the_daemons_alone(shared: Mounter, top: Path) -> None:
    session = as_user(OWNER, lambda: make_session(top, mode=0o755))
    os.getxattr(session / "layer.000", "user.kvfs.map")
    below = list(shared.warm_directory.rglob("*"))
    files = [path for path in below if path.is_file()]
    assert any(path.suffix == ".kvmap" for path in files)
    for path in below:
        status = path.stat()
        assert status.st_uid == 0
        assert stat.S_IMODE(status.st_mode) == (0o600 if path in files else 0o700), path
    shared.warm_directory.chmod(0o755)  # as /dev/shm is
    for path in below:
        assert failure(OTHER, os.open, path, os.O_RDONLY) == errno.EACCES
    (top_directory,) = shared.warm_directory.iterdir()
    assert failure(OTHER, os.listdir, top_directory) == errno.EACCES


# -- /.kvfs


def sessions_shown(mountpoint: Path) -> list[str]:
    lines = (mountpoint / ".kvfs" / "sessions").read_text().splitlines()
    return [json.loads(line)["path"] for line in lines]


def test_each_user_is_shown_its_own_sessions_and_root_all(shared: Mounter, top: Path) -> None:
    as_user(OWNER, lambda: make_session(top, "owned", 0o755))
    as_user(OTHER, lambda: make_session(top, "other", 0o755))
    # What was used is noted by the daemon every ten seconds.
    shared.umount()
    shared.mount("-o", "allow_other")
    own, other = f"{top.name}/owned", f"{top.name}/other"

    def shown() -> list[str]:
        return [path for path in sessions_shown(shared.mountpoint) if path in (own, other)]

    assert as_user(OWNER, shown) == [own]
    assert as_user(OTHER, shown) == [other]
    assert as_user(4711, shown) == []
    assert sorted(shown()) == [other, own]
    assert "owned" not in json.dumps(as_user(OTHER, lambda: sessions_shown(shared.mountpoint)))


def test_what_tells_of_the_whole_mount_is_not_for_the_owner_of_its_top(shared: Mounter) -> None:
    os.chown(shared.mountpoint, OWNER, OWNER)
    try:
        for name in ("stats.json", "metrics", "config.toml"):
            file = shared.mountpoint / ".kvfs" / name
            assert failure(OWNER, file.read_bytes) == errno.EACCES
            assert file.stat().st_uid == os.geteuid()
            assert file.read_bytes()
    finally:
        os.chown(shared.mountpoint, 0, 0)


def test_all_is_told_to_root_and_the_daemons_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: OWNER)
    assert [uid for uid in (0, OWNER, OTHER) if control.sees_all(uid)] == [0, OWNER]
    assert control.control_inode(control.CONTROL_INODE).uid == OWNER
