"""Nodes of the index on the device: read once, verified, kept within a budget."""

from __future__ import annotations

import errno
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from cachetools import LRUCache

from kvfs.engine import metadata
from kvfs.engine.buffers import aligned
from kvfs.engine.device import Device
from kvfs.engine.format import FormatError, Pointer, TreeNode, round_up
from kvfs.engine.io import Completion, Executor, Limit, Read, Step, wait
from kvfs.engine.ring import Ring
from kvfs.engine.vault import Vault

log = logging.getLogger(__name__)

_NODE_OVERHEAD = 512
_READS_MAX = 512
_TOLD_MAX = 65_536


class UnreadableNode(OSError):
    """A node of the index is not what was written, or the device does not give it (EIO)."""


@dataclass(slots=True)
class NodeCache:
    """At most `size` bytes of nodes, the last used, and more only for who needs more at one
    moment; `held` are now. `errors` counts the `unreadable` ones, each once. A device that
    `is_silent` is not asked. Belongs to the loop's
    thread; reads run in others."""

    device: Device
    executor: Executor
    ring: Ring
    size: int
    vault: Vault = field(default_factory=lambda: Vault(b""))
    held: int = 0
    unreadable: LRUCache[Pointer, None] = field(default_factory=lambda: LRUCache(_TOLD_MAX))
    errors: int = 0
    is_silent: Callable[[], bool] = field(default=lambda: False)
    _nodes: OrderedDict[Pointer, TreeNode] = field(default_factory=OrderedDict)
    _loading: dict[Pointer, Completion[TreeNode]] = field(default_factory=dict)
    _gathering: int = 0
    _reads: Limit = field(default_factory=lambda: Limit(_READS_MAX))

    def load(self, pointer: Pointer) -> Step[TreeNode]:
        """Raises UnreadableNode."""
        node = self._nodes.get(pointer)
        if node is None:
            refuse_if(self.is_silent())
        if node is None and pointer not in self._loading:
            yield from self._reads.room()
            node = self._nodes.get(pointer)
        if node is not None:
            self._nodes.move_to_end(pointer)
            return node
        loading = self._loading.get(pointer)
        if loading is None:
            loading = self._loading[pointer] = self._start(pointer)
            self._reads.began(loading)
            loading.when_done(partial(self._finished, pointer, loading))
        try:
            return (yield from wait(loading))
        except OSError as failure:
            text = os.strerror(errno.EIO)
            raise UnreadableNode(errno.EIO, text, failure.filename or str(failure)) from None

    def find(self, pointer: Pointer) -> TreeNode | None:
        """If it is here. Not as a use of it."""
        return self._nodes.get(pointer)

    def saw_unreadable(self, pointer: Pointer, why: object) -> None:
        """Told and counted once."""
        if pointer not in self.unreadable:
            self.unreadable[pointer] = None
            self.errors += 1
            log.error("a node of the index cannot be read: %s", why)

    def keep(self, pointer: Pointer, node: TreeNode) -> None:
        """It is known without being read: it was just written."""
        if pointer in self._nodes:
            return
        self._nodes[pointer] = node
        self.held += _taken(node)
        self._trim()

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Nodes stay until its end, however many come."""
        self._gathering += 1
        try:
            yield
        finally:
            self._gathering -= 1
            self._trim()

    def _trim(self) -> None:
        while self.held > self.size and not self._gathering:
            _, oldest = self._nodes.popitem(last=False)
            self.held -= _taken(oldest)

    def _start(self, pointer: Pointer) -> Completion[TreeNode]:
        self.ring.pin(pointer.address)
        blocks = aligned(round_up(pointer.stored))
        decode = partial(_decode, pointer, blocks, self.vault)
        return self.executor.submit(
            Read(self.device, pointer.address, [blocks], decode, is_quick=True)
        )

    def _finished(self, pointer: Pointer, loading: Completion[TreeNode]) -> None:
        del self._loading[pointer]
        self.ring.unpin(pointer.address)
        if loading.error is not None:
            self.saw_unreadable(pointer, loading.error)
        else:
            self.keep(pointer, loading.result())


def refuse_if(is_silent: bool) -> None:
    """Raises EIO for what only a device has that has failed and does not answer."""
    if is_silent:
        raise OSError(errno.EIO, "the device does not answer")


def _taken(node: TreeNode) -> int:
    return len(node) + _NODE_OVERHEAD


def _decode(pointer: Pointer, blocks: memoryview, vault: Vault) -> TreeNode:
    try:
        return opened(TreeNode(metadata.decode(pointer, blocks)), vault)
    except FormatError as fault:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(fault)) from None


def opened(node: TreeNode, vault: Vault) -> TreeNode:
    """A node as it is in memory. Raises FormatError."""
    if node.level or not vault.is_on:
        return node
    # A leaf has no tombstones.
    items = [(key, value or b"") for key, value in vault.opened([*node.items()])]
    return TreeNode(TreeNode.pack(0, items))
