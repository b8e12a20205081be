"""Rings of other releases: those of earlier ones open for ever, those of later ones are refused
by name. `scripts/make_fixture.py` made the images."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from kvfs.engine import ciphers
from kvfs.engine.check import check
from kvfs.engine.device import FileDevice
from kvfs.engine.format import BLOCK, FORMAT_VERSION, SUPERBLOCK_ADDRESSES, Superblock
from kvfs.engine.io import InlineExecutor, run
from kvfs.engine.store import Store, StoreOptions
from kvfs.tiers.warm import WarmTier
from tests.conftest import MounterMaker
from tests.support import manifest
from tests.support.command import error_line
from tests.support.images import digest, from_a_newer_release, sealed
from tests.support.manifest import Entry
from tests.support.mounter import Mounter, kvfs

MIB = 1024 * 1024
FIXTURES = Path(__file__).parents[1] / "fixtures"
RINGS = sorted(path.name.removesuffix(".img.zst") for path in FIXTURES.glob("*.img.zst"))
FIRST_VERSION = 3  # of the first release
ENCRYPTED = tuple(ring for ring in RINGS if "encrypted" in ring)
HOW = ("", "-cut", "-encrypted", "-encrypted-cut")
CLEAN, FAILED = 0, 8


def unpacked(ring: str, image: Path) -> dict[str, Any]:
    """Its manifest; the image is put there."""
    packed = (FIXTURES / f"{ring}.img.zst").read_bytes()
    image.write_bytes(zstandard.ZstdDecompressor().decompress(packed))
    text = zstandard.ZstdDecompressor().decompress((FIXTURES / f"{ring}.json.zst").read_bytes())
    document: dict[str, Any] = json.loads(text)
    document["entries"] = [Entry(**entry) for entry in document["entries"]]
    return document


@pytest.fixture(params=[ring for ring in RINGS if not ring.startswith(ENCRYPTED)])
def mounter_and_manifest(
    make_mounter: MounterMaker, request: pytest.FixtureRequest
) -> tuple[Mounter, dict[str, Any]]:
    mounter = make_mounter("16M")
    return mounter, unpacked(request.param, mounter.image)


def test_there_is_a_ring_of_each_version_unmounted_and_cut_off() -> None:
    versions = range(FIRST_VERSION, FORMAT_VERSION + 1)
    assert {f"ring-v{n}{how}" for n in versions for how in HOW} <= set(RINGS)
    assert all((FIXTURES / f"{ring}.img.zst").stat().st_size < 200 * 1024 for ring in RINGS)


@pytest.mark.parametrize("ring", RINGS)
def test_an_earlier_ring_opens_and_is_sound(
    ring: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ciphers, "_SCRYPT_N", 2**16)  # as it was when they were made
    image = tmp_path / "ring.img"
    expected = unpacked(ring, image)
    device = FileDevice(image)
    assert check(device, ring, key=manifest.KEY).findings == []
    executor = InlineExecutor()
    buffer = WarmTier(tmp_path / "warm", 64 * MIB, executor)
    store = Store.open(device, ring, executor, buffer, StoreOptions(), manifest.KEY)
    assert store.damage is None and not store.read_only
    assert manifest.of_store(store) == expected["entries"]
    assert run(store.reclaimer.entries()) == expected["log"] != []
    run(store.close())
    report = check(device, ring, key=manifest.KEY)
    assert report.findings == [] and report.data_bytes > 0
    device.close()


def test_an_earlier_ring_is_mounted_shown_and_written_on(
    mounter_and_manifest: tuple[Mounter, dict[str, Any]],
) -> None:
    mounter, expected = mounter_and_manifest
    assert kvfs("fsck", mounter.image).returncode == CLEAN
    mounter.mount()
    assert manifest.of_mount(mounter.mountpoint) == expected["entries"]
    log = (mounter.mountpoint / ".kvfs" / "log").read_text().splitlines()
    assert [json.loads(line) for line in log] == expected["log"]
    sessions = {
        session["path"]: session
        for session in map(
            json.loads, (mounter.mountpoint / ".kvfs" / "sessions").read_text().splitlines()
        )
    }
    assert {"session", "fork of session"} <= sessions.keys()
    assert sessions["session"]["pinned"] and sessions["session"]["ttl_s"] == 9_000_000

    change(mounter)
    changed = manifest.of_mount(mounter.mountpoint)
    mounter.umount()
    assert kvfs("fsck", mounter.image).returncode == CLEAN
    mounter.mount()
    assert manifest.of_mount(mounter.mountpoint) == changed
    before = {entry.path: entry for entry in expected["entries"]}
    kept = [entry for entry in changed if entry.path in before]
    assert len(kept) == len(before) - 3  # what is renamed, and what goes with it
    different = {entry.path for entry in kept if entry != before[entry.path]}
    of_the_link = {"kinds/linked", "kinds/another name"}
    assert different == {"session/layer.none", "session", "fork of session", "many", *of_the_link}


def change(mounter: Mounter) -> None:
    """One of each kind of change."""
    top = mounter.mountpoint
    with (top / "session" / "layer.none").open("r+b") as file:
        file.seek(123_456)
        file.write(b"written by a later release" * 1000)
    (top / "session" / "layer.none").chmod(0o600)
    (top / "new").write_bytes(b"new" * 100_000)
    kvfs("fork", top / "session", "another fork")
    (top / "fork of session" / "layer.zstd").rename(top / "renamed")
    (top / "session" / "moved").unlink()
    (top / "many" / "file 7").unlink()


@pytest.mark.parametrize("ring", ENCRYPTED)
def test_an_earlier_encrypted_ring_is_mounted_with_its_key(
    make_mounter: MounterMaker, tmp_path: Path, ring: str
) -> None:
    mounter, key = make_mounter("16M"), tmp_path / "key"
    expected = unpacked(ring, mounter.image)
    key.write_bytes(manifest.KEY)
    key.chmod(0o600)
    mounter.mount("--key-file", str(key))
    assert manifest.of_mount(mounter.mountpoint) == expected["entries"]
    (mounter.mountpoint / "new").write_bytes(b"new" * 100_000)
    mounter.umount()
    assert kvfs("fsck", mounter.image, "--key-file", key).returncode == CLEAN


# -- of a later release


def later_version(superblock: Superblock) -> bytes:
    packed = superblock.pack()
    return sealed(packed[:8] + (FORMAT_VERSION + 7).to_bytes(4, "little") + packed[12:])


LATER: dict[str, tuple[Callable[[Superblock], bytes], str]] = {
    "version": (later_version, f"format version {FORMAT_VERSION + 7} is unknown to this release"),
    "feature": (
        lambda superblock: from_a_newer_release(superblock, {50: "paged_attention"}),
        "features that are unknown to this release: paged_attention (bit 50)",
    ),
    "unnamed feature": (
        lambda superblock: from_a_newer_release(superblock, {50: ""}),
        "features that are unknown to this release: bit 50",
    ),
}


@pytest.mark.parametrize(
    ("slots", "what"), [((0,), "version"), ((1,), "unnamed feature"), ((0, 1), "feature")]
)
def test_a_later_ring_is_refused_by_name_by_every_verb(
    mounter: Mounter, what: str, slots: tuple[int, ...]
) -> None:
    newer, told = LATER[what]
    with mounter.image.open("r+b") as file:
        for slot in slots:
            file.seek(SUPERBLOCK_ADDRESSES[slot])
            superblock = Superblock.unpack(file.read(BLOCK))
            file.seek(SUPERBLOCK_ADDRESSES[slot])
            file.write(newer(superblock))
    before = digest(mounter.image)
    lines = [
        error_line(mounter.mount(check=False)),
        error_line(kvfs("fsck", mounter.image, check=False), FAILED),
        error_line(kvfs("fsck", mounter.image, "--repair", check=False), FAILED),
    ]
    formatting = error_line(kvfs("mkfs", mounter.image, check=False))
    assert f"{mounter.image} holds a KVFS ring" in formatting
    if slots != (1,):  # it looks no further than the first ring that it finds
        lines.append(formatting)
    for line in lines:
        assert told in line and "use a newer kvfs" in line
    assert digest(mounter.image) == before
