"""A session as a tar archive in the PAX format, with attributes as GNU tar and star keep them.

Members are written one header at a time (`TarInfo.tobuf`) and read by `tarfile` as a stream. What
`tarfile` passes over in silence is looked for here: an archive without its end mark, headers
without limits.
"""

from __future__ import annotations

import os
import tarfile
import time
from collections.abc import Iterator
from decimal import Decimal
from typing import IO, Any, cast

from mount_tools.moving.bytes import ahead, pieces, write_all
from mount_tools.moving.content import BLOCK, Laid
from mount_tools.moving.entries import (
    KNOWN_CONTENT,
    Entry,
    Kind,
    RefusedError,
    check_path,
    shown,
)
from mount_tools.moving.landing import Landing
from mount_tools.moving.meter import Begins
from mount_tools.moving.reading import Run, read_runs, without_holes
from mount_tools.moving.safetensors import write_filled
from mount_tools.moving.source import Source

_HEADER_MAX = 8 * 1024 * 1024
_READ_SIZE = 1024 * 1024
_RECORD = 512
_XATTR = "SCHILY.xattr."
_NANOSECONDS = 10**9
_TIME_MAX = 1 << 40
_TYPES = {
    Kind.DIRECTORY: tarfile.DIRTYPE,
    Kind.FILE: tarfile.REGTYPE,
    Kind.SYMLINK: tarfile.SYMTYPE,
    Kind.LINK: tarfile.LNKTYPE,
}
_MAGIC_AT, _MAGIC = 257, b"ustar"


# -- out


def write_archive(session: Laid, name: bytes, fd: int, begins: Begins) -> int:
    """Write all of a session, as a directory of that name. Returns how many bytes of files it
    has."""
    size = sum(entry.size for entry in session.files)
    parts = {entry.path: _parts(session, entry) for entry in session.files}
    advance = begins(sum(end - start for runs in parts.values() for start, end in runs))
    wanted = [(entry, parts[entry.path]) for entry in session.files if parts[entry.path]]
    with read_runs(session, wanted) as read:
        for entry in session.entries.values():
            runs = parts.get(entry.path, [])
            stored = _write_header(entry, name, runs, fd)
            left = sum(end - start for start, end in runs)
            while left:
                _, _, data = next(read)
                write_all(fd, [data])
                advance(len(data))
                left -= len(data)
            write_all(fd, [bytes(-stored % _RECORD)])
    write_all(fd, [bytes(2 * _RECORD)])
    return size


def _parts(session: Laid, entry: Entry) -> list[Run]:
    """What is stored of a file: all of it, unless it has holes worth a map of them."""
    filled = without_holes(session, entry)
    holes = entry.size - sum(end - start for start, end in filled)
    return filled if holes >= BLOCK else [(0, entry.size)] if entry.size else []


def _write_header(entry: Entry, name: bytes, runs: list[Run], fd: int) -> int:
    """A member's header, and the map of its parts if it has holes. Returns how many bytes the
    member stores."""
    member = tarfile.TarInfo(_text(_below(name, entry.path)))
    member.type, member.mode = _TYPES[entry.kind], entry.mode
    member.uid, member.gid = os.geteuid(), os.getegid()
    seconds, nanoseconds = divmod(entry.mtime_ns, _NANOSECONDS)
    member.mtime = seconds
    member.pax_headers = {"mtime": _decimal(entry.mtime_ns)} if nanoseconds or seconds < 0 else {}
    if entry.target:
        is_link = entry.kind is Kind.LINK
        member.linkname = _text(_below(name, entry.target) if is_link else entry.target)
    for attribute, value in entry.xattrs.items():
        member.pax_headers[_XATTR + _escaped(_text(attribute))] = _text(value)
    stored = sum(end - start for start, end in runs)
    places = b""
    if entry.kind is Kind.FILE and stored < entry.size:
        places = _map_of(runs, entry.size)
        stored += len(places)
        member.pax_headers |= {
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": member.name,
            "GNU.sparse.realsize": str(entry.size),
        }
    member.size = stored
    write_all(fd, [member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"), places])
    return stored


def _map_of(runs: list[Run], size: int) -> bytes:
    """GNU's map of a sparse file: how many runs, then offset and length of each."""
    numbers = [part for start, end in [*runs, (size, size)] for part in (start, end - start)]
    text = "".join(f"{number}\n" for number in [len(numbers) // 2, *numbers]).encode()
    return text + bytes(-len(text) % _RECORD)


def _below(name: bytes, path: bytes) -> bytes:
    return name + b"/" + path if path else name


def _decimal(time_ns: int) -> str:
    return f"{Decimal(time_ns).scaleb(-9):f}"


def _escaped(name: str) -> str:
    """A keyword ends at the first `=`."""
    return name.replace("%", "%25").replace("=", "%3D")


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


# -- in


def is_archive(head: bytes) -> bool:
    """Whether a file begins like one."""
    return head[_MAGIC_AT:].startswith(_MAGIC)


def read_archive(source: Source, new: Landing, begins: Begins) -> None:
    """Fill a session from an archive of one directory. Raises RefusedError."""
    advance = begins(None)
    last = None
    with ahead(_read(source)) as read:
        for entry, offset, data in read:
            if entry is not last:
                new.add(entry)
                last = entry
            if data:
                write_filled(new, offset, data)
                advance(len(data))


def _read(source: Source) -> Iterator[tuple[Entry, int, memoryview]]:
    """At least one piece of each entry, empty where there is nothing to write."""
    try:
        yield from _members(source)
    except (tarfile.TarError, ValueError, OverflowError, EOFError) as failure:
        raise RefusedError(f"the archive is damaged: {str(failure)[:200]}") from None


def _members(source: Source) -> Iterator[tuple[Entry, int, memoryview]]:
    has_ended = False

    class Member(tarfile.TarInfo):
        """Sees the end mark, which for `tarfile` is no more than any end."""

        @classmethod
        def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Any:
            nonlocal has_ended
            has_ended = len(buf) == _RECORD and not any(buf)
            return super().frombuf(buf, encoding, errors)

    names = _Names()
    source.allowed = _HEADER_MAX
    with tarfile.open(
        fileobj=cast("IO[bytes]", source), mode="r|", bufsize=_READ_SIZE, tarinfo=Member,
        encoding="utf-8", errors="surrogateescape",
    ) as archive:  # fmt: skip
        while (member := archive.next()) is not None:
            source.allowed = None
            # tarfile would keep all members, for who asks for a list.
            archive.members.clear()  # type: ignore[attr-defined]
            yield from ((entry, 0, memoryview(b"")) for entry in names.begun_by(member))
            entry = names.entry(member)
            if entry is not None:
                yield entry, 0, memoryview(b"")
                if entry.kind is Kind.FILE:
                    for offset, data in _data(archive, member):
                        yield entry, offset, data
            source.allowed = _HEADER_MAX
        source.allowed = _HEADER_MAX
        if not has_ended:
            raise RefusedError("the archive ends before its end: it is cut or damaged")
        while source.read(_RECORD):
            pass


def _data(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[tuple[int, memoryview]]:
    # Of a stream `extractfile` gives a file that cannot seek over a hole.
    stream = archive.fileobj
    assert stream is not None
    stream.seek(member.offset_data)
    for offset, length in pieces(_runs(member)):
        data = stream.read(length)
        if len(data) < length:
            raise RefusedError("the archive ends in a file")
        yield offset, memoryview(data)


def _runs(member: tarfile.TarInfo) -> list[Run]:
    """Where there is something in a member. Raises RefusedError for a map that is none."""
    if not member.issparse():
        return [(0, member.size)] if member.size else []
    runs: list[Run] = []
    places = cast("list[tuple[int, int]]", member.sparse)
    for offset, length in places:
        if length < 0 or offset < (runs[-1][1] if runs else 0) or offset + length > member.size:
            raise RefusedError(f"{shown(_bytes(member.name))}: a sparse file with a wrong map")
        if length:
            runs.append((offset, offset + length))
    return runs


class _Names:
    """Names of members are those of entries below the one directory that an archive is of."""

    def __init__(self) -> None:
        self._top: bytes | None = None

    def begun_by(self, member: tarfile.TarInfo) -> Iterator[Entry]:
        """The session, if this is the first member and not the session itself."""
        if self._top is not None:
            return
        path = _plain(member.name)
        self._top = path if member.isdir() else path.rpartition(b"/")[0]
        check_path(self._top)
        if not member.isdir():
            yield Entry(b"", Kind.DIRECTORY, 0o700, time.time_ns())

    def entry(self, member: tarfile.TarInfo) -> Entry:
        path = self._below(member.name)
        times = _time_ns(member)
        mode = member.mode & 0o777
        xattrs = dict(_xattrs(member))
        if member.isdir():
            return Entry(path, Kind.DIRECTORY, mode, times, xattrs=xattrs)
        if member.issym():
            return Entry(path, Kind.SYMLINK, 0o777, times, target=_bytes(member.linkname))
        if member.islnk():
            return Entry(path, Kind.LINK, mode, times, target=self._below(member.linkname))
        if member.isreg():
            return Entry(path, Kind.FILE, mode, times, member.size, xattrs=xattrs)
        raise RefusedError(f"{shown(path)} is a device or a pipe: a session has none")

    def _below(self, name: str) -> bytes:
        """A member's name below the session's directory."""
        path, top = _plain(name), self._top
        if top is None or not top:
            return path
        if path != top and not path.startswith(top + b"/"):
            raise RefusedError(f"{shown(path)} lies outside of {shown(top)}, the session")
        return path[len(top) + 1 :]


def _plain(name: str) -> bytes:
    """Without the `./` that `tar -C DIR .` puts before each."""
    path = _bytes(name)
    while path.startswith(b"./"):
        path = path[2:]
    return b"" if path == b"." else path


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _time_ns(member: tarfile.TarInfo) -> int:
    try:
        seconds = Decimal(member.pax_headers.get("mtime", member.mtime))
        if not abs(seconds) < _TIME_MAX:
            raise OverflowError
        return int(seconds.scaleb(9))
    except ArithmeticError:
        raise RefusedError(f"{shown(_bytes(member.name))}: its time is impossible") from None


def _xattrs(member: tarfile.TarInfo) -> Iterator[tuple[bytes, bytes]]:
    """Those of users: others say what is so on the machine that they are of."""
    for keyword, value in member.pax_headers.items():
        if keyword.startswith(_XATTR + "user."):
            name = keyword.removeprefix(_XATTR).replace("%3D", "=").replace("%25", "%")
            if _bytes(name) != KNOWN_CONTENT:
                yield _bytes(name), _bytes(value)
