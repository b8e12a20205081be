"""What the items of the index say of each other: where they contradict, they are mended.

Each step tells what it found and leaves the tables as they should be, so that a check and
a repair cannot differ: a check throws the mended tables away.
"""

from __future__ import annotations

import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

from kvfs.engine.check.findings import Finding
from kvfs.engine.check.tables import Tables
from kvfs.engine.codec import Codec
from kvfs.engine.format import (
    DIRECTORIES_PER_GROUP,
    EXTENT_SIZE_MAX,
    NAME_COLLISIONS_MAX,
    NAME_LENGTH_MAX,
    ROOT_INODE,
    SERIAL_BITS,
    Cipher,
    Counts,
    Dentry,
    Extent,
    Inode,
    Pointer,
    Slice,
    Xattr,
    group_of,
    inode_number,
    name_slot,
    round_up,
)
from kvfs.engine.intervals import Intervals
from kvfs.engine.nodes import Place
from kvfs.engine.ring import Geometry

Named = TypeVar("Named", Dentry, Xattr)
LOST_AND_FOUND = b"lost+found"
_TYPES = {
    stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR,
    stat.S_IFBLK,
}  # fmt: skip


@dataclass(slots=True)
class Mender:
    """`id_floor`: no id at or above it is in use; those that are made here come from it.
    `nodes` of the index lie where no extent can be; `is_whole` reads an extent."""

    tables: Tables
    geometry: Geometry
    hash_key: bytes
    created_ns: int
    id_floor: int
    nodes: list[Pointer]
    is_whole: Callable[[Extent], bool]
    findings: list[Finding] = field(default_factory=list)
    _parents: dict[int, int] = field(default_factory=dict)

    def run(self) -> None:
        self._ids()
        self._inodes()
        self._maps()
        self._extents()
        self._missing()
        self._root()
        self._names()
        self._tree()
        self._links()
        self._orphans()
        self._usage()

    def _found(
        self, structure: str, message: str, ino: int | None = None, *, is_lost: bool = False
    ) -> None:
        self.findings.append(Finding(structure, message, ino, is_lost=is_lost))

    # -- items by themselves

    def _ids(self) -> None:
        serials = [ino & ((1 << SERIAL_BITS) - 1) for ino in self.tables.inodes]
        highest = max([*serials, *self.tables.extents], default=0)
        if highest >= self.id_floor:
            self._found("counts", f"id {highest} is in use, the next one is {self.id_floor}")
            self.id_floor = highest + 1

    def _inodes(self) -> None:
        """What belongs to an inode needs it, and has to be of its kind."""
        tables = self.tables
        for ino, inode in list(tables.inodes.items()):
            if stat.S_IFMT(inode.mode) not in _TYPES:
                self._found("inode", f"mode {inode.mode:#o} is of no kind of file", ino)
                inode.mode = stat.S_IFREG | stat.S_IMODE(inode.mode)
        for ino in [ino for ino in tables.slices if ino not in tables.inodes]:
            self._found("map", "it has data and no inode", ino)
            end = max(part.end for part in tables.slices[ino])
            tables.inodes[ino] = self._new_inode(ino, stat.S_IFREG | 0o600, size=end)
        for ino in [ino for ino in tables.slices if not self._is(ino, stat.S_ISREG)]:
            self._found("map", "it has data and is no regular file", ino)
            del tables.slices[ino]
        for ino in [ino for ino in tables.xattrs if ino not in tables.inodes]:
            self._found("xattr", "it has extended attributes and no inode", ino)
            del tables.xattrs[ino]
        for ino in [ino for ino in tables.targets if not self._is(ino, stat.S_ISLNK)]:
            self._found("symlink", "it has a target and is no symlink", ino)
            del tables.targets[ino]
        for ino in [ino for ino in tables.inodes if self._is(ino, stat.S_ISLNK)]:
            if ino not in tables.targets:
                self._found("symlink", "its target is lost", ino)
                del tables.inodes[ino]
        for ino, xattrs in tables.xattrs.items():
            tables.xattrs[ino] = self._in_slots("xattr", ino, xattrs)

    def _is(self, ino: int, kind: object) -> bool:
        assert callable(kind)
        inode = self.tables.inodes.get(ino)
        return inode is not None and bool(kind(inode.mode))

    def _new_inode(self, ino: int, mode: int, *, size: int = 0) -> Inode:
        """For one that is lost. It belongs to the root's owner."""
        root = self.tables.inodes.get(ROOT_INODE)
        uid, gid = (root.uid, root.gid) if root is not None else (0, 0)
        time_ns = self.created_ns
        return Inode(
            ino, mode, uid, gid, nlink=2 if stat.S_ISDIR(mode) else 1, size=size,
            atime_ns=time_ns, mtime_ns=time_ns, ctime_ns=time_ns, birth_ns=time_ns,
        )  # fmt: skip

    def _in_slots(self, structure: str, owner: int, entries: dict[int, Named]) -> dict[int, Named]:
        """Each name once, in a slot of its hash."""
        placed: dict[int, Named] = {}
        misplaced: list[Named] = []
        for slot, entry in entries.items():
            first = name_slot(self.hash_key, entry.name)
            if first <= slot < first + NAME_COLLISIONS_MAX:
                placed[slot] = entry
            else:
                self._found(structure, f"{entry.name!r} is not where its hash says", owner)
                misplaced.append(entry)
        for entry in misplaced:
            placed[_free_slot(self.hash_key, placed, entry.name)] = entry
        names: set[bytes] = set()
        for slot, entry in sorted(placed.items()):
            if entry.name in names:
                self._found(structure, f"{entry.name!r} is there twice", owner)
                del placed[slot]
            names.add(entry.name)
        return placed

    # -- data

    def _extents(self) -> None:
        """Each is used, and where nothing else is. Of two in one place one is whole at most."""
        used = {part.extent_id for slices in self.tables.slices.values() for part in slices}
        for extent in list(self.tables.extents.values()):
            if extent.extent_id not in used:
                self._drop_extent(extent, "is used by no file")
        places: list[Extent | Pointer] = [*self.tables.extents.values(), *self.nodes]
        last: Extent | Pointer | None = None
        for place in sorted(places, key=lambda place: place.address):
            if last is None or place.address >= last.address + round_up(last.stored):
                last = place
            elif isinstance(last, Extent) and not self.is_whole(last):
                self._drop_extent(last, "lies where something else is")
                last = place
            elif isinstance(place, Extent):
                self._drop_extent(place, "lies where something else is")

    def _drop_extent(self, extent: Extent, why: str) -> None:
        message = f"extent {extent.extent_id} {why}"
        self.findings.append(Finding("extent", message, address=extent.address))
        self.tables.extents.pop(extent.extent_id, None)

    def _maps(self) -> None:
        """Slices in order, within file and extent."""
        for extent in list(self.tables.extents.values()):
            if not _is_possible(extent, self.geometry):
                self._drop_extent(extent, "lies where no extent can be")
        fitting: dict[int, list[Slice]] = defaultdict(list)
        for ino, slices in self.tables.slices.items():
            parts = self._fitting(ino, slices, self.tables.inodes[ino].size)
            if parts:
                fitting[ino] = parts
        self.tables.slices = fitting

    def _missing(self) -> None:
        """A slice whose extent is missing stays: it reads as an error, not as zeros."""
        used: Counter[int] = Counter()
        for ino, slices in self.tables.slices.items():
            used.update(part.extent_id for part in slices)
            for part in slices:
                if part.extent_id not in self.tables.extents:
                    lost = f"bytes {part.offset} to {part.end} are lost"
                    message = f"{lost}: extent {part.extent_id} is missing"
                    self._found("data", message, ino, is_lost=True)
        self._references(used)

    def _fitting(self, ino: int, slices: list[Slice], size: int) -> list[Slice]:
        cut = []
        for part in slices:
            extent = self.tables.extents.get(part.extent_id)
            room = part.length if extent is None else extent.size - part.skew
            length = min(part.length, size - part.offset, room)
            if length != part.length or not length:
                self._found("map", f"bytes {part.offset} to {part.end} do not fit", ino)
            if length > 0:
                cut.append(replace(part, length=length))
        if any(one.end > two.offset for one, two in pairwise(cut)):
            self._found("map", "its slices overlap", ino)
            return laid(sorted(cut, key=lambda part: part.extent_id))
        return cut

    def _references(self, used: Counter[int]) -> None:
        counted = {number: count for number, count in used.items() if count > 1}
        counted = {n: c for n, c in counted.items() if n in self.tables.extents}
        found = self.tables.references
        for number in sorted(counted.keys() | found.keys()):
            if counted.get(number) != found.get(number):
                says, is_ = found.get(number, 1), used[number]
                self._found("extent", f"extent {number} says {says} references, there are {is_}")
        self.tables.references = counted

    # -- names

    def _root(self) -> None:
        tables = self.tables
        if ROOT_INODE in tables.inodes and self._is(ROOT_INODE, stat.S_ISDIR):
            return
        if not tables.inodes and not tables.names:
            return  # nothing was ever written
        self._found("inode", "the root directory is lost", ROOT_INODE)
        tables.slices.pop(ROOT_INODE, None)
        root = self._new_inode(ROOT_INODE, stat.S_IFDIR | 0o700)
        root.parent = ROOT_INODE
        tables.inodes[ROOT_INODE] = root

    def _names(self) -> None:
        tables = self.tables
        for directory in list(tables.names):
            if not self._is(directory, stat.S_ISDIR):
                self._found("name", "it holds names and is no directory", directory)
                del tables.names[directory]
                continue
            entries = {
                slot: dentry
                for slot, dentry in tables.names[directory].items()
                if self._is_usable(directory, dentry)
            }
            entries = self._in_slots("name", directory, entries)
            for slot, dentry in entries.items():
                kind = stat.S_IFMT(tables.inodes[dentry.ino].mode)
                if dentry.type != kind:
                    self._found("name", f"{dentry.name!r} says another type of file", dentry.ino)
                    entries[slot] = replace(dentry, type=kind)
            tables.names[directory] = entries

    def _is_usable(self, directory: int, dentry: Dentry) -> bool:
        name = dentry.name
        if dentry.ino not in self.tables.inodes:
            self._found("name", f"{name!r} leads to inode {dentry.ino}, which is gone", directory)
            return False
        if dentry.ino == ROOT_INODE:
            self._found("name", f"{name!r} leads to the root", directory)
            return False
        if not name or len(name) > NAME_LENGTH_MAX or name in (b".", b"..") or b"/" in name:
            self._found("name", f"{name!r} is no name", directory)
            return False
        return True

    def _tree(self) -> None:
        """Each directory is in one place, below the root. The others go to lost+found."""
        places = self._directory_places()
        for ino, found in places.items():
            inode = self.tables.inodes[ino]
            hinted = [place for place in found if self._is_hint(inode, place)]
            kept = (hinted or found)[0]
            for directory, slot in found:
                if (directory, slot) != kept:
                    self._found("name", "it is a directory in two places", ino)
                    del self.tables.names[directory][slot]
            name = self.tables.names[kept[0]][kept[1]].name
            if (inode.parent, inode.name) != (kept[0], name):
                self._found("inode", "it does not know its directory", ino)
                inode.parent, inode.name = kept[0], name
        self._break_loops()

    def _directory_places(self) -> dict[int, list[tuple[int, int]]]:
        places: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for directory, slot, dentry in self.tables.all_names():
            if stat.S_ISDIR(dentry.type):
                places[dentry.ino].append((directory, slot))
        return places

    def _is_hint(self, inode: Inode, place: tuple[int, int]) -> bool:
        directory, slot = place
        name = self.tables.names[directory][slot].name
        return (inode.parent, inode.name) == (directory, name)

    def _break_loops(self) -> None:
        parents = {ino: places[0][0] for ino, places in self._directory_places().items()}
        looked_at = {ROOT_INODE}
        for ino in list(parents):
            trail: dict[int, None] = {}
            at: int | None = ino
            while at is not None and at not in looked_at and at not in trail:
                trail[at] = None
                at = parents.get(at)
            if at in trail:
                assert at is not None
                self._found("name", "it lies below itself", at)
                entries = self.tables.names[parents.pop(at)]
                del entries[next(slot for slot, dentry in entries.items() if dentry.ino == at)]
            looked_at.update(trail)
        self._parents = parents

    def _links(self) -> None:
        """Who has a name counts it; who has none and was never unlinked gets one."""
        tables = self.tables
        named = {dentry.ino for _, _, dentry in tables.all_names()}
        nameless = [
            inode
            for ino, inode in sorted(tables.inodes.items())
            if ino not in named and ino not in tables.orphans and ino != ROOT_INODE and inode.nlink
        ]
        for inode in nameless:
            self._found("inode", "it has no name", inode.ino)
        self._give_names(nameless)
        links = Counter(dentry.ino for _, _, dentry in tables.all_names())
        children = Counter(
            directory for directory, _, dentry in tables.all_names() if stat.S_ISDIR(dentry.type)
        )
        for ino, inode in tables.inodes.items():
            count = links[ino]
            if stat.S_ISDIR(inode.mode):
                count = 2 + children[ino] if count or ino == ROOT_INODE else 0
            if inode.nlink != count:
                self._found("inode", f"counts {inode.nlink} links, there are {count}", ino)
                inode.nlink = count

    def _give_names(self, nameless: list[Inode]) -> None:
        """Each where its last link was made, if that is known and free; the others in
        lost+found, directories first: what was in them may return to them."""
        waiting = sorted(nameless, key=lambda inode: not stat.S_ISDIR(inode.mode))
        while waiting:
            left = [inode for inode in waiting if not self._returned(inode)]
            if len(left) == len(waiting):
                self._to_lost_and_found(left.pop(0))
            waiting = left

    def _returned(self, inode: Inode) -> bool:
        parent, name = inode.parent, inode.name
        if not name or not self._is(parent, stat.S_ISDIR) or name in self._names_in(parent):
            return False
        if not self._is_reached(parent):
            return False
        self._put_name(parent, name, inode)
        return True

    def _is_reached(self, directory: int) -> bool:
        at: int | None = directory
        while at is not None and at != ROOT_INODE:
            at = self._parents.get(at)
        return at == ROOT_INODE

    def _to_lost_and_found(self, inode: Inode) -> None:
        directory = self._lost_and_found()
        name = _unused_name(self._names_in(directory), b"#%d" % inode.ino)
        inode.parent, inode.name = directory, name
        self._put_name(directory, name, inode)

    def _lost_and_found(self) -> int:
        for dentry in self.tables.names[ROOT_INODE].values():
            if dentry.name.startswith(LOST_AND_FOUND) and stat.S_ISDIR(dentry.type):
                return dentry.ino
        made = self.tables.counts.directories_made // DIRECTORIES_PER_GROUP
        ino = inode_number(made, self.id_floor, is_directory=True)
        self.id_floor += 1
        name = _unused_name(self._names_in(ROOT_INODE), LOST_AND_FOUND)
        inode = self._new_inode(ino, stat.S_IFDIR | 0o700)
        inode.parent, inode.name = ROOT_INODE, name
        self.tables.inodes[ino] = inode
        self.tables.inodes[ROOT_INODE].nlink += 1
        self.tables.counts = replace(self.tables.counts, inodes=self.tables.counts.inodes + 1)
        self._put_name(ROOT_INODE, name, inode)
        return ino

    def _names_in(self, directory: int) -> set[bytes]:
        return {dentry.name for dentry in self.tables.names[directory].values()}

    def _put_name(self, directory: int, name: bytes, inode: Inode) -> None:
        entries = self.tables.names[directory]
        slot = _free_slot(self.hash_key, entries, name)
        entries[slot] = Dentry(inode.ino, stat.S_IFMT(inode.mode), name)
        if stat.S_ISDIR(inode.mode):
            self._parents[inode.ino] = directory

    # -- orphans and counts

    def _orphans(self) -> None:
        tables = self.tables
        nameless = {ino for ino, inode in tables.inodes.items() if inode.nlink == 0}
        for ino in sorted(tables.orphans ^ nameless):
            what = (
                "it is no orphan and noted as one"
                if ino in tables.orphans
                else ("it is an orphan and not noted as one")
            )
            self._found("orphan", what, ino)
        tables.orphans = nameless

    def _usage(self) -> None:
        tables = self.tables
        for ino, inode in tables.inodes.items():
            extents = {part.extent_id for part in tables.slices.get(ino, ())}
            taken = sum(round_up(tables.extents[e].stored) for e in extents if e in tables.extents)
            if inode.stored != taken:
                self._found("inode", f"says it takes {inode.stored} bytes, it takes {taken}", ino)
                inode.stored = taken
        directories = [ino for ino in tables.inodes if self._is(ino, stat.S_ISDIR)]
        made = max([0, *(group_of(ino) for ino in directories)]) * DIRECTORIES_PER_GROUP
        made = max(made, len(directories) - 1, tables.counts.directories_made)
        counts = Counts(len(tables.inodes), made)
        if counts != tables.counts:
            was, now = tables.counts.inodes, counts.inodes
            self._found("counts", f"{was} inodes and {tables.counts.directories_made} directories "
                        f"made, there are {now} and {made}")  # fmt: skip
            tables.counts = counts


def laid(slices: Iterable[Slice]) -> list[Slice]:
    """Slices of a file laid one over the other."""
    runs: Intervals[Place] = Intervals(lambda place, start, _end: (place[0], place[1] + start))
    for part in slices:
        runs.insert(part.offset, part.end, (part.extent_id, part.skew))
    return [Slice(run.start, run.end - run.start, *run.value) for run in runs]


def _is_possible(extent: Extent, geometry: Geometry) -> bool:
    in_place = geometry.contains(extent.address, round_up(extent.stored))
    sizes = 0 < extent.size <= EXTENT_SIZE_MAX and 0 < extent.stored <= EXTENT_SIZE_MAX
    known = extent.codec in set(Codec) and extent.cipher in set(Cipher)
    return in_place and sizes and known


def _free_slot(hash_key: bytes, taken: Iterable[int], name: bytes) -> int:
    first, taken = name_slot(hash_key, name), set(taken)
    return next(slot for slot in range(first, first + NAME_COLLISIONS_MAX) if slot not in taken)


def _unused_name(taken: set[bytes], name: bytes) -> bytes:
    number, unused = 0, name
    while unused in taken:
        number += 1
        unused = b"%s-%d" % (name, number)
    return unused
