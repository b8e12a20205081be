"""A session that this engine adds to: made hidden, shown with its first blocks, then appended to.

What is shown is never cut or overwritten, so a reader needs no lock. Where a prompt leaves a
session's tokens, it goes on in a fork of it, which shares what they have in common.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from kvfs.torch.errors import SessionBusyError
from kvfs.torch.files import SessionFile, set_xattr, write_all
from kvfs.torch.session import Record
from kvfs.vllm import sums
from kvfs.vllm.chains import TOKEN_BYTES
from kvfs.vllm.shape import Shape

_NAMES_TRIED = 16


class GrowingSession:
    """Open for appending, locked against a second writer. `tokens` is all that it holds."""

    def __init__(self, path: Path, shape: Shape, tokens: bytes) -> None:
        """At `path`, of which the first `tokens` are kept.

        Raises:
            SessionBusyError: another one appends to it.
            OSError: as the filesystem reports it.
        """
        self.path = path
        self.tokens = tokens
        self._shape = shape
        self._is_shown = not path.name.startswith(".")
        self._fds: list[int] = []
        self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._lock()
        except BaseException:
            self.close()
            raise

    @classmethod
    def made(cls, folder: Path, shape: Shape) -> GrowingSession:
        """A new, empty one."""
        path = _hidden(folder)
        path.mkdir(mode=0o700, parents=True)
        with _gone_on_error(path):
            session = cls(path, shape, b"")
            session._describe()
            session._open_files()
        return session

    @classmethod
    def forked(cls, source: Path, shape: Shape, tokens: bytes) -> GrowingSession:
        """A copy of the first `tokens` of another session beside it; they are not copied.

        Raises:
            ValueError: it does not begin with these tokens.
        """
        path = _hidden(source.parent)
        os.setxattr(source, "user.kvfs.fork", path.name.encode())
        with _gone_on_error(path):
            session = cls(path, shape, tokens)
            session._open_files()
            session._cut()
        return session

    @classmethod
    def taken_up(cls, path: Path, shape: Shape, tokens: bytes) -> GrowingSession:
        """One that is there, and holds these tokens and no others.

        Raises:
            SessionBusyError: another one appends to it.
            ValueError: it does not hold just these tokens.
        """
        session = cls(path, shape, tokens)
        try:
            session._open_files()
            session._cut()
        except BaseException:
            session.close()
            raise
        return session

    def append(self, layers: Sequence[memoryview], tokens: bytes, block_sums: bytes) -> None:
        """Whole blocks: the rows of each layer, their tokens, and their sums by block and layer."""
        before = len(self.tokens) // TOKEN_BYTES
        *files, sum_file, token_file = self._fds
        for fd, rows in zip(files, layers, strict=True):
            write_all(fd, [rows], before * self._shape.row.row_bytes)
        at = sums.place(before // self._shape.block, self._shape.layers)
        write_all(sum_file, [memoryview(block_sums)], at)
        # Readers go by the tokens: they come when all that they speak of is there.
        write_all(token_file, [memoryview(tokens)], len(self.tokens))
        self.tokens += tokens
        if not self._is_shown:
            self._show()

    def sync(self) -> None:
        """Make everything appended so far durable."""
        os.fsync(self._fds[-1])  # KVFS commits in order: it covers every earlier write

    def close(self) -> None:
        """Give it up. What was never shown goes."""
        fds, self._fds = [*self._fds, self._directory], []
        self._directory = -1
        for fd in fds:
            with suppress(OSError):  # the filesystem may be gone
                os.close(fd)
        if not self._is_shown:
            shutil.rmtree(self.path, ignore_errors=True)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SessionBusyError(f"{self.path} is being appended to") from None

    def _describe(self) -> None:
        fingerprint, row = self._shape.fingerprint, self._shape.row
        set_xattr(self._directory, "model", str(fingerprint))
        self._file("session.json").replace(Record(fingerprint).encode())
        shape = ",".join(map(str, row.shape))
        for name in self._shape.names:
            self._file(name).ensure({"dtype": row.dtype_name, "shape": shape})
        self._file(sums.NAME).replace(sums.header(self._shape.block, self._shape.layers))
        self._file("tokens").ensure({"dtype": "int32", "shape": "1"})

    def _open_files(self) -> None:
        for name in [*self._shape.names, sums.NAME, "tokens"]:
            self._fds.append(self._file(name).lease())

    def _cut(self) -> None:
        """To what is kept, also of what a crash left behind it."""
        count = len(self.tokens) // TOKEN_BYTES
        held = self._file("tokens").read()
        is_kept = held.startswith(self.tokens) if not self._is_shown else held == self.tokens
        if not is_kept:
            raise ValueError(f"{self.path} does not hold these {count} tokens")
        layer_bytes = count * self._shape.row.row_bytes
        sum_bytes = sums.place(count // self._shape.block, self._shape.layers)
        lengths = [*[layer_bytes] * self._shape.layers, sum_bytes, len(self.tokens)]
        # The tokens first: they never speak of what is no longer there.
        for fd, length in reversed(list(zip(self._fds, lengths, strict=True))):
            size = os.fstat(fd).st_size
            if size < length:
                raise ValueError(f"{self.path} has a file that is cut")
            if size > length:
                os.ftruncate(fd, length)

    def _show(self) -> None:
        name = xxhash.xxh3_128_hexdigest(self.tokens)
        for number in range(_NAMES_TRIED):
            shown = self.path.with_name(f"{name}-{number}" if number else name)
            try:
                os.rename(self.path, shown)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            else:
                self.path, self._is_shown = shown, True
                return
        raise FileExistsError(errno.EEXIST, "all names for these tokens are taken", str(self.path))

    def _file(self, name: str) -> SessionFile:
        return SessionFile(self._directory, self.path / name)


def _hidden(folder: Path) -> Path:
    return folder / f".new-{os.urandom(8).hex()}"


@contextmanager
def _gone_on_error(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
