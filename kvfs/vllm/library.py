"""The sessions in a directory, found by what they begin with.

A session's `tokens` say what it holds; they are written last, so all that they speak of is
there. Sorted as strings, the session that has most in common with a prompt stands next to
the place where the prompt would. What is on disk is the truth: other engines add to it, and
reclaim takes from it.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvfs.torch.files import SessionFile
from kvfs.torch.session import Record
from kvfs.vllm import sums
from kvfs.vllm.chains import TOKEN_BYTES, common
from kvfs.vllm.shape import Shape

_logger = logging.getLogger(__name__)
_LOOK_AGAIN_S = 1.0


@dataclass(frozen=True)
class Found:
    """A session that begins with the same `tokens` tokens, whole blocks; `all_of_it` if these are
    all that it holds."""

    name: str
    tokens: int
    all_of_it: bool


@dataclass(frozen=True)
class _Known:
    tokens: bytes
    inode: int


class Library:
    """What one directory holds of one model. Not safe to use from several threads."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        """`folder` need not exist; what appears in it is found."""
        self._folder = folder
        self._shape = shape
        self._seen: object = None
        self._looked_s = 0.0
        # Those of others too, as sessions of no tokens, so that they are looked at once.
        self._known: dict[str, _Known] = {}
        self._sorted: list[tuple[bytes, str]] = []
        self._unfit: set[tuple[str, int]] = set()

    def longest(self, tokens: bytes) -> Found | None:
        """The session that has most in common with these tokens, at least a block.

        Raises:
            OSError: as the filesystem reports it, but not for what is gone.
        """
        self._refresh()
        while True:
            best = max(self._neighbours(tokens), default=None)
            if best is None or (length := self._shape.whole(best[0])) == 0:
                return None
            name = best[1]
            known = self._known[name]
            if self._has_changed(name):
                continue
            if self._holds(name, length):
                return Found(name, length, all_of_it=length * TOKEN_BYTES == len(known.tokens))
            self.forget(name)

    def forget(self, name: str) -> None:
        """Never find this session again: it did not hold what it should."""
        if name in self._known:
            self._unfit.add((name, self._known[name].inode))
            self._set(name, _Known(b"", self._known[name].inode))

    def bring_in(self, name: str) -> None:
        """Have it read into warm memory, all layers at once: it is about to be loaded."""
        with suppress(OSError):  # it is read when it is loaded, then
            os.setxattr(self._folder / name, "user.kvfs.prefetch", b"1")

    def _neighbours(self, tokens: bytes) -> Iterator[tuple[int, str]]:
        at = bisect_left(self._sorted, (tokens, ""))
        for held, name in self._sorted[max(0, at - 1) : at + 1]:
            yield common(held, tokens), name

    def _refresh(self) -> None:
        try:
            status = os.stat(self._folder)
        except FileNotFoundError:
            names, self._seen = set(self._known), None
        else:
            seen = (status.st_dev, status.st_ino, status.st_mtime_ns)
            is_time = time.monotonic() - self._looked_s > _LOOK_AGAIN_S
            if seen == self._seen and not is_time:
                return
            listed = set(self._known) if seen == self._seen else set(os.listdir(self._folder))
            names = {name for name in listed | set(self._known) if not name.startswith(".")}
            self._seen, self._looked_s = seen, time.monotonic()
        for name in names:
            self._has_changed(name)

    def _has_changed(self, name: str) -> bool:
        """Whether the session is no longer as it was known; it is known anew then."""
        try:
            status = os.stat(self._folder / name / "tokens")
        except (FileNotFoundError, NotADirectoryError):
            return self._set(name, None)
        known = self._known.get(name)
        if (name, status.st_ino) in self._unfit or (
            known is not None
            and (known.inode, len(known.tokens)) == (status.st_ino, self._in_blocks(status.st_size))
        ):
            return False
        return self._set(name, self._read(name, status.st_ino))

    def _set(self, name: str, known: _Known | None) -> bool:
        before = self._known.pop(name, None)
        if before is not None and before.tokens:
            del self._sorted[bisect_left(self._sorted, (before.tokens, name))]
        if known is not None:
            self._known[name] = known
            if known.tokens:
                insort(self._sorted, (known.tokens, name))
        return known != before

    def _read(self, name: str, inode: int) -> _Known | None:
        path = self._folder / name
        try:
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                return _Known(self._tokens(directory, path), inode)
            finally:
                os.close(directory)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, LookupError, TypeError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.EIO:
                raise
            self._unfit.add((name, inode))
            _logger.debug("%s is not a session of this model: %s", path, error)
            return _Known(b"", inode)

    def _tokens(self, directory: int, path: Path) -> bytes:
        record = Record.decode(SessionFile(directory, path / "session.json").read())
        if different := record.fingerprint.differences(self._shape.fingerprint):
            raise ValueError(f"differs in {', '.join(different)}")
        sums.parse(
            SessionFile(directory, path / sums.NAME).read(), self._shape.block, self._shape.layers
        )
        tokens = SessionFile(directory, path / "tokens").read()
        return tokens[: self._in_blocks(len(tokens))]

    def _in_blocks(self, nbytes: int) -> int:
        return self._shape.whole(nbytes // TOKEN_BYTES) * TOKEN_BYTES

    def _holds(self, name: str, tokens: int) -> bool:
        """Whether every file of the session is long enough for so many tokens."""
        blocks = tokens // self._shape.block
        least = dict.fromkeys(self._shape.names, blocks * self._shape.block_bytes)
        least[sums.NAME] = sums.place(blocks, self._shape.layers)
        path = self._folder / name
        try:
            short = [file for file, size in least.items() if os.stat(path / file).st_size < size]
        except FileNotFoundError as error:
            short = [str(error.filename)]
        if short:
            _logger.warning("%s: %s is cut or gone: the session is not used", path, short[0])
        return not short
