"""The POSIX face: a thin translation from FUSE requests to the store's steps."""

from __future__ import annotations

import errno
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvfs.engine.format import BLOCK, NAME_LENGTH_MAX, ROOT_INODE, Inode
from kvfs.engine.io import Completion, Step, wait
from kvfs.engine.nodes import Node, error
from kvfs.engine.store import Store
from kvfs.mount import control, protocol
from kvfs.mount.protocol import (
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    Call,
    Capability,
    Changes,
    Opened,
)
from kvfs.mount.scrubbing import SCRUBBED, Scrubbing
from kvfs.tiers import hints
from kvfs.tiers.migrate import Migration
from kvfs.tiers.planner import Planner
from kvfs.tiers.prefetch import LookAhead, Reader
from kvfs.tiers.uses import Uses

log = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 3600
_BLOCK_SIZE_HINT = 1024 * 1024
_READDIR_BATCH, _READDIR_BATCH_MAX = 32, 512
_NOTICES_MAX = 4096
# Who opens a smaller file may want to know of the session without reading it.
_LAYER_MIN = 64 * 1024
_DOT, _DOT_DOT = 1, 2
_CAPABILITY = b"security.capability"


@dataclass(slots=True)
class _Handle:
    """An open file or directory. `direct`: opened with O_DIRECT; `writes_directly`: what is written
    does not come by the kernel's page cache; `snapshot` is the content of a file in `/.kvfs`;
    `session` the one that the file is in, 0 in a pool; `batch` how many names of a directory are
    likely to be wanted at once."""

    ino: int
    session: int = 0
    direct: bool = False
    writes_directly: bool = False
    reader: Reader | None = None
    snapshot: bytes | None = None
    batch: int = _READDIR_BATCH


# In a directory: cookie, name, inode, mode or the type in it, and the node where it is looked up.
_Name = tuple[int, bytes, int, int, "Node | None"]


class Filesystem:
    """Handles requests (kvfs.mount.protocol.OPERATIONS names the methods): each is a step, or
    answers at once; raises OSError.

    `aside` runs what may wait for a request of ours in a thread of its own. `mounted` is called
    once the kernel can be told something.
    """

    def __init__(
        self,
        store: Store,
        look_ahead: LookAhead,
        migration: Migration,
        planner: Planner,
        uses: Uses,
        scrubbing: Scrubbing,
        mounted: control.Mounted,
        aside: Callable[[Callable[[], None]], Completion[None]],
    ) -> None:
        self._store = store
        self._look_ahead = look_ahead
        self._migration = migration
        self._planner = planner
        self._uses = uses
        self._scrubbing = scrubbing
        self._mounted = mounted
        self._aside = aside
        self._handles: dict[int, _Handle] = {}
        self._next_handle = 0
        self._changed_blocks: set[int] = set()
        # Files of which the kernel may have pages that it read since it was told to drop them.
        self._in_page_cache: set[int] = set()
        # Files that the kernel knows, and that were seen to have no such xattr.
        self._without_capability: set[int] = set()
        self._notices = _Notices()
        self._agreed = Capability(0)
        store.watch_blocks(self._blocks_changed)
        store.reclaimer.on_removed = self._removed

    def agreed(self, capabilities: Capability) -> None:
        """With the kernel, before its first request."""
        self._agreed = capabilities

    def mounted(self, notify: Callable[[bytes], None]) -> None:
        self._notices.begin(notify)

    # -- names and attributes

    def lookup(self, call: Call, name: bytes) -> Step[bytes]:
        if call.inode == ROOT_INODE and name == control.CONTROL_NAME:
            return _control_entry(control.CONTROL_INODE)
        if call.inode == control.CONTROL_INODE:
            return _control_entry(control.find_control_file(name))
        try:
            node = yield from self._store.lookup(call.inode, name)
        except OSError as failure:
            if failure.errno == errno.ENOENT:
                # All changes pass through us: the kernel may remember it.
                return protocol.no_entry(_TIMEOUT_SECONDS)
            raise
        return self._remember(node)

    def forget(self, call: Call, count: int) -> Step[None]:
        yield from self._store.unpin(call.inode, count)
        if not self._store.is_pinned(call.inode):
            self._in_page_cache.discard(call.inode)
            self._without_capability.discard(call.inode)

    def batch_forget(self, call: Call, forgotten: list[tuple[int, int]]) -> Step[None]:
        for ino, count in forgotten:
            yield from self.forget(Call(ino, call.uid, call.gid, call.pid), count)

    def getattr(self, call: Call) -> Step[bytes]:
        if control.is_control(call.inode):
            return protocol.attributes_answer(_control_attributes(call.inode), 0)
        return _attributes_answer((yield from self._store.node(call.inode)))

    def setattr(self, call: Call, changes: Changes) -> Step[bytes]:
        _refuse_control_inode(call.inode)
        mode = changes.mode
        if changes.kills_suid:
            mode = _without_suid((yield from self._store.node(call.inode)).inode.mode)
        if (changes.uid, changes.gid, changes.size) != (None, None, None):
            yield from self._drop_capability(call.inode)
        step = self._store.set_attributes(
            call.inode,
            mode=mode,
            uid=changes.uid,
            gid=changes.gid,
            size=changes.size,
            atime_ns=changes.atime_ns,
            mtime_ns=changes.mtime_ns,
        )
        return _attributes_answer((yield from step))

    def readlink(self, call: Call) -> Step[bytes]:
        return self._store.readlink(call.inode)

    def mknod(self, call: Call, name: bytes, mode: int, device: int) -> Step[bytes]:
        return self._remember((yield from self._create(call, name, mode, device=device)))

    def mkdir(self, call: Call, name: bytes, mode: int) -> Step[bytes]:
        mode = stat.S_IFDIR | stat.S_IMODE(mode)
        return self._remember((yield from self._create(call, name, mode)))

    def symlink(self, call: Call, name: bytes, target: bytes) -> Step[bytes]:
        mode = stat.S_IFLNK | 0o777
        return self._remember((yield from self._create(call, name, mode, target=target)))

    def link(self, call: Call, ino: int, name: bytes) -> Step[bytes]:
        _refuse_control_inode(ino)
        _refuse_control(call.inode, name)
        return self._remember((yield from self._store.link(ino, call.inode, name)))

    def unlink(self, call: Call, name: bytes) -> Step[None]:
        _refuse_control(call.inode, name)
        yield from self._store.unlink(call.inode, name)

    def rmdir(self, call: Call, name: bytes) -> Step[None]:
        _refuse_control(call.inode, name)
        self._planner.removed((yield from self._store.rmdir(call.inode, name)))

    def rename(
        self, call: Call, name: bytes, new_directory: int, new_name: bytes, flags: int
    ) -> Step[None]:
        _refuse_control(call.inode, name)
        _refuse_control(new_directory, new_name)
        if flags & ~(RENAME_EXCHANGE | RENAME_NOREPLACE):
            raise error(errno.EINVAL)
        yield from self._store.rename(
            call.inode, name, new_directory, new_name,
            replace=not flags & RENAME_NOREPLACE,
            exchange=bool(flags & RENAME_EXCHANGE),
        )  # fmt: skip

    # -- files

    def create(self, call: Call, name: bytes, mode: int, flags: int) -> Step[bytes]:
        node = yield from self._create(call, name, stat.S_IFREG | mode)
        entry = self._remember(node)
        return entry + (yield from self._open(node.inode.ino, flags))

    def open(self, call: Call, flags: int, kills_suid: bool) -> Step[bytes]:
        if control.is_control(call.inode):
            return (yield from self._open_control(call, flags))
        if flags & os.O_TRUNC:
            yield from self._drop_privileges(call.inode, kills_suid)
            yield from self._store.set_attributes(call.inode, size=0)
        return (yield from self._open(call.inode, flags))

    def read(self, call: Call, fh: int, offset: int, size: int) -> Step[bytes | memoryview]:
        handle = self._handles[fh]
        if handle.snapshot is not None:
            return handle.snapshot[offset : offset + size]
        if not handle.direct:
            self._in_page_cache.add(handle.ino)
        if handle.reader is not None:
            yield from self._look_ahead.reads(handle.reader, offset, size)
        data = yield from self._store.read(handle.ino, offset, size)
        self._saw_use(handle, len(data))
        # The answer is copied before anything else runs, so it may be a view.
        return data

    def write(self, call: Call, fh: int, offset: int, data: memoryview, flags: int) -> Step[bytes]:
        handle = self._handles[fh]
        self._saw_use(handle)
        kills_suid = bool(flags & protocol.WRITE_KILL_SUIDGID)
        if kills_suid or handle.ino not in self._without_capability:
            yield from self._drop_privileges(handle.ino, kills_suid)
        size = yield from self._store.write(handle.ino, offset, data)
        # Pages on their way to us are not dropped: the kernel would wait for this very answer.
        is_direct = handle.writes_directly and not flags & protocol.WRITE_CACHE
        if is_direct and handle.ino in self._in_page_cache:
            yield from self._drop_pages(handle.ino)
        return protocol.written(size)

    def _drop_privileges(self, ino: int, kills_suid: bool) -> Step[None]:
        """What a file loses when its content changes. The kernel leaves it to us, and so need
        not ask for the xattr before each write."""
        yield from self._drop_capability(ino)
        mode = (yield from self._store.node(ino)).inode.mode
        if kills_suid and _without_suid(mode) != mode:
            yield from self._store.set_attributes(ino, mode=_without_suid(mode))

    def _drop_capability(self, ino: int) -> Step[None]:
        if ino in self._without_capability:
            return
        if (yield from self._store.xattr(ino, _CAPABILITY)) is not None:
            yield from self._store.remove_xattr(ino, _CAPABILITY)
        self._without_capability.add(ino)

    def release(self, call: Call, fh: int) -> Step[None]:
        handle = self._handles.pop(fh)
        if handle.snapshot is None:
            self._store.closed(handle.ino)
            if not self._store.units.opened[handle.ino]:
                self._migration.warm.leases.end(handle.ino)
            yield from self._store.unpin(handle.ino)

    def fsync(self, call: Call, fh: int) -> Step[None]:
        if self._handles[fh].snapshot is None:
            yield from self._sync()

    # -- directories

    def opendir(self, call: Call) -> bytes:
        return protocol.opened(self._add_handle(_Handle(call.inode)), Opened(0))

    def readdir(self, call: Call, fh: int, cookie: int, size: int) -> Step[bytes]:
        return self._list(self._handles[fh], cookie, _Listing(size, plus=False))

    def readdirplus(self, call: Call, fh: int, cookie: int, size: int) -> Step[bytes]:
        return self._list(self._handles[fh], cookie, _Listing(size, plus=True))

    def _list(self, handle: _Handle, cookie: int, listing: _Listing) -> Step[bytes]:
        if handle.ino == control.CONTROL_INODE:
            yield from self._list_control(listing, cookie)
        elif (yield from self._list_dots(listing, handle.ino, cookie)):
            yield from self._list_names(listing, handle, max(cookie, _DOT_DOT))
        return listing.packed()

    def _list_dots(self, listing: _Listing, directory: int, cookie: int) -> Step[bool]:
        """False when the listing is full."""
        node = yield from self._store.node(directory)
        if cookie < _DOT and not listing.add(b".", directory, stat.S_IFDIR, _DOT):
            return False
        if cookie < _DOT_DOT:
            parent = yield from self._parent(node)
            return listing.add(b"..", parent.inode.ino, stat.S_IFDIR, _DOT_DOT)
        return True

    def _list_names(self, listing: _Listing, handle: _Handle, cookie: int) -> Step[None]:
        listed = 0
        while names := (yield from self._names(handle, cookie, listing.plus)):
            for cookie, name, ino, mode, node in names:
                found = b"" if node is None else _entry(node)
                if not listing.add(name, ino, mode, cookie, found):
                    handle.batch = listed + 1
                    return
                if node is not None:
                    self._store.pin(ino)
                listed += 1
            handle.batch = min(2 * handle.batch, _READDIR_BATCH_MAX)

    def _names(self, handle: _Handle, cookie: int, plus: bool) -> Step[list[_Name]]:
        """What comes behind a cookie."""
        if plus:
            children = yield from self._store.list_children(handle.ino, cookie, handle.batch)
            return [
                (cookie, name, node.inode.ino, node.inode.mode, node)
                for cookie, name, node in children
            ]
        entries = yield from self._store.list_directory(handle.ino, cookie, handle.batch)
        return [(cookie, entry.name, entry.ino, entry.type, None) for cookie, entry in entries]

    def releasedir(self, call: Call, fh: int) -> None:
        del self._handles[fh]

    def fsyncdir(self, call: Call) -> Step[None]:
        yield from self._sync()

    # -- the filesystem as a whole, and xattrs

    def statfs(self, call: Call) -> Step[bytes]:
        # Who removed files and looks for the space finds it.
        yield from self._store.drop_free()
        space = self._store.usage()
        free = space.free // BLOCK
        return protocol.statfs(
            BLOCK, space.total // BLOCK, free, space.available // BLOCK, space.inodes + free, free,
            NAME_LENGTH_MAX,
        )  # fmt: skip

    def getxattr(self, call: Call, name: bytes, size: int) -> Step[bytes]:
        return protocol.sized((yield from self._xattr(call, name)), size)

    def _xattr(self, call: Call, name: bytes) -> Step[bytes]:
        ino = call.inode
        if control.is_control(ino):
            raise error(errno.ENODATA)
        if name == control.MAP:
            # The warm files are ours alone.
            if not control.sees_all(call.uid):
                raise error(errno.ENODATA)
            self._uses.record((yield from self._store.units.session_of(ino)), ino)
            return (yield from control.read_map(self._migration, ino))
        if name == control.SCRUB and ino == ROOT_INODE:
            if call.uid not in (0, os.geteuid()):
                raise error(errno.EPERM)
            self._scrubbing.begin()
            return b"%d" % self._store.scrub.passes
        if name == control.HEAT:
            node = yield from self._store.node(ino)
            return b"%.6g" % self._uses.heat(ino, is_session=node.is_directory)
        return (yield from control.read_xattr(self._store, self._migration, ino, name))

    def setxattr(self, call: Call, name: bytes, value: bytes, flags: int) -> Step[None]:
        ino = call.inode
        _refuse_control_inode(ino)
        if flags:
            yield from self._check_xattr(call, name, flags)
        if name == control.FORK:
            yield from self._fork(call, value)
        elif name == control.HINT:
            yield from self._hint(ino, value)
        elif name == control.PREFETCH:
            self._migration.prefetch(ino)
        elif name == control.DEMOTE:
            yield from self._migration.demote(ino)
        else:
            control.check_settable(name, value)
            yield from self._store.set_xattr(ino, name, value)
            if name == _CAPABILITY:
                self._without_capability.discard(ino)

    def _check_xattr(self, call: Call, name: bytes, flags: int) -> Step[None]:
        """Raises EEXIST for what is to be made anew, ENODATA for what is to be replaced."""
        try:
            yield from self._xattr(call, name)
        except OSError as failure:
            if failure.errno != errno.ENODATA or flags & os.XATTR_REPLACE:
                raise
        else:
            if flags & os.XATTR_CREATE:
                raise error(errno.EEXIST)

    def listxattr(self, call: Call, size: int) -> Step[bytes]:
        names: list[bytes] = []
        if not control.is_control(call.inode):
            names = yield from self._store.xattr_names(call.inode)
        # The kernel keeps others from reading trusted ones; who lists them is for us to see.
        names = [name for name in names if call.uid == 0 or not name.startswith(b"trusted.")]
        shown = [name for name in names if name != SCRUBBED]
        return protocol.sized(b"".join(name + b"\0" for name in shown), size)

    def removexattr(self, call: Call, name: bytes) -> Step[None]:
        _refuse_control_inode(call.inode)
        yield from self._store.remove_xattr(call.inode, name)

    # -- helpers

    def _create(
        self, call: Call, name: bytes, mode: int, *, device: int = 0, target: bytes = b""
    ) -> Step[Node]:
        _refuse_control(call.inode, name)
        gid = call.gid
        directory = yield from self._store.node(call.inode)
        if directory.inode.mode & stat.S_ISGID:
            gid = directory.inode.gid
            mode |= stat.S_ISGID if stat.S_ISDIR(mode) else 0
        return (
            yield from self._store.create(
                call.inode, name, mode, call.uid, gid, rdev=device, target=target
            )
        )

    def _sync(self) -> Step[None]:
        yield from self._store.sync()
        self.tell_changed_blocks()

    def _parent(self, node: Node) -> Step[Node]:
        """Of a directory; itself where the parent was removed while both were held."""
        try:
            return (yield from self._store.node(node.inode.parent))
        except FileNotFoundError:
            return node

    def _open(self, ino: int, flags: int) -> Step[bytes]:
        is_direct, writes_directly = bool(flags & os.O_DIRECT), self._writes_directly(flags)
        handle = _Handle(ino, direct=is_direct, writes_directly=is_direct or writes_directly)
        # First: what is open is not reclaimed, and what follows may wait.
        self._store.pin(ino)
        self._store.opened(ino)
        try:
            yield from self._store.node(ino)  # it may have been
            if flags & os.O_ACCMODE != os.O_WRONLY:
                handle.reader = yield from self._look_ahead.opened(ino)
            handle.session = yield from self._session_opened(handle)
        except Exception:
            self._store.closed(ino)
            yield from self._store.unpin(ino)
            raise
        how = Opened.DIRECT_IO if writes_directly else Opened.KEEP_CACHE
        return protocol.opened(self._add_handle(handle), how)

    def _writes_directly(self, flags: int) -> bool:
        """Whether what is written through a handle shall not be copied to the kernel's page cache
        on its way: who opens for writing alone, or makes a file that nobody else may have made,
        is not about to read it. Not with O_DIRECT: the kernel then splits a large request into
        several at once, where with direct_io it would wait for each."""
        is_for_writing = flags & os.O_ACCMODE == os.O_WRONLY or flags & os.O_EXCL
        may = Capability.DIRECT_IO_ALLOW_MMAP in self._agreed
        return may and bool(is_for_writing) and not flags & os.O_DIRECT

    def _session_opened(self, handle: _Handle) -> Step[int]:
        """The session of a file that is being opened, 0 where that cannot be told; who is to
        know of it is told."""
        try:
            session = yield from self._store.units.session_of(handle.ino)
            if session:
                yield from self._tell_of_open(handle, session)
        except OSError as failure:
            log.debug("the session of inode %d: %s", handle.ino, failure)
            return 0
        return session

    def _tell_of_open(self, handle: _Handle, session: int) -> Step[None]:
        store = self._store
        shards = self._migration.warm.shards
        if shards.wants(session):
            name = (yield from store.node(session)).inode.name
            device = yield from store.xattr(session, control.DEVICE_ID)
            shards.tell(session, name, int(device) if device else None)
        size = (yield from store.node(handle.ino)).inode.size
        if handle.reader is not None and size >= _LAYER_MIN:
            stored = (yield from store.units.unit(session)).stored
            self._planner.saw_open(session, time.monotonic(), stored)

    def _saw_use(self, handle: _Handle, read: int = 0) -> None:
        self._uses.record(handle.session, handle.ino)
        if handle.session:
            self._planner.saw_use(handle.session, time.monotonic(), read)

    def _hint(self, ino: int, value: bytes) -> Step[None]:
        session, size = yield from control.hinted(self._store, ino)
        try:
            said = hints.parse(value)
        except ValueError as fault:
            log.debug("a hint for inode %d: %s", ino, fault)
            raise error(errno.EINVAL) from None
        self._planner.hint(session, said, time.monotonic(), size)
        self._uses.hint(session, said)

    def _add_handle(self, handle: _Handle) -> int:
        self._next_handle += 1
        self._handles[self._next_handle] = handle
        return self._next_handle

    def _remember(self, node: Node) -> bytes:
        """The kernel will know this inode: hold it until it is forgotten."""
        self._store.pin(node.inode.ino)
        return _entry(node)

    def _drop_pages(self, ino: int) -> Step[None]:
        """Of an asynchronous O_DIRECT write the kernel drops the pages before it sends it to us
        and not after: what others read in between is old, and would stay."""
        self._in_page_cache.discard(ino)
        notice = protocol.inode_changed(ino, attributes_only=False)
        yield from wait(self._aside(partial(self._notices.tell, notice)))

    def _fork(self, call: Call, name: bytes) -> Step[None]:
        """The copy belongs to whom the original belongs to: only they make one, and only
        where they may make names."""
        if not name or b"/" in name or b"\0" in name or name in (b".", b".."):
            raise error(errno.EINVAL)
        source = (yield from self._store.node(call.inode)).inode
        _refuse_control(source.parent, name)
        parent = (yield from self._store.node(source.parent)).inode
        if call.uid not in (0, source.uid) or not _may_make_names(parent, call):
            raise error(errno.EACCES)
        yield from self._store.fork(call.inode, name)
        # The kernel may remember that there was no such name; who forks looks at once.
        notice = protocol.name_changed(source.parent, name)
        yield from wait(self._aside(partial(self._notices.tell, notice)))
        self._notices.add(protocol.inode_changed(source.parent, attributes_only=True))

    def _removed(self, names: list[tuple[int, bytes]]) -> None:
        for directory, name in names:
            self._notices.add(protocol.name_changed(directory, name))

    def _blocks_changed(self, inodes: list[int]) -> None:
        self._changed_blocks.update(inodes)

    def tell_changed_blocks(self) -> None:
        """Have the kernel ask again for the attributes of files whose blocks changed. Not at
        each change: a notice costs a change of threads."""
        for ino in self._changed_blocks:
            if self._store.is_pinned(ino):
                self._notices.add(protocol.inode_changed(ino, attributes_only=True))
        self._changed_blocks.clear()

    # -- /.kvfs

    def _open_control(self, call: Call, flags: int) -> Step[bytes]:
        if flags & (os.O_ACCMODE | os.O_TRUNC) != os.O_RDONLY:
            raise error(errno.EACCES)
        snapshot = yield from control.render(self._mounted, call.inode, call.uid)
        handle = self._add_handle(_Handle(call.inode, snapshot=snapshot))
        return protocol.opened(handle, Opened.DIRECT_IO)

    def _list_control(self, listing: _Listing, cookie: int) -> Step[None]:
        root = yield from self._store.node(ROOT_INODE)
        entries = [(b".", control.CONTROL_INODE), (b"..", ROOT_INODE), *control.control_files()]
        for number, (name, ino) in enumerate(entries[cookie:], cookie + 1):
            inode = root.inode if ino == ROOT_INODE else control.control_inode(ino)
            if not listing.add(name, ino, inode.mode, number):
                return


class _Listing:
    """The names of a directory that one answer has room for; with `plus`, what the kernel would
    learn of each if it looked it up."""

    def __init__(self, size_max: int, *, plus: bool) -> None:
        self.plus = plus
        self._room = size_max
        self._entries: list[bytes] = []

    def add(self, name: bytes, ino: int, mode: int, cookie: int, found: bytes = b"") -> bool:
        """False when there is no room for it."""
        if self.plus and not found:
            found = protocol.NOT_LOOKED_UP
        packed = protocol.directory_entry(ino, name, mode, cookie, found)
        if len(packed) > self._room:
            return False
        self._room -= len(packed)
        self._entries.append(packed)
        return True

    def packed(self) -> bytes:
        return b"".join(self._entries)


class _Notices:
    """Tells the kernel to ask again for attributes, or for a name, from a thread: telling
    it may block on a lock that is held by a request of ours. A full queue drops notices."""

    def __init__(self) -> None:
        self._queue: queue.Queue[bytes] = queue.Queue(_NOTICES_MAX)
        self._notify: Callable[[bytes], None] = lambda notice: None

    def begin(self, notify: Callable[[bytes], None]) -> None:
        self._notify = notify
        threading.Thread(target=self._work, name="kvfs-notices", daemon=True).start()

    def add(self, notice: bytes) -> None:
        try:
            self._queue.put_nowait(notice)
        except queue.Full:
            log.debug("too many notices to the kernel: one is dropped")

    def tell(self, notice: bytes) -> None:
        """At once, from a thread of the caller's."""
        try:
            self._notify(notice)
        except OSError as failure:
            # ENOENT: the kernel has forgotten it meanwhile.
            log.debug("a notice to the kernel: %s", failure)

    def _work(self) -> None:
        while True:
            self.tell(self._queue.get())


def _may_make_names(directory: Inode, call: Call) -> bool:
    """In a directory: who may write to it, and enter it."""
    if call.uid == 0:
        return True
    if call.uid == directory.uid:
        shift = 6
    elif directory.gid == call.gid or directory.gid in _groups(call.pid):
        shift = 3
    else:
        shift = 0
    return directory.mode >> shift & 0o3 == 0o3


def _groups(pid: int) -> set[int]:
    """The supplementary groups of a process; none of one that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return set()
    # The process has named itself, with any bytes.
    (line,) = (line for line in status.split(b"\n") if line.startswith(b"Groups:"))
    return {int(group) for group in line.split()[1:]}


def _refuse_control(parent: int, name: bytes) -> None:
    if parent == control.CONTROL_INODE or (parent, name) == (ROOT_INODE, control.CONTROL_NAME):
        raise error(errno.EPERM)


def _refuse_control_inode(ino: int) -> None:
    if control.is_control(ino):
        raise error(errno.EPERM)


def _without_suid(mode: int) -> int:
    """As a write leaves it: the group's bit without a right to execute means something else."""
    if stat.S_ISDIR(mode):
        return mode
    return mode & ~(stat.S_ISUID | (stat.S_ISGID if mode & stat.S_IXGRP else 0))


def _entry(node: Node) -> bytes:
    packed = _node_attributes(node)
    return protocol.entry(node.inode.ino, packed, _TIMEOUT_SECONDS, _TIMEOUT_SECONDS)


def _control_entry(ino: int) -> bytes:
    return protocol.entry(ino, _control_attributes(ino), _TIMEOUT_SECONDS, 0)


def _control_attributes(ino: int) -> bytes:
    return _attributes(control.control_inode(ino), 0)


def _attributes_answer(node: Node) -> bytes:
    return protocol.attributes_answer(_node_attributes(node), _TIMEOUT_SECONDS)


def _node_attributes(node: Node) -> bytes:
    return _attributes(node.inode, node.taken // 512)


def _attributes(inode: Inode, blocks_512: int) -> bytes:
    return protocol.attributes(
        inode.ino, inode.mode, inode.nlink, inode.uid, inode.gid, inode.rdev, inode.size,
        blocks_512, _BLOCK_SIZE_HINT, inode.atime_ns, inode.mtime_ns, inode.ctime_ns,
    )  # fmt: skip
