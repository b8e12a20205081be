"""The POSIX face: a thin translation from FUSE requests to the store's steps."""

from __future__ import annotations

import errno
import functools
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

import pyfuse3
import trio
from pyfuse3 import (
    EntryAttributes,
    FileHandleT,
    FileInfo,
    FileNameT,
    FlagT,
    FUSEError,
    InodeT,
    ModeT,
    ReaddirToken,
    RequestContext,
    SetattrFields,
    StatvfsData,
    XAttrNameT,
)

from kvfs.engine.format import BLOCK, NAME_LENGTH_MAX, ROOT_INODE, Inode
from kvfs.engine.io import DeadlineExceeded, Step
from kvfs.engine.nodes import Node
from kvfs.engine.store import Store
from kvfs.mount import control
from kvfs.mount.loop import drive
from kvfs.tiers import hints
from kvfs.tiers.migrate import Migration
from kvfs.tiers.planner import Planner
from kvfs.tiers.prefetch import LookAhead, Reader
from kvfs.tiers.uses import Uses

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

_TIMEOUT_SECONDS = 3600
_BLOCK_SIZE_HINT = 1024 * 1024
_READDIR_BATCH, _READDIR_BATCH_MAX = 32, 512
_NOTICES_MAX = 4096
# Who opens a smaller file may want to know of the session without reading it.
_LAYER_MIN = 64 * 1024
_DOT, _DOT_DOT = 1, 2


def _handler(
    function: Callable[P, Coroutine[Any, Any, R]],
) -> Callable[P, Coroutine[Any, Any, R]]:
    """Any exception but FUSEError would end the daemon: each becomes an errno."""

    @functools.wraps(function)
    async def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await function(*args, **kwargs)
        except FUSEError:
            raise
        except OSError as failure:
            raise FUSEError(failure.errno or errno.EIO) from None
        except DeadlineExceeded:
            log.error("%s: no answer from the device within the deadline", function.__name__)
            raise FUSEError(errno.ETIMEDOUT) from None
        except Exception:
            log.exception("%s failed", function.__name__)
            raise FUSEError(errno.EIO) from None

    return guarded


@dataclass(slots=True)
class _Handle:
    """An open file or directory. `direct`: opened with O_DIRECT; `snapshot` is the content
    of a file in `/.kvfs`; `session` the one that the file is in, 0 in a pool; `batch` how many
    names of a directory are likely to be wanted at once."""

    ino: int
    session: int = 0
    direct: bool = False
    reader: Reader | None = None
    snapshot: bytes | None = None
    batch: int = _READDIR_BATCH


class Filesystem(pyfuse3.Operations):
    """`deadline_seconds`: a request that waits for longer is answered with ETIMEDOUT."""

    supports_dot_lookup = True
    enable_writeback_cache = False

    def __init__(
        self,
        store: Store,
        look_ahead: LookAhead,
        migration: Migration,
        planner: Planner,
        uses: Uses,
        deadline_seconds: float,
        mounted: control.Mounted,
    ) -> None:
        super().__init__()
        self._store = store
        self._look_ahead = look_ahead
        self._migration = migration
        self._planner = planner
        self._uses = uses
        self._deadline_seconds = deadline_seconds
        self._mounted = mounted
        self._handles: dict[int, _Handle] = {}
        self._next_handle = 0
        self._changed_blocks: set[int] = set()
        # Files of which the kernel may have pages that it read since it was told to drop them.
        self._in_page_cache: set[int] = set()
        self._notices = _Notices()
        store.watch_blocks(self._blocks_changed)
        store.reclaimer.on_removed = self._removed

    async def _run(self, step: Step[R]) -> R:
        return await drive(step, self._deadline_seconds)

    # -- names and attributes

    @_handler
    async def lookup(
        self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        if parent_inode == ROOT_INODE and name == control.CONTROL_NAME:
            return await self._control_attributes(control.CONTROL_INODE)
        if parent_inode == control.CONTROL_INODE:
            return await self._control_attributes(control.find_control_file(name))
        try:
            node = await self._run(self._store.lookup(parent_inode, name))
        except OSError as failure:
            if failure.errno == errno.ENOENT:
                return _negative()
            raise
        return self._remember(node)

    @_handler
    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        for ino, count in inode_list:
            await self._run(self._store.unpin(ino, count))
            if not self._store.is_pinned(ino):
                self._in_page_cache.discard(ino)

    @_handler
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        if control.is_control(inode):
            return await self._control_attributes(inode)
        return _node_attributes(await self._run(self._store.node(inode)))

    @_handler
    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        _refuse_control_inode(inode)
        changed = self._store.set_attributes(
            inode,
            mode=attr.st_mode if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
        )
        return _node_attributes(await self._run(changed))

    @_handler
    async def readlink(self, inode: InodeT, ctx: RequestContext) -> FileNameT:
        return await self._run(self._store.readlink(inode))

    @_handler
    async def mknod(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        return await self._create(parent_inode, name, mode, ctx, rdev=rdev)

    @_handler
    async def mkdir(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, ctx: RequestContext
    ) -> EntryAttributes:
        return await self._create(parent_inode, name, stat.S_IFDIR | stat.S_IMODE(mode), ctx)

    @_handler
    async def symlink(
        self, parent_inode: InodeT, name: FileNameT, target: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        return await self._create(parent_inode, name, stat.S_IFLNK | 0o777, ctx, target=target)

    @_handler
    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        _refuse_control_inode(inode)
        _refuse_control(new_parent_inode, new_name)
        return self._remember(await self._run(self._store.link(inode, new_parent_inode, new_name)))

    @_handler
    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        _refuse_control(parent_inode, name)
        await self._run(self._store.unlink(parent_inode, name))

    @_handler
    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        _refuse_control(parent_inode, name)
        self._planner.removed(await self._run(self._store.rmdir(parent_inode, name)))

    @_handler
    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: FileNameT,
        parent_inode_new: InodeT,
        name_new: FileNameT,
        flags: FlagT,
        ctx: RequestContext,
    ) -> None:
        _refuse_control(parent_inode_old, name_old)
        _refuse_control(parent_inode_new, name_new)
        if flags & ~(pyfuse3.RENAME_EXCHANGE | pyfuse3.RENAME_NOREPLACE):
            raise FUSEError(errno.EINVAL)
        step = self._store.rename(
            parent_inode_old, name_old, parent_inode_new, name_new,
            replace=not flags & pyfuse3.RENAME_NOREPLACE,
            exchange=bool(flags & pyfuse3.RENAME_EXCHANGE),
        )  # fmt: skip
        await self._run(step)

    # -- files

    @_handler
    async def create(
        self,
        parent_inode: InodeT,
        name: FileNameT,
        mode: ModeT,
        flags: FlagT,
        ctx: RequestContext,
    ) -> tuple[FileInfo, EntryAttributes]:
        attributes = await self._create(parent_inode, name, stat.S_IFREG | mode, ctx)
        return await self._open(attributes.st_ino, flags), attributes

    @_handler
    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        if control.is_control(inode):
            return await self._open_control(inode, flags, ctx.uid)
        if flags & os.O_TRUNC:
            await self._run(self._store.set_attributes(inode, size=0))
        return await self._open(inode, flags)

    @_handler
    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        handle = self._handles[fh]
        if handle.snapshot is not None:
            return handle.snapshot[off : off + size]
        if not handle.direct:
            self._in_page_cache.add(handle.ino)
        data = await self._run(self._read(handle, off, size))
        self._saw_use(handle, len(data))
        # The reply is copied before anything else runs, so it may be a view.
        return cast(bytes, data)

    def _read(self, handle: _Handle, offset: int, size: int) -> Step[memoryview]:
        if handle.reader is not None:
            yield from self._look_ahead.reads(handle.reader, offset, size)
        return (yield from self._store.read(handle.ino, offset, size))

    @_handler
    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        handle = self._handles[fh]
        self._saw_use(handle)
        written = await self._run(self._store.write(handle.ino, off, buf))
        if handle.direct and handle.ino in self._in_page_cache:
            await self._drop_pages(handle.ino)
        return written

    @_handler
    async def flush(self, fh: FileHandleT) -> None:
        # Nothing is kept back until a close; the kernel does not ask again.
        raise FUSEError(errno.ENOSYS)

    @_handler
    async def release(self, fh: FileHandleT) -> None:
        handle = self._handles.pop(fh)
        if handle.snapshot is None:
            self._store.closed(handle.ino)
            if not self._store.units.opened[handle.ino]:
                self._migration.warm.leases.end(handle.ino)
            await self._run(self._store.unpin(handle.ino))

    @_handler
    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        if self._handles[fh].snapshot is None:
            await self._sync()

    # -- directories

    @_handler
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        return self._add_handle(_Handle(inode))

    @_handler
    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        handle = self._handles[fh]
        directory = handle.ino
        if directory == control.CONTROL_INODE:
            return await self._read_control(start_id, token)
        node = await self._run(self._store.node(directory))
        if start_id < _DOT and not pyfuse3.readdir_reply(token, b".", _node_attributes(node), _DOT):
            return
        if start_id < _DOT_DOT:
            parent = await self._parent(node)
            if not pyfuse3.readdir_reply(token, b"..", _node_attributes(parent), _DOT_DOT):
                return
        replied = 0
        while True:
            wanted = handle.batch
            step = self._store.list_children(directory, max(start_id, _DOT_DOT), wanted)
            children = await self._run(step)
            for cookie, name, child in children:
                if not pyfuse3.readdir_reply(token, name, _node_attributes(child), cookie):
                    handle.batch = replied + 1
                    return
                self._store.pin(child.inode.ino)
                start_id = cookie
                replied += 1
            if not children:
                return
            handle.batch = min(2 * wanted, _READDIR_BATCH_MAX)

    @_handler
    async def releasedir(self, fh: FileHandleT) -> None:
        del self._handles[fh]

    @_handler
    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        await self._sync()

    # -- the filesystem as a whole, and xattrs

    @_handler
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        # Who removed files and looks for the space finds it.
        await self._run(self._store.drop_free())
        space = self._store.usage()
        data = StatvfsData()
        data.f_bsize = data.f_frsize = BLOCK
        data.f_blocks = space.total // BLOCK
        data.f_bfree, data.f_bavail = space.free // BLOCK, space.available // BLOCK
        data.f_ffree = data.f_favail = space.free // BLOCK
        data.f_files = space.inodes + data.f_ffree
        data.f_namemax = NAME_LENGTH_MAX
        return data

    @_handler
    async def getxattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> bytes:
        if control.is_control(inode):
            raise FUSEError(errno.ENODATA)
        if name == control.MAP:
            # The warm files are ours alone.
            if ctx.uid not in (0, os.geteuid()):
                raise FUSEError(errno.ENODATA)
            self._uses.record(await self._run(self._store.units.session_of(inode)), inode)
            return await self._run(control.read_map(self._migration, inode))
        if name == control.HEAT:
            node = await self._run(self._store.node(inode))
            return b"%.6g" % self._uses.heat(inode, is_session=node.is_directory)
        return await self._run(control.read_xattr(self._store, self._migration, inode, name))

    @_handler
    async def setxattr(
        self, inode: InodeT, name: XAttrNameT, value: bytes, ctx: RequestContext
    ) -> None:
        _refuse_control_inode(inode)
        if name == control.FORK:
            return await self._fork(inode, value, ctx)
        if name == control.HINT:
            return await self._hint(inode, value)
        if name == control.PREFETCH:
            self._migration.prefetch(inode)
            return
        if name == control.DEMOTE:
            await self._run(self._migration.demote(inode))
            return
        control.check_settable(name, value)
        await self._run(self._store.set_xattr(inode, name, value))

    @_handler
    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[XAttrNameT]:
        if control.is_control(inode):
            return []
        names = await self._run(self._store.xattr_names(inode))
        # The kernel keeps others from reading trusted ones; who lists them is for us to see.
        return [name for name in names if ctx.uid == 0 or not name.startswith(b"trusted.")]

    @_handler
    async def removexattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> None:
        _refuse_control_inode(inode)
        await self._run(self._store.remove_xattr(inode, name))

    # -- helpers

    async def _create(
        self,
        parent: int,
        name: bytes,
        mode: int,
        ctx: RequestContext,
        *,
        rdev: int = 0,
        target: bytes = b"",
    ) -> EntryAttributes:
        _refuse_control(parent, name)
        gid = ctx.gid
        directory = await self._run(self._store.node(parent))
        if directory.inode.mode & stat.S_ISGID:
            gid = directory.inode.gid
            mode |= stat.S_ISGID if stat.S_ISDIR(mode) else 0
        step = self._store.create(parent, name, mode, ctx.uid, gid, rdev=rdev, target=target)
        return self._remember(await self._run(step))

    async def _sync(self) -> None:
        await self._run(self._store.sync())
        self.tell_changed_blocks()

    async def _parent(self, node: Node) -> Node:
        """Of a directory; itself where the parent was removed while both were held."""
        try:
            return await self._run(self._store.node(node.inode.parent))
        except FileNotFoundError:
            return node

    async def _open(self, ino: int, flags: int) -> FileInfo:
        handle = _Handle(ino, direct=bool(flags & os.O_DIRECT))
        if flags & os.O_ACCMODE != os.O_WRONLY:
            handle.reader = await self._run(self._look_ahead.opened(ino))
        handle.session = await self._run(self._session_opened(handle))
        self._store.pin(ino)
        self._store.opened(ino)
        # Also for O_DIRECT: the kernel then splits a large request into several at once, and
        # keeps its page cache coherent; with direct_io it would wait for each.
        return FileInfo(fh=self._add_handle(handle), direct_io=False, keep_cache=True)

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

    async def _hint(self, ino: int, value: bytes) -> None:
        session, size = await self._run(control.hinted(self._store, ino))
        try:
            said = hints.parse(value)
        except ValueError as fault:
            log.debug("a hint for inode %d: %s", ino, fault)
            raise FUSEError(errno.EINVAL) from None
        self._planner.hint(session, said, time.monotonic(), size)
        self._uses.hint(session, said)

    def _add_handle(self, handle: _Handle) -> int:
        self._next_handle += 1
        self._handles[self._next_handle] = handle
        return self._next_handle

    def _remember(self, node: Node) -> EntryAttributes:
        """The kernel will know this inode: hold it until it is forgotten."""
        self._store.pin(node.inode.ino)
        return _node_attributes(node)

    async def _drop_pages(self, ino: int) -> None:
        """Of an asynchronous O_DIRECT write the kernel drops the pages before it sends it to us
        and not after: what others read in between is old, and would stay."""
        self._in_page_cache.discard(ino)
        try:
            await trio.to_thread.run_sync(pyfuse3.invalidate_inode, InodeT(ino))
        except OSError as failure:
            log.debug("the pages of inode %d: %s", ino, failure)

    async def _fork(self, ino: int, name: bytes, ctx: RequestContext) -> None:
        """The copy belongs to whom the original belongs to: only they make one, and only
        where they may make names."""
        if not name or b"/" in name or b"\0" in name or name in (b".", b".."):
            raise FUSEError(errno.EINVAL)
        source = (await self._run(self._store.node(ino))).inode
        _refuse_control(source.parent, name)
        parent = (await self._run(self._store.node(source.parent))).inode
        if ctx.uid not in (0, source.uid) or not _may_write(parent, ctx):
            raise FUSEError(errno.EACCES)
        await self._run(self._store.fork(ino, name))
        # The kernel may remember that there was no such name; who forks looks at once.
        await trio.to_thread.run_sync(_forget_name, source.parent, name)
        self._notices.add(source.parent)

    def _removed(self, names: list[tuple[int, bytes]]) -> None:
        for directory, name in names:
            self._notices.add(directory, name)

    def _blocks_changed(self, inodes: list[int]) -> None:
        self._changed_blocks.update(inodes)

    def tell_changed_blocks(self) -> None:
        """Have the kernel ask again for the attributes of files whose blocks changed. Not at
        each change: a notice costs a change of threads."""
        for ino in self._changed_blocks:
            if self._store.is_pinned(ino):
                self._notices.add(ino)
        self._changed_blocks.clear()

    # -- /.kvfs

    async def _control_attributes(self, ino: int) -> EntryAttributes:
        root = await self._run(self._store.node(ROOT_INODE))
        attributes = _attributes(control.control_inode(ino, root.inode), 0)
        attributes.attr_timeout = 0
        return attributes

    async def _open_control(self, ino: int, flags: int, uid: int) -> FileInfo:
        if flags & (os.O_ACCMODE | os.O_TRUNC) != os.O_RDONLY:
            raise FUSEError(errno.EACCES)
        snapshot = await self._run(control.render(self._mounted, ino, uid))
        handle = self._add_handle(_Handle(ino, snapshot=snapshot))
        return FileInfo(fh=handle, direct_io=True, keep_cache=False)

    async def _read_control(self, start_id: int, token: ReaddirToken) -> None:
        root = await self._run(self._store.node(ROOT_INODE))
        entries = [(b".", control.CONTROL_INODE), (b"..", ROOT_INODE), *control.control_files()]
        for number, (name, ino) in enumerate(entries[start_id:], start_id + 1):
            inode = root.inode if ino == ROOT_INODE else control.control_inode(ino, root.inode)
            attributes = _attributes(inode, 0)
            attributes.attr_timeout = 0
            if not pyfuse3.readdir_reply(token, name, attributes, number):
                return


class _Notices:
    """Tells the kernel to ask again for attributes, or for a name, from a thread: telling
    it may block on a lock that is held by a request of ours. A full queue drops notices."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[int, bytes | None]] = queue.Queue(_NOTICES_MAX)
        threading.Thread(target=self._work, name="kvfs-notices", daemon=True).start()

    def add(self, ino: int, name: bytes | None = None) -> None:
        """For an inode's attributes, or for a name in a directory."""
        try:
            self._queue.put_nowait((ino, name))
        except queue.Full:
            log.debug("too many notices to the kernel: one for inode %d is dropped", ino)

    def _work(self) -> None:
        while True:
            ino, name = self._queue.get()
            if name is not None:
                _forget_name(ino, name)
                continue
            try:
                pyfuse3.invalidate_inode(InodeT(ino), attr_only=True)
            except OSError as failure:
                # ENOENT: the kernel has forgotten it meanwhile.
                log.debug("notice for inode %d: %s", ino, failure)


def _may_write(directory: Inode, ctx: RequestContext) -> bool:
    if ctx.uid in (0, directory.uid):
        return ctx.uid == 0 or bool(directory.mode & stat.S_IWUSR)
    if directory.gid == ctx.gid or directory.gid in pyfuse3.get_sup_groups(ctx.pid):
        return bool(directory.mode & stat.S_IWGRP)
    return bool(directory.mode & stat.S_IWOTH)


def _forget_name(directory: int, name: bytes) -> None:
    try:
        pyfuse3.invalidate_entry(InodeT(directory), FileNameT(name))
    except OSError as failure:
        log.debug("notice for a name in directory %d: %s", directory, failure)


def _refuse_control(parent: int, name: bytes) -> None:
    if parent == control.CONTROL_INODE or (parent, name) == (ROOT_INODE, control.CONTROL_NAME):
        raise FUSEError(errno.EPERM)


def _refuse_control_inode(ino: int) -> None:
    if control.is_control(ino):
        raise FUSEError(errno.EPERM)


def _negative() -> EntryAttributes:
    """There is no such name, and the kernel may remember it: all changes pass through us."""
    attributes = EntryAttributes()
    attributes.st_ino = InodeT(0)
    attributes.entry_timeout = _TIMEOUT_SECONDS
    return attributes


def _node_attributes(node: Node) -> EntryAttributes:
    return _attributes(node.inode, node.taken // 512)


def _attributes(inode: Inode, blocks_512: int) -> EntryAttributes:
    attributes = EntryAttributes()
    attributes.st_ino = InodeT(inode.ino)
    attributes.generation = 0
    attributes.entry_timeout = attributes.attr_timeout = _TIMEOUT_SECONDS
    attributes.st_mode = ModeT(inode.mode)
    attributes.st_nlink = inode.nlink
    attributes.st_uid = inode.uid
    attributes.st_gid = inode.gid
    attributes.st_rdev = inode.rdev
    attributes.st_size = inode.size
    attributes.st_blksize = _BLOCK_SIZE_HINT
    attributes.st_blocks = blocks_512
    attributes.st_atime_ns = inode.atime_ns
    attributes.st_mtime_ns = inode.mtime_ns
    attributes.st_ctime_ns = inode.ctime_ns
    return attributes
