"""Encryption at rest: what the device holds, and what of it can still be read after a removal."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvfs.engine import ciphers
from kvfs.engine.check import check
from kvfs.engine.check.load import read_base
from kvfs.engine.check.slots import read_slots
from kvfs.engine.ciphers import seal, unseal
from kvfs.engine.device import DeviceError
from kvfs.engine.format import (
    BLOCK,
    NONCE_SIZE,
    ROOT_INODE,
    SUPERBLOCK_ADDRESSES,
    Cipher,
    FormatError,
    Superblock,
)
from kvfs.engine.io import run
from kvfs.engine.keys import PART_ENTRIES, Keys
from kvfs.engine.store import Store, StoreOptions
from kvfs.engine.superblocks import Encryption
from kvfs.engine.vault import Vault
from tests.engine.audit import audit
from tests.engine.kit import (
    DIRECTORY,
    MIB,
    OPTIONS,
    SYMLINK,
    Bench,
    failure_of,
    flip,
    new_device,
    noise,
    wipe,
)
from tests.support.attacker import known_vaults, names_readable, readable, records
from tests.support.devices import RecordingDevice, Written
from tests.support.encrypted import ENCRYPTION, KEY

# A history that is made shorter a hundred times leaves as many rings in memory.
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
CODECS = [b"none", b"zstd", b"planes", b"auto"]


@pytest.fixture
def bench(tmpfs: Path) -> Bench:
    return Bench(tmpfs, new_device(encryption=ENCRYPTION))


def session(bench: Bench, name: bytes, seed: int, size: int = 300_000) -> int:
    """A directory with two layers, an xattr and a symlink."""
    directory = bench.make(name, mode=DIRECTORY)
    for layer in range(2):
        ino = bench.make(b"layer.%03d of " % layer + name, directory)
        bench.write(ino, noise(size, 2 * seed + layer))
    run(bench.store.set_xattr(directory, b"user.model of " + name, b"value of " + name))
    bench.make(b"link of " + name, directory, SYMLINK, target=b"target of " + name)
    return directory


def remove(bench: Bench, name: bytes) -> None:
    """rm -r"""
    directory = bench.find(name)
    for child in bench.names(directory):
        run(bench.store.unlink(directory, child))
    run(bench.store.rmdir(ROOT_INODE, name))
    run(bench.store.drop_free())


# -- who has the device ------------------------------------------------------------------


def everything_written(device: RecordingDevice) -> bytes:
    """Also what was overwritten since."""
    return b"".join(bytes(event.data) for event in device.events if isinstance(event, Written))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("cipher", [Cipher.AES_256_GCM, Cipher.CHACHA20_POLY1305])
def test_neither_bytes_nor_names_are_ever_on_the_device(
    tmpfs: Path, codec: bytes, cipher: Cipher
) -> None:
    bench = Bench(tmpfs, new_device(encryption=Encryption(cipher, KEY)))
    run(bench.store.set_xattr(ROOT_INODE, b"user.kvfs.codec", codec))
    session(bench, b"agent-secret", 1)
    run(bench.store.fork(bench.find(b"agent-secret"), b"fork of secret"))
    run(bench.store.rename(ROOT_INODE, b"agent-secret", ROOT_INODE, b"renamed secret"))
    layer = bench.make(b"repeated secret")
    bench.write(layer, b"a secret, again and again. " * 10_000)
    run(bench.store.sync())
    run(bench.store.checkpoint())
    run(bench.store.clean())
    run(bench.store.close())
    written = everything_written(bench.device) + bytes(bench.device.image)
    assert b"secret" not in written and b"again" not in written
    for seed in (2, 3):
        assert noise(300_000, seed)[1000:1032] not in written
    assert bench.open().usage().inodes > 5  # and with its key all is there
    assert bench.read(bench.find(b"repeated secret"))[:8] == b"a secret"


def test_what_reclaim_logs_is_encrypted(tmpfs: Path) -> None:
    bench = Bench(
        tmpfs,
        new_device(12, encryption=ENCRYPTION),
        options=replace(OPTIONS, unused_seconds=1),
    )
    session(bench, b"reclaimed secret", 1)
    run(bench.store.set_xattr(bench.find(b"reclaimed secret"), b"user.kvfs.ttl", b"1"))
    run(bench.store.checkpoint())
    units = bench.store.units
    units.touch(bench.find(b"reclaimed secret"), 1)
    run(bench.store.reclaimer.expire(is_filling=True))
    run(bench.store.close())
    assert b"secret" not in everything_written(bench.device)


@pytest.mark.parametrize("key", [None, b"another key, as long as it was"])
def test_without_its_key_a_ring_is_refused_and_left_alone(bench: Bench, key: bytes | None) -> None:
    session(bench, b"agent", 1)
    run(bench.store.close())
    before = bytes(bench.device.image)
    wanted = "give its key with --key-file" if key is None else "not the key"
    with pytest.raises(DeviceError, match=wanted):
        Store.open(bench.device, "ring", bench.make_executor(), bench.warm, OPTIONS, key)
    with pytest.raises(DeviceError, match=wanted):
        check(bench.device, "ring", key=key, repair=True)
    assert bytes(bench.device.image) == before


def test_a_master_key_is_slow_to_guess() -> None:
    """The tests themselves do without that: see tests/support/encrypted.py."""
    import importlib.util

    spec = importlib.util.find_spec("kvfs.engine.ciphers")
    assert spec is not None and spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert fresh._SCRYPT_N * fresh._SCRYPT_R * 128 >= 64 * MIB
    assert ciphers.master_secret(b"k" * 16, b"one") != ciphers.master_secret(b"k" * 16, b"two")


# -- what a removal leaves ---------------------------------------------------------------


def used_by(store: Store, name: bytes) -> set[int]:
    """The extents of the files of a directory."""
    directory = run(store.lookup(ROOT_INODE, name)).inode.ino
    found = set()
    for _, entry in run(store.list_directory(directory, 0, 999)):
        found |= {*run(store._state.files.extent_ids(entry.ino))}
    return found


@pytest.mark.parametrize("when", ["in the log", "in a checkpoint", "after a remount"])
@pytest.mark.parametrize("end", ["tick", "close", "checkpoint"])
def test_a_removed_session_is_noise(bench: Bench, when: str, end: str) -> None:
    session(bench, b"kept", 1)
    session(bench, b"agent-7", 2)
    run(bench.store.sync())
    if when != "in the log":
        run(bench.store.checkpoint())
    if when == "after a remount":
        run(bench.store.close())
        bench.open()
    gone, kept = used_by(bench.store, b"agent-7"), used_by(bench.store, b"kept")
    before = bytes(bench.device.image)
    assert readable(before, before) == gone | kept
    assert b"layer.001 of agent-7" in names_readable(before, before)
    remove(bench, b"agent-7")
    match end:
        case "tick":
            bench.write_out()
            bench.store._writer.checkpoints.erased_time -= 60
            run(bench.store.tick())
        case "close":
            run(bench.store.close())
        case "checkpoint":
            run(bench.store.checkpoint())
    after = bytes(bench.device.image)
    assert readable(before, after) == kept
    assert readable(after, after) == kept
    names = names_readable(before, after)
    assert b"agent-7" not in names
    assert b"layer.001 of kept" in names


def test_one_removed_file_is_noise_and_its_neighbours_are_not(bench: Bench) -> None:
    directory = session(bench, b"agent", 1)
    run(bench.store.checkpoint())
    before = bytes(bench.device.image)
    gone = {*run(bench.store._state.files.extent_ids(bench.find(b"layer.000 of agent", directory)))}
    run(bench.store.unlink(directory, b"layer.000 of agent"))
    run(bench.store.checkpoint())
    left = used_by(bench.store, b"agent")
    assert gone and left
    assert readable(before, bytes(bench.device.image)) == left


def test_a_key_lives_as_long_as_a_fork_shares_what_it_opens(bench: Bench) -> None:
    session(bench, b"agent", 1)
    run(bench.store.fork(bench.find(b"agent"), b"fork"))
    shared = used_by(bench.store, b"agent")
    layer = bench.find(b"layer.000 of agent", bench.find(b"fork"))
    bench.write(layer, noise(200_000, 9), 50_000)
    run(bench.store.checkpoint())
    own = used_by(bench.store, b"fork") - shared
    before = bytes(bench.device.image)
    keys = {e.extent_id: e.key_id for e in records(before)}
    assert own and {keys[number] for number in own} == {layer}, "a fork writes under new keys"
    remove(bench, b"agent")
    run(bench.store.checkpoint())
    still = used_by(bench.store, b"fork")
    assert readable(before, bytes(bench.device.image)) == still
    expected = bench.read(layer)
    remove(bench, b"fork")
    run(bench.store.checkpoint())
    assert len(expected) == 300_000
    assert readable(before, bytes(bench.device.image)) == set()
    assert [ino for ino, _, _ in bench.store._writer.index.vault.keys.counts()] == [ROOT_INODE]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["session", "session", "append", "fork", "remove", "remove", "checkpoint", "clean",
             "sync", "kill", "reopen"]
        ),
        st.integers(0, 3),
    ),
    min_size=4, max_size=25,
)  # fmt: skip


@settings(max_examples=40, deadline=None, phases=_PHASES, suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
def test_after_any_history_only_what_is_there_can_be_read(tmpfs: Path, steps: Any) -> None:
    """At each step the image is kept; in the end no extent of any of them can be decrypted
    but those of files that are there."""
    directory = tmpfs / f"history-{os.urandom(4).hex()}"
    bench = Bench(directory, new_device(20, encryption=ENCRYPTION))
    images = []
    for number, (what, which) in enumerate(steps):
        name = b"agent-%d" % which
        there = name in bench.names()
        match what:
            case "session" if not there:
                session(bench, name, number, 70_000)
            case "append" if there:
                parent = bench.find(name)
                layer = bench.names(parent)[0]
                bench.write(bench.find(layer, parent), noise(40_000, number), 50_000)
            case "fork" if there and b"agent-%d" % (which + 1) not in bench.names():
                run(bench.store.fork(bench.find(name), b"agent-%d" % (which + 1)))
            case "remove" if there:
                remove(bench, name)
            case "checkpoint":
                run(bench.store.checkpoint())
            case "clean":
                run(bench.store.clean())
            case "sync":
                run(bench.store.sync())
            case "kill":
                bench.open()
            case "reopen":
                run(bench.store.close())
                bench.open()
        images.append(bytes(bench.device.image))
    run(bench.store.checkpoint())
    run(bench.store.sync())
    audit(bench.store)
    there = {n for name in bench.names() for n in used_by(bench.store, name)}
    after = bytes(bench.device.image)
    assert readable(after, after) & there == there
    for image in images[:: max(1, len(images) // 5)]:
        # A key lives as long as its inode: what a file had before it was overwritten is under it.
        assert keys_of(readable(image, after), image) <= living(bench)


def keys_of(extents: set[int], image: bytes) -> set[int]:
    return {extent.key_id for extent in records(image) if extent.extent_id in extents}


def living(bench: Bench) -> set[int]:
    keys = bench.store._writer.index.vault.keys
    return {ino for ino, extents, has_inode in keys.counts() if extents or has_inode}


# -- nonces ------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None, phases=_PHASES, suppress_health_check=list(HealthCheck))
@given(steps=STEPS, seed=st.integers(0, 99))
def test_no_nonce_ever_comes_twice_also_after_crashes_and_with_an_old_image(
    tmpfs: Path, steps: Any, seed: int
) -> None:
    directory = tmpfs / f"nonces-{os.urandom(4).hex()}"
    bench = Bench(directory, new_device(20, encryption=ENCRYPTION))
    session(bench, b"agent", seed, 50_000)
    run(bench.store.sync())
    old = bytearray(bench.device.image)
    writes = []
    for image in (old, bytearray(old), bytearray(old)):
        # Put back, or the machine lost power: the same goes on in another way.
        device = RecordingDevice(image)
        again = Bench(directory / f"boot-{len(writes)}", device, boot=os.urandom(4).hex())
        for number, (what, which) in enumerate(steps):
            name = b"agent-%d" % which
            if what == "session" and name not in again.names():
                session(again, name, number + len(writes), 30_000)
            elif what == "append":
                parent = again.find(b"agent")
                layer = again.find(b"layer.000 of agent", parent)
                again.write(layer, noise(20_000, number + len(writes)), 1000 * number)
            elif what in ("checkpoint", "clean", "sync"):
                run(getattr(again.store, what)())
            elif what == "kill":
                again.open()
        run(again.store.sync())
        kept = bytes(image)
        writes += [(extent, kept) for extent in records(kept)]
    seen: dict[tuple[int, bytes], bytes] = {}
    for extent, image in writes:
        stored = image[extent.address : extent.address + extent.stored]
        known = seen.setdefault((extent.key_id, stored[:NONCE_SIZE]), stored)
        if known != stored:
            pytest.fail(f"one nonce for two texts: extent {extent.extent_id}")
    assert seen


# -- damage ------------------------------------------------------------------------------


def superblocks_of(device: RecordingDevice) -> list[Superblock]:
    blocks = [bytes(device.image[at : at + BLOCK]) for at in SUPERBLOCK_ADDRESSES]
    return sorted(map(Superblock.unpack, blocks), key=lambda block: block.generation)


def table_places(device: RecordingDevice) -> list[int]:
    slots = read_slots(device, "ring")
    vault = read_base(device, slots.newest, Vault.unlock(slots.newest, KEY, "ring")).vault
    copies = [slots.newest.key_tables, *(part.places for part in vault.table)]
    return [place.address for pair in copies for place in pair]


def test_one_bad_copy_of_the_key_table_costs_nothing_and_is_mended(bench: Bench) -> None:
    session(bench, b"agent", 1)
    run(bench.store.close())
    for address in table_places(bench.device):
        device = RecordingDevice(bytearray(bench.device.image))
        flip(device.image, address + 7)
        report = check(device, "ring", key=KEY)
        assert {finding.structure for finding in report.findings} == {"keys"}
        store = bench.open_image(device.image)
        assert len(run(store.list_directory(ROOT_INODE, 0, 9))) == 1
        assert check(device, "ring", key=KEY, repair=True).is_repaired
        assert check(device, "ring", key=KEY).is_clean


def test_both_copies_of_the_newest_key_table_lost_leave_the_one_before(bench: Bench) -> None:
    directory = session(bench, b"agent", 1)
    run(bench.store.checkpoint())
    session(bench, b"later", 2)
    run(bench.store.checkpoint())
    run(bench.store.sync())
    device = RecordingDevice(bytearray(bench.device.image))
    for address in superblocks_of(device)[-1].key_tables:
        wipe(device.image, address.address)
    store = bench.open_image(device.image)
    assert run(store.lookup(ROOT_INODE, b"later")).is_directory
    repaired = check(device, "ring", key=KEY, repair=True)
    assert repaired.is_repaired and not repaired.lost
    assert check(device, "ring", key=KEY).is_clean
    again = Bench(bench.directory / "repaired", device, boot="repaired")
    assert again.read(again.find(b"layer.000 of agent", directory)) == noise(300_000, 2)
    assert again.names() == [b"agent", b"later"]


def test_changed_ciphertext_is_eio_also_with_a_right_checksum(bench: Bench) -> None:
    """A checksum is no secret: who can write the device can make one that fits."""
    ino = bench.make(b"file")
    bench.write(ino, noise(100_000))
    run(bench.store.close())
    image = bytearray(bench.device.image)
    (extent,) = records(image)
    vault = next(known_vaults(image))
    flip(image, extent.address + 500)
    stored = memoryview(image)[extent.address : extent.address + extent.stored]
    with pytest.raises(FormatError, match="cannot be decrypted"):
        vault.open_extent(extent, stored, memoryview(bytearray(extent.size)))
    swapped = replace(extent, extent_id=extent.extent_id + 1)
    flip(image, extent.address + 500)
    with pytest.raises(FormatError, match="cannot be decrypted"):
        vault.open_extent(swapped, stored, memoryview(bytearray(extent.size)))


def test_a_key_that_is_lost_is_eio_for_what_it_opens(bench: Bench) -> None:
    directory = session(bench, b"agent", 1)
    run(bench.store.close())
    bench.open()
    ino = bench.find(b"layer.000 of agent", directory)
    keys = bench.store._writer.index.vault.keys
    part = keys._part_of(ino)
    keys.parts[part] = keys.parts[part][keys.parts[part]["ino"] != ino]
    other = bench.find(b"layer.001 of agent", directory)
    assert failure_of(bench.store.read(ino, 0, 100)) == errno.EIO
    assert bench.read(other, 0, 100) == noise(300_000, 3)[:100]


# -- parts -------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 2**63 - 1), unique=True, max_size=300), st.data())
def test_keys_are_found_as_in_a_dictionary(numbers: list[int], data: st.DataObject) -> None:
    from kvfs.engine import keys as module
    from kvfs.engine.format import Inode, inode_key

    old, module.PART_ENTRIES = module.PART_ENTRIES, 8
    try:
        keys, model = Keys(), {}
        for ino in numbers:
            model[ino] = keys.find_or_make(ino)
            keys.apply([], [(inode_key(ino), Inode(ino, 0).pack())], [])
        removed = data.draw(st.sets(st.sampled_from(numbers))) if numbers else set()
        keys.apply([], [(inode_key(ino), None) for ino in removed], [])
        assert {ino: keys.find(ino) for ino in numbers} == model, "until the next checkpoint"
        assert keys.has_dead == bool(removed)
        keys.checkpointed()
        for ino in removed:
            del model[ino]
        assert {ino: keys.find(ino) for ino in numbers if keys.find(ino)} == model
        assert len(keys) == len(model)
    finally:
        module.PART_ENTRIES = old


def test_a_key_table_grows_and_is_read_back(tmpfs: Path) -> None:
    options = StoreOptions(cache_size=4 * MIB, uid=0, gid=0)
    device = new_device(24, encryption=ENCRYPTION)
    bench = Bench(tmpfs, device, options=options)
    directory = bench.make(b"many", mode=DIRECTORY)
    for number in range(PART_ENTRIES + 200):
        bench.make(b"%d" % number, directory)
    run(bench.store.close())
    bench.open()
    vault = bench.store._writer.index.vault
    assert len(vault.table) == 2 and len(vault.keys) == PART_ENTRIES + 202
    audit(bench.store)
    assert check(device, "ring", key=KEY).is_clean


@given(st.binary(max_size=200), st.binary(max_size=20), st.sampled_from(list(Cipher)[1:]))
def test_what_is_sealed_is_opened_in_its_own_context_alone(
    data: bytes, context: bytes, cipher: Cipher
) -> None:
    secret = os.urandom(32)
    sealed = seal(cipher, secret, data, context)
    assert unseal(cipher, secret, sealed, context) == data
    for wrong in (sealed[:-1], sealed + b"x", b""):
        with pytest.raises(FormatError):
            unseal(cipher, secret, wrong, context)
    with pytest.raises(FormatError):
        unseal(cipher, secret, sealed, context + b"x")
    with pytest.raises(FormatError):
        unseal(cipher, os.urandom(32), sealed, context)
