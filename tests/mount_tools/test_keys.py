"""Encrypted rings through the command: where their key comes from, what is left of a session."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.engine import ciphers
from tests.conftest import MounterMaker
from tests.support.attacker import names_readable, readable, records
from tests.support.command import error_line
from tests.support.mounter import Mounter, kvfs

KEY = bytes(range(100, 132))
_ADD_KEY, _KEYCTL, _UNLINK = 248, 250, 9  # on x86_64
_USER_KEYRING = -4
LAYER = os.urandom(3_000_000)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "ring.key"
    file.write_bytes(KEY)
    file.chmod(0o600)
    return file


@pytest.fixture
def encrypted(make_mounter: MounterMaker, key_file: Path) -> Mounter:
    """64 MiB, not mounted yet."""
    return make_mounter("64M", "--encrypt", "--key-file", str(key_file))


@pytest.fixture
def in_keyring() -> Iterator[str]:
    """The name of a key in the kernel's keyring, as keyctl(1) adds it."""
    libc = ctypes.CDLL(None, use_errno=True)
    name = f"kvfs-test-{os.getpid()}"
    keyring = ctypes.c_long(_USER_KEYRING)
    serial = libc.syscall(_ADD_KEY, b"user", name.encode(), KEY, len(KEY), keyring)
    if os.uname().machine != "x86_64" or serial < 0:
        pytest.skip("no keyring here")
    yield name
    libc.syscall(_KEYCTL, _UNLINK, serial, keyring)


def keep(mounter: Mounter, name: str = "agent-7") -> None:
    session = mounter.mountpoint / name
    session.mkdir()
    (session / "layer.000").write_bytes(LAYER)
    os.setxattr(session, "user.kvfs.model", b"a model")


# -- sources of keys -----------------------------------------------------------------------


def test_the_key_may_come_from_a_file_a_command_or_the_keyring(
    encrypted: Mounter, key_file: Path, in_keyring: str
) -> None:
    sources = [
        ("--key-file", str(key_file)),
        ("--key-command", f"cat '{key_file}'; echo"),
        ("--keyring", in_keyring),
    ]
    for number, source in enumerate(sources):
        encrypted.mount(*source)
        keep(encrypted, f"agent-{number}")
        for before in range(number):
            layer = encrypted.mountpoint / f"agent-{before}" / "layer.000"
            assert layer.read_bytes() == LAYER
        encrypted.umount()
        assert "clean" in kvfs("fsck", encrypted.image, *source).stdout


def test_what_is_wrong_with_a_key_is_said_in_one_line(encrypted: Mounter, tmp_path: Path) -> None:
    def told(*arguments: str) -> str:
        mounted = encrypted.mount(*arguments, check=False)
        checked = kvfs("fsck", encrypted.image, *arguments, check=False)
        assert checked.returncode == 8
        assert error_line(mounted).split(": ")[-1] == checked.stderr.strip().split(": ")[-1]
        return error_line(mounted)

    other = tmp_path / "other"
    other.write_bytes(KEY[::-1])
    other.chmod(0o600)
    assert "is encrypted: give its key with --key-file" in told()
    assert "not the key that it was encrypted with" in told("--key-file", str(other))
    other.write_bytes(b"too short\n")
    assert "too short: 9 bytes, 16 at least" in told("--key-file", str(other))
    assert "does not exist; make a key with: " in told("--key-file", str(tmp_path / "none"))
    assert "ended with status 3" in told("--key-command", "exit 3")
    assert 'no key "kvfs-none" in the keyring' in told("--keyring", "kvfs-none")
    both = ("--key-file", str(other), "--key-command", "true")
    assert "is enough" in told(*both)


def test_a_key_that_others_can_read_is_warned_of(encrypted: Mounter, key_file: Path) -> None:
    key_file.chmod(0o644)
    result = encrypted.mount("--key-file", str(key_file))
    assert f"chmod 600 {key_file}" in result.stderr


@pytest.mark.parametrize("arguments", [["--encrypt"], ["--key-command", "echo 0123456789abcdef"]])
def test_encryption_and_a_key_go_together(tmp_path: Path, arguments: list[str]) -> None:
    image = tmp_path / "ring.img"
    result = kvfs("mkfs", image, "--size", "64M", *arguments, check=False)
    assert "--encrypt and a key go together" in error_line(result)
    assert not image.exists()


# -- what is where -------------------------------------------------------------------------


def test_warm_files_are_their_owners_alone_and_go_at_unmount(
    encrypted: Mounter, key_file: Path
) -> None:
    encrypted.mount("--key-file", str(key_file))
    assert encrypted.stats()["cipher"] == "aes_256_gcm"
    keep(encrypted)
    files = [file for file in encrypted.warm_directory.rglob("*") if file.is_file()]
    assert files
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert "key" not in (encrypted.mountpoint / ".kvfs" / "config.toml").read_text()
    encrypted.umount()
    assert not [file for file in encrypted.warm_directory.rglob("*") if file.is_file()]


def test_after_a_kill_all_is_there_and_encrypted(encrypted: Mounter, key_file: Path) -> None:
    encrypted.mount("--key-file", str(key_file))
    keep(encrypted)
    encrypted.kill()
    encrypted.mount("--key-file", str(key_file))
    layer = encrypted.mountpoint / "agent-7" / "layer.000"
    assert layer.read_bytes() == LAYER
    os.setxattr(layer, "user.kvfs.demote", b"1")
    assert os.getxattr(layer, "user.kvfs.tier") == b"cold"
    assert layer.read_bytes() == LAYER
    encrypted.umount()
    image = encrypted.image.read_bytes()
    assert b"agent-7" not in image and LAYER[500_000:500_064] not in image


def test_a_session_that_went_is_noise_also_with_the_master_key(
    encrypted: Mounter, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ciphers, "_SCRYPT_N", 2**16)  # as the daemon has it
    encrypted.mount("--key-file", str(key_file))
    keep(encrypted, "kept")
    keep(encrypted, "agent-7")
    encrypted.umount()
    before = encrypted.image.read_bytes()
    assert readable(before, before, KEY) == {extent.extent_id for extent in records(before)}
    assert b"agent-7" in names_readable(before, before, KEY)
    encrypted.mount("--key-file", str(key_file))
    shutil.rmtree(encrypted.mountpoint / "agent-7")
    encrypted.umount()
    after = encrypted.image.read_bytes()
    left = readable(before, after, KEY)
    assert len(left) == len(records(before)) // 2
    assert b"agent-7" not in names_readable(before, after, KEY)
    encrypted.mount("--key-file", str(key_file))
    assert (encrypted.mountpoint / "kept" / "layer.000").read_bytes() == LAYER
