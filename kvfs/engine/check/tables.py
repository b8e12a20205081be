"""The items of the index, decoded into tables that can be compared and mended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvfs.engine.check.findings import Finding
from kvfs.engine.format import (
    ID_MAX,
    KEY,
    REFERENCES,
    ROOT_INODE,
    SERIAL_BITS,
    TABLE_COUNTS,
    TABLE_EXTENTS,
    TABLE_INODES,
    TABLE_LOG,
    TABLE_ORPHANS,
    TABLE_UNITS,
    Counts,
    Dentry,
    Extent,
    FormatError,
    Inode,
    ItemKind,
    Slice,
    Unit,
    Xattr,
    counts_key,
    dentry_key,
    extent_key,
    inode_key,
    log_key,
    map_key,
    orphan_key,
    references_key,
    symlink_key,
    unit_key,
    xattr_key,
)

_SERIAL = (1 << SERIAL_BITS) - 1
_TABLE_OF = {
    ItemKind.COUNTS: TABLE_COUNTS,
    ItemKind.INODE: TABLE_INODES,
    ItemKind.XATTR: TABLE_INODES,
    ItemKind.DENTRY: TABLE_INODES,
    ItemKind.MAP: TABLE_INODES,
    ItemKind.SYMLINK: TABLE_INODES,
    ItemKind.ORPHAN: TABLE_ORPHANS,
    ItemKind.EXTENT: TABLE_EXTENTS,
    ItemKind.REFERENCES: TABLE_EXTENTS,
    ItemKind.UNIT: TABLE_UNITS,
    ItemKind.LOG: TABLE_LOG,
}


@dataclass(slots=True)
class Tables:
    """`names` and `xattrs` are by owner and slot, the rest by inode or extent, `log` by
    number. A unit may be of an inode that is gone."""

    inodes: dict[int, Inode] = field(default_factory=dict)
    names: dict[int, dict[int, Dentry]] = field(default_factory=lambda: defaultdict(dict))
    xattrs: dict[int, dict[int, Xattr]] = field(default_factory=lambda: defaultdict(dict))
    targets: dict[int, bytes] = field(default_factory=dict)
    slices: dict[int, list[Slice]] = field(default_factory=lambda: defaultdict(list))
    orphans: set[int] = field(default_factory=set)
    extents: dict[int, Extent] = field(default_factory=dict)
    references: dict[int, int] = field(default_factory=dict)
    units: dict[int, Unit] = field(default_factory=dict)
    log: dict[int, bytes] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)

    def all_names(self) -> Iterator[tuple[int, int, Dentry]]:
        """Directory, slot and entry."""
        for directory, entries in self.names.items():
            for slot, dentry in entries.items():
                yield directory, slot, dentry

    def add(self, key: bytes, value: bytes) -> None:
        """Raises FormatError for what is no item of the index."""
        table, owner, kind, slot = KEY.unpack(key)
        if _TABLE_OF.get(kind) != table:
            raise FormatError("an item of an unknown kind")
        serial = owner & _SERIAL if table == TABLE_INODES else owner
        if table in (TABLE_INODES, TABLE_EXTENTS) and serial >= ID_MAX:
            raise FormatError("an item of an id that cannot be")
        match kind:
            case ItemKind.COUNTS:
                self.counts = Counts.unpack(value)
            case ItemKind.INODE:
                self.inodes[owner] = Inode.unpack(owner, value)
            case ItemKind.XATTR:
                self.xattrs[owner][slot] = Xattr.unpack(value)
            case ItemKind.DENTRY:
                self.names[owner][slot] = Dentry.unpack(value)
            case ItemKind.MAP:
                part = Slice.unpack(slot, value)
                self.slices[owner].append(part)
            case ItemKind.SYMLINK:
                self.targets[owner] = value
            case ItemKind.ORPHAN:
                self.orphans.add(owner)
            case ItemKind.EXTENT:
                self.extents[owner] = Extent.unpack(owner, value)
            case ItemKind.REFERENCES:
                self.references[owner] = _references(value)
            case ItemKind.UNIT:
                self.units[owner] = Unit.unpack(value)
            case ItemKind.LOG:
                self.log[owner] = value

    def packed(self) -> dict[bytes, bytes]:
        """As items again."""
        items = {inode_key(ino): inode.pack() for ino, inode in self.inodes.items()}
        if self.counts != Counts():
            items[counts_key()] = self.counts.pack()
        for directory, slot, dentry in self.all_names():
            items[dentry_key(directory, slot)] = dentry.pack()
        for ino, xattrs in self.xattrs.items():
            items.update((xattr_key(ino, slot), xattr.pack()) for slot, xattr in xattrs.items())
        for ino, slices in self.slices.items():
            items.update((map_key(ino, part.offset), part.pack()) for part in slices)
        items.update((symlink_key(ino), target) for ino, target in self.targets.items())
        items.update((orphan_key(ino), b"") for ino in self.orphans)
        items.update((extent_key(number), extent.pack()) for number, extent in self.extents.items())
        items.update(
            (references_key(number), REFERENCES.pack(count))
            for number, count in self.references.items()
        )
        items.update((unit_key(ino), unit.pack()) for ino, unit in self.units.items())
        items.update((log_key(number), entry) for number, entry in self.log.items())
        return items


def _references(value: bytes) -> int:
    if len(value) != REFERENCES.size:
        raise FormatError("a count of references has a wrong length")
    count: int = REFERENCES.unpack(value)[0]
    return count


def decoded(items: dict[bytes, bytes], findings: list[Finding]) -> Tables:
    """What is no item is left out, and told."""
    tables = Tables()
    for key in sorted(items):
        try:
            tables.add(key, items[key])
        except FormatError as fault:
            findings.append(Finding("item", f"{key.hex()} cannot be decoded: {fault}"))
    return tables


def path_of(tables: Tables, ino: int, names_of: dict[int, tuple[int, bytes]]) -> str | None:
    """Of a file by its name (or one of them), from the root; None where it leads elsewhere."""
    parts: list[str] = []
    while ino != ROOT_INODE:
        place = names_of.get(ino)
        if place is None or len(parts) > len(tables.inodes):
            return None
        ino, name = place
        parts.append(name.decode("utf-8", "surrogateescape"))
    return "/" + "/".join(reversed(parts))
