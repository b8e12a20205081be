"""Offline check and repair of a ring.

A check loads the state that the superblocks lead to, fills what it can of what is lost,
decodes it into tables, mends what contradicts itself there, and reads all data. Each step
tells what it found. A repair writes the mended state; a check throws it away.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvfs.engine.check.data import Progress, check_data, is_whole
from kvfs.engine.check.findings import CheckError, Finding, Report
from kvfs.engine.check.keys import lost_keys
from kvfs.engine.check.load import Loaded, load, needed_by
from kvfs.engine.check.mend import Mender
from kvfs.engine.check.rewrite import NewState, write_state
from kvfs.engine.check.salvage import adopt, mark_lost
from kvfs.engine.check.segments import Move, findings_of, unreadable
from kvfs.engine.check.slots import read_slots
from kvfs.engine.check.tables import Tables, decoded, path_of
from kvfs.engine.device import Device
from kvfs.engine.superblocks import write_superblock
from kvfs.engine.vault import Vault

__all__ = ["CheckError", "Finding", "Progress", "Report", "check"]


def check(
    device: Device,
    name: str,
    *,
    key: bytes | None = None,
    repair: bool = False,
    progress: Progress = lambda done, total: None,
) -> Report:
    """`key` is what the operator of an encrypted ring keeps. Raises DeviceError when there is
    no ring to check, CheckError when the repair cannot be made, OSError."""
    slots = read_slots(device, name)
    unlocked = Vault.unlock(slots.newest, key, name)
    loaded = load(device, slots, unlocked)
    vault = loaded.base.vault
    findings = [*slots.findings, *loaded.findings]
    tables = decoded(loaded.items, findings)
    newest = slots.newest
    id_floor = slots.id_floor
    if loaded.evidence is not None:
        findings += adopt(device, tables, loaded.evidence, vault.hash_key)
        id_floor = mark_lost(tables, loaded.gaps, id_floor)
    mender = Mender(
        tables, loaded.base.geometry, vault.hash_key, newest.created_ns, id_floor,
        loaded.base.trees.nodes, partial(is_whole, device),
    )  # fmt: skip
    mender.run()
    findings += mender.findings
    unmovable = unreadable(device, loaded.base, tables)
    findings += findings_of(loaded.base, unmovable)
    findings += lost_keys(device, loaded, tables)
    data = check_data(device, tables, progress)
    findings += data.findings
    faults = {finding.structure for finding in findings if not finding.is_lost}
    if repair and faults == {"superblock"} and slots.older is None:
        for superblock in (newest.next(), newest.next().next()):
            write_superblock(device, superblock)
    elif repair and faults:
        needed = needed_by(device, slots, unlocked)
        state = _new_state(device, loaded, mender, needed, set(unmovable))
        write_state(device, newest, state, vault)
    return Report(
        newest.uuid, _with_paths(findings, tables), len(tables.inodes), len(tables.extents),
        data.size, repair and bool(faults),
    )  # fmt: skip


def _new_state(
    device: Device, loaded: Loaded, mender: Mender, needed: set[int], unmovable: set[int]
) -> NewState:
    trees, log, evidence = loaded.base.trees, loaded.log, loaded.evidence
    tables, segment = mender.tables, loaded.base.geometry.segment
    extents = list(tables.extents.values())
    moved = [extent for extent in extents if segment(extent.address) in unmovable]
    return NewState(
        items=tables.packed(),
        extents=extents,
        move=Move(device, tables, moved),
        leaves=[leaf for leaf in trees.leaves if segment(leaf.pointer.address) not in unmovable],
        stored_items=trees.items,
        needed=needed,
        evidence=evidence.segments if evidence else set(),
        end=None if log.is_damaged or log.end.segment in unmovable else log.end,
        sequence=log.last_sequence + 1,
        operation=log.operation,
        id_floor=mender.id_floor,
    )


def _with_paths(findings: list[Finding], tables: Tables) -> list[Finding]:
    if all(finding.ino is None for finding in findings):
        return findings
    names_of = {dentry.ino: (where, dentry.name) for where, _, dentry in tables.all_names()}
    return [
        finding if finding.ino is None
        else replace(finding, path=path_of(tables, finding.ino, names_of))
        for finding in findings
    ]  # fmt: skip
