"""The key of an encrypted ring: from a file, a command or the kernel's keyring."""

from __future__ import annotations

import ctypes
import os
import platform
import stat
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from mount_tools.common import CommandError, describe_os_error, parse_path, warn

KEY_SIZE_MIN = 16
_COMMAND_SECONDS = 120
_KEYRING_VALUE_MAX = 32767  # keyctl_read(3): of a key of type "user"
_KEYCTL_READ = 11
# request_key and keyctl: glibc has no functions for them.
_SYSCALLS = {"x86_64": (249, 250), "aarch64": (218, 219)}

KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        parser=parse_path,
        metavar="FILE",
        help="The key of an encrypted ring is what this file holds.",
        show_default=False,
    ),
]
KeyCommand = Annotated[
    str | None,
    typer.Option(
        "--key-command",
        metavar="COMMAND",
        help="The key is what this command prints (run by the shell).",
        show_default=False,
    ),
]
Keyring = Annotated[
    str | None,
    typer.Option(
        "--keyring",
        metavar="NAME",
        help='The key is the one of type "user" and this name in the kernel\'s keyring.',
        show_default=False,
    ),
]


def read_key(file: Path | None, command: str | None, name: str | None) -> bytes | None:
    """What one of the three gives, without a newline at its end; None where none is asked for.
    Raises CommandError."""
    asked = [source for source in (file, command, name) if source is not None]
    if not asked:
        return None
    if len(asked) > 1:
        raise CommandError("one of --key-file, --key-command and --keyring is enough")
    if file is not None:
        key = _of_file(file)
    elif command is not None:
        key = _of_command(command)
    else:
        key = _of_keyring(str(name))
    key = key.removesuffix(b"\n")
    if len(key) < KEY_SIZE_MIN:
        raise CommandError(
            f"the key is too short: {len(key)} bytes, {KEY_SIZE_MIN} at least; "
            f"make one with: head -c 32 /dev/urandom > FILE"
        )
    return key


def _of_file(file: Path) -> bytes:
    try:
        if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            warn(f"{file} can be read by others; chmod 600 {file}")
        return file.read_bytes()
    except FileNotFoundError:
        raise CommandError(
            f"{file} does not exist; make a key with: (umask 077; head -c 32 /dev/urandom > {file})"
        ) from None
    except OSError as failure:
        raise CommandError(describe_os_error(failure)) from None


def _of_command(command: str) -> bytes:
    try:
        done = subprocess.run(
            command, shell=True, check=True, stdout=subprocess.PIPE, timeout=_COMMAND_SECONDS
        )
    except subprocess.CalledProcessError as failure:
        raise CommandError(f"--key-command ended with status {failure.returncode}") from None
    except subprocess.TimeoutExpired:
        raise CommandError(f"--key-command took longer than {_COMMAND_SECONDS} s") from None
    return done.stdout


def _of_keyring(name: str) -> bytes:
    """See request_key(2) and keyctl_read(3)."""
    numbers = _SYSCALLS.get(platform.machine())
    if numbers is None:
        raise CommandError("--keyring is not known on this machine; use --key-command")
    request_key, keyctl = numbers
    libc = ctypes.CDLL(None, use_errno=True)
    found = libc.syscall(request_key, b"user", os.fsencode(name), None, 0)
    if found < 0:
        raise CommandError(
            f'no key "{name}" in the keyring ({os.strerror(ctypes.get_errno())}); add it with: '
            f"keyctl padd user {name} @u < FILE"
        )
    value = ctypes.create_string_buffer(_KEYRING_VALUE_MAX)
    size = libc.syscall(keyctl, _KEYCTL_READ, found, value, len(value))
    if size < 0:
        raise CommandError(f'the key "{name}" cannot be read: {os.strerror(ctypes.get_errno())}')
    return value.raw[:size]
