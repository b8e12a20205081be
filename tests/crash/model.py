"""What a tree of files is: the model that the store is compared with.

A tree is a value: an operation returns another one, so that the state after each
operation can be kept. Errors are OSError with the errno that POSIX names.
"""

from __future__ import annotations

import errno
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

from kvfs.engine.io import Step
from kvfs.engine.store import Store

ROOT = 1
_CHUNK = 64 * 1024
_ZEROS = bytes(_CHUNK)


@dataclass(frozen=True, slots=True)
class Content:
    """The bytes of a file, in chunks that the states of a history share."""

    size: int = 0
    chunks: tuple[bytes, ...] = ()

    def __bytes__(self) -> bytes:
        return b"".join(self.chunks)[: self.size]

    def write(self, offset: int, data: bytes) -> Content:
        end = offset + len(data)
        grown = self.truncate(max(self.size, end))
        first, last = offset // _CHUNK, -(-end // _CHUNK)
        old = b"".join(grown.chunks[first:last])
        at = offset - first * _CHUNK
        new = old[:at] + data + old[at + len(data) :]
        parts = [new[start : start + _CHUNK] for start in range(0, len(new), _CHUNK)]
        return Content(grown.size, (*grown.chunks[:first], *parts, *grown.chunks[last:]))

    def truncate(self, size: int) -> Content:
        count = -(-size // _CHUNK)
        chunks = [*self.chunks[:count], *[_ZEROS] * (count - len(self.chunks))]
        tail = size % _CHUNK
        if size < self.size and tail:
            chunks[-1] = chunks[-1][:tail].ljust(_CHUNK, b"\0")
        return Content(size, tuple(chunks))


@dataclass(frozen=True, slots=True)
class Node:
    mode: int
    content: Content = Content()
    target: bytes = b""
    entries: Mapping[bytes, int] = field(default_factory=dict)
    xattrs: Mapping[bytes, bytes] = field(default_factory=dict)
    links: int = 1

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)


class Seen(NamedTuple):
    """What can be seen at one path. `same_as`: the first path of the same inode."""

    mode: int
    links: int
    size: int
    data: bytes
    xattrs: tuple[tuple[bytes, bytes], ...]
    same_as: bytes


View = dict[bytes, Seen]


def _fail(number: int) -> NoReturn:
    raise OSError(number, errno.errorcode[number])


@dataclass(frozen=True, slots=True)
class Tree:
    """All nodes by inode number; the numbers are given by who creates."""

    nodes: Mapping[int, Node] = field(default_factory=lambda: {ROOT: Node(stat.S_IFDIR | 0o700)})

    # -- looking

    def directories(self) -> list[int]:
        return [ino for ino in self.reachable() if self.nodes[ino].is_directory]

    def files(self) -> list[int]:
        return [ino for ino in self.reachable() if stat.S_ISREG(self.nodes[ino].mode)]

    def reachable(self) -> list[int]:
        found, seen = [ROOT], {ROOT}
        for ino in found:
            for child in self.nodes[ino].entries.values():
                if child not in seen:
                    seen.add(child)
                    found.append(child)
        return found

    def names(self) -> list[tuple[int, bytes]]:
        return [(ino, name) for ino in self.directories() for name in self.nodes[ino].entries]

    @property
    def size(self) -> int:
        return sum(node.content.size for node in self.nodes.values())

    # -- operations

    def create(self, ino: int, parent: int, name: bytes, mode: int, target: bytes = b"") -> Tree:
        self._refuse_taken(parent, name)
        new = self._with(ino, Node(mode, target=target))
        return new._enter(parent, name, ino)

    def link(self, ino: int, parent: int, name: bytes) -> Tree:
        if self.nodes[ino].is_directory:
            _fail(errno.EPERM)
        if self.nodes[ino].links == 0:
            _fail(errno.ENOENT)
        self._refuse_taken(parent, name)
        return self._change(ino, links=self.nodes[ino].links + 1)._enter(parent, name, ino)

    def unlink(self, parent: int, name: bytes) -> Tree:
        ino = self._lookup(parent, name)
        if self.nodes[ino].is_directory:
            _fail(errno.EISDIR)
        return self._leave(parent, name)._change(ino, links=self.nodes[ino].links - 1)

    def rmdir(self, parent: int, name: bytes) -> Tree:
        ino = self._lookup(parent, name)
        if not self.nodes[ino].is_directory:
            _fail(errno.ENOTDIR)
        if self.nodes[ino].entries:
            _fail(errno.ENOTEMPTY)
        return self._leave(parent, name)._change(ino, links=0)

    def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, how: str = "replace"
    ) -> Tree:
        """`how` is replace, noreplace or exchange."""
        ino = self._lookup(parent, name)
        other = self.nodes[new_parent].entries.get(new_name)
        self._refuse_loop(ino, new_parent)
        if how == "exchange":
            if other is None:
                _fail(errno.ENOENT)
            self._refuse_loop(other, parent)
            return self._enter(parent, name, other)._enter(new_parent, new_name, ino)
        if other is None:
            return self._leave(parent, name)._enter(new_parent, new_name, ino)
        if how == "noreplace":
            _fail(errno.EEXIST)
        if other == ino:
            return self
        self._refuse_replacing(self.nodes[ino], self.nodes[other])
        links = 0 if self.nodes[other].is_directory else self.nodes[other].links - 1
        moved = self._leave(parent, name)._enter(new_parent, new_name, ino)
        return moved._change(other, links=links)

    def write(self, ino: int, offset: int, data: bytes) -> Tree:
        return self._change(ino, content=self.nodes[ino].content.write(offset, data))

    def truncate(self, ino: int, size: int) -> Tree:
        return self._change(ino, content=self.nodes[ino].content.truncate(size))

    def chmod(self, ino: int, mode: int) -> Tree:
        return self._change(ino, mode=stat.S_IFMT(self.nodes[ino].mode) | mode)

    def set_xattr(self, ino: int, name: bytes, value: bytes) -> Tree:
        return self._change(ino, xattrs={**self.nodes[ino].xattrs, name: value})

    def remove_xattr(self, ino: int, name: bytes) -> Tree:
        if name not in self.nodes[ino].xattrs:
            _fail(errno.ENODATA)
        xattrs = {key: value for key, value in self.nodes[ino].xattrs.items() if key != name}
        return self._change(ino, xattrs=xattrs)

    def below(self, ino: int) -> list[int]:
        """A directory and everything below it."""
        found = [ino]
        for above in found:
            children = self.nodes[above].entries.values()
            found += [child for child in dict.fromkeys(children) if child not in found]
        return found

    def parent(self, ino: int) -> int:
        return next(above for above in self.reachable() if ino in self._children(above))

    def _children(self, ino: int) -> list[int]:
        return list(self.nodes[ino].entries.values())

    def fork(self, ino: int, name: bytes, copies: Mapping[int, int]) -> Tree:
        """`copies`: the number of the copy of each inode below."""
        if ino == ROOT:
            _fail(errno.EINVAL)
        parent = self.parent(ino)
        self._refuse_taken(parent, name)
        old = {below: self.nodes[below] for below in self.below(ino)}
        links = Counter(child for node in old.values() for child in node.entries.values())
        nodes = dict(self.nodes)
        for below, node in old.items():
            entries = {key: copies[child] for key, child in node.entries.items()}
            count = 1 if node.is_directory else links[below]
            nodes[copies[below]] = replace(node, entries=entries, links=count)
        return Tree(nodes)._enter(parent, name, copies[ino])

    def reclaim(self, parent: int, name: bytes) -> Tree:
        ino = self._lookup(parent, name)
        below = self.below(ino)
        links = Counter(child for above in below for child in self.nodes[above].entries.values())
        links[ino] += 1
        nodes = dict(self.nodes)
        for gone in below:
            node = nodes[gone]
            left = 0 if node.is_directory else node.links - links[gone]
            nodes[gone] = replace(node, links=left, entries={})
        return Tree(nodes)._leave(parent, name)

    # -- parts of them

    def _with(self, ino: int, node: Node) -> Tree:
        return Tree({**self.nodes, ino: node})

    def _change(self, ino: int, **changes: Any) -> Tree:
        return self._with(ino, replace(self.nodes[ino], **changes))

    def _enter(self, parent: int, name: bytes, ino: int) -> Tree:
        return self._change(parent, entries={**self.nodes[parent].entries, name: ino})

    def _leave(self, parent: int, name: bytes) -> Tree:
        entries = {key: ino for key, ino in self.nodes[parent].entries.items() if key != name}
        return self._change(parent, entries=entries)

    def _lookup(self, parent: int, name: bytes) -> int:
        ino = self.nodes[parent].entries.get(name)
        return _fail(errno.ENOENT) if ino is None else ino

    def _refuse_taken(self, parent: int, name: bytes) -> None:
        if name in self.nodes[parent].entries:
            _fail(errno.EEXIST)

    def _refuse_loop(self, moved: int, directory: int) -> None:
        below = {moved}
        for ino in self.reachable():  # parents come before their children
            if ino in below and self.nodes[ino].is_directory:
                below |= set(self.nodes[ino].entries.values())
        if self.nodes[moved].is_directory and directory in below:
            _fail(errno.EINVAL)

    def _refuse_replacing(self, node: Node, replaced: Node) -> None:
        if node.is_directory and not replaced.is_directory:
            _fail(errno.ENOTDIR)
        if replaced.is_directory:
            if not node.is_directory:
                _fail(errno.EISDIR)
            if replaced.entries:
                _fail(errno.ENOTEMPTY)

    # -- comparing

    def view(self) -> View:
        """Everything that can be seen, by path."""
        paths: dict[int, list[bytes]] = defaultdict(list)
        todo = [(b"", ROOT)]
        for path, ino in todo:
            paths[ino].append(path)
            todo += [(path + b"/" + n, child) for n, child in self.nodes[ino].entries.items()]
        return {path: self._seen(ino, min(same)) for ino, same in paths.items() for path in same}

    def _seen(self, ino: int, same_as: bytes) -> Seen:
        node = self.nodes[ino]
        children = [self.nodes[child] for child in node.entries.values()]
        links = 2 + sum(c.is_directory for c in children) if node.is_directory else node.links
        data = node.target or bytes(node.content)
        return Seen(node.mode, links, len(data), data, tuple(sorted(node.xattrs.items())), same_as)


def view_of(store: Store, run: Callable[[Step[Any]], Any]) -> View:
    """The same of a store, by its own means."""
    paths: dict[int, list[bytes]] = defaultdict(list)
    todo = [(b"", ROOT)]
    for path, ino in todo:
        paths[ino].append(path)
        if stat.S_ISDIR(run(store.node(ino)).inode.mode):
            entries = run(store.list_directory(ino, 0, 10_000))
            todo += [(path + b"/" + entry.name, entry.ino) for _, entry in entries]
    seen = {ino: _seen_of(store, run, ino, min(same)) for ino, same in paths.items()}
    return {path: seen[ino] for ino, same in paths.items() for path in same}


def _seen_of(store: Store, run: Callable[[Step[Any]], Any], ino: int, same_as: bytes) -> Seen:
    inode = run(store.node(ino)).inode
    names = sorted(run(store.xattr_names(ino)))
    xattrs = tuple((name, run(store.xattr(ino, name))) for name in names)
    if stat.S_ISLNK(inode.mode):
        data = run(store.readlink(ino))
    else:
        data = bytes(run(store.read(ino, 0, inode.size)))
    return Seen(inode.mode, inode.nlink, inode.size, data, xattrs, same_as)


def difference(expected: View, found: View) -> str:
    """What differs, in words short enough to read."""
    lines = [f"missing {path!r}" for path in expected.keys() - found.keys()]
    lines += [f"unexpected {path!r}" for path in found.keys() - expected.keys()]
    for path in expected.keys() & found.keys():
        for name, want, have in zip(Seen._fields, expected[path], found[path], strict=True):
            if want != have:
                lines.append(f"{path!r} {name}: {_brief(want, have)}")
    return "; ".join(sorted(lines)) or "nothing"


def _brief(want: Any, have: Any) -> str:
    if isinstance(want, bytes) and len(want) > 40:
        pairs = zip(want, have, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(want), len(have)))
        return f"first difference at byte {at} of {len(want)}"
    return f"expected {want!r}, found {have!r}"
