"""`kvfs mkfs`: an empty ring on a device or in an image file."""

from __future__ import annotations

import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated
from uuid import UUID

import numpy as np
import typer

from kvfs.engine.device import FileDevice, create_image
from kvfs.engine.format import (
    BLOCK,
    DATA_START,
    SEGMENT_COUNT_MIN,
    SEGMENT_SIZE_MIN,
    SUPERBLOCK_ADDRESSES,
    Cipher,
    FormatError,
    Superblock,
    UnknownFormatError,
)
from kvfs.engine.superblocks import Encryption, format_device
from kvfs.mount.backing import claimed
from kvfs.mount.mounts import containing_mount
from mount_tools.common import CommandError, format_size, parse_path, parse_size, print_json, say
from mount_tools.keys import KeyCommand, KeyFile, Keyring, read_key
from mount_tools.mountpoints import require_answer

DEFAULT_SIZE = 4 * 1024**3
DEFAULT_SEGMENT_SIZE = 64 * 1024**2
_SEGMENTS_WANTED = 64
_BLKID_NOTHING_FOUND = 2


class CipherChoice(Enum):
    AES = "aes-256-gcm"
    CHACHA = "chacha20-poly1305"


CIPHERS = {
    CipherChoice.AES: Cipher.AES_256_GCM,
    CipherChoice.CHACHA: Cipher.CHACHA20_POLY1305,
}


def mkfs(
    device: Annotated[
        Path,
        typer.Argument(parser=parse_path, metavar="DEV", help="Block device or image file."),
    ],
    size: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="Size of an image file that is to be made. [default: 4G]",
            show_default=False,
        ),
    ] = None,
    segment_size: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="1M to 1G, in whole MiB. [default: 64M, less on a small device]",
            show_default=False,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Format although it holds data, which is lost.")
    ] = False,
    encrypt: Annotated[
        bool,
        typer.Option("--encrypt", help="Encrypt data and names, under a key that you keep."),
    ] = False,
    cipher: Annotated[
        CipherChoice,
        typer.Option(help="AES where the processor has it, else ChaCha20 is faster."),
    ] = CipherChoice.AES,
    key_file: KeyFile = None,
    key_command: KeyCommand = None,
    keyring: Keyring = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Format a block device or an image file; an image that does not exist is made.

    \b
    Examples:
      kvfs mkfs /dev/nvme1n1
      kvfs mkfs ring.img --size 4G
      kvfs mkfs ring.img --force
      kvfs mkfs ring.img --encrypt --key-file ring.key
    """
    key = read_key(key_file, key_command, keyring)
    if encrypt != (key is not None):
        raise CommandError(
            "--encrypt and a key go together: kvfs mkfs DEV --encrypt --key-file FILE "
            "(or --key-command, --keyring)"
        )
    encryption = None if key is None else Encryption(CIPHERS[cipher], key)
    require_answer(containing_mount(device))
    with _image_made_if_missing(device, size):
        superblock = _format(device, segment_size, encryption, force=force)
    if json_output:
        print_json(_description(device, superblock))
        return
    say(
        f"formatted {device}: {format_size(superblock.device_size)}, "
        f"{superblock.segment_count} segments of {format_size(superblock.segment_size)}"
    )
    say(f"uuid {UUID(bytes=superblock.uuid)}")
    if encrypt:
        say(f"encrypted with {cipher.value}: without its key nothing of it can be read")


def _description(device: Path, superblock: Superblock) -> dict[str, object]:
    return {
        "device": str(device),
        "uuid": str(UUID(bytes=superblock.uuid)),
        "size": superblock.device_size,
        "segment_size": superblock.segment_size,
        "segments": superblock.segment_count,
        "cipher": superblock.cipher.name.lower(),
    }


@contextmanager
def _image_made_if_missing(device: Path, size: int | None) -> Iterator[None]:
    """A new image is removed again if the rest fails."""
    if device.exists():
        _check_size(device, size)
        yield
        return
    if device.parent.resolve().is_relative_to("/dev") and not _is_memory(device):
        raise CommandError(f"{device} does not exist: is it the right name of the device?")
    size = DEFAULT_SIZE if size is None else size
    try:
        create_image(device, size)
    except OSError as failure:
        raise CommandError(
            f"{device}: an image of {format_size(size)} cannot be made: {failure.strerror}"
        ) from None
    try:
        yield
    except BaseException:
        device.unlink()
        raise


def _is_memory(device: Path) -> bool:
    return device.parent.resolve().is_relative_to("/dev/shm")


def _check_size(device: Path, size: int | None) -> None:
    status = device.stat()
    is_image, is_device = stat.S_ISREG(status.st_mode), stat.S_ISBLK(status.st_mode)
    if size is None or not (is_image or is_device) or (is_image and status.st_size == size):
        return
    raise CommandError(
        f"{device} exists and keeps its size: leave out --size, or remove the file first"
    )


def _format(
    path: Path, segment_size: int | None, encryption: Encryption | None, *, force: bool
) -> Superblock:
    with claimed(path) as device:
        if not force:
            _refuse_used(device)
        if segment_size is None:
            _check_room(device)
            segment_size = fitting_segment_size(device.size)
        superblock = format_device(device, segment_size, encryption=encryption)
        _wipe_foreign(device)
    return superblock


def _check_room(device: FileDevice) -> None:
    needed = DATA_START + SEGMENT_COUNT_MIN * SEGMENT_SIZE_MIN
    if device.size < needed:
        raise CommandError(
            f"{device.path} is too small: a ring takes {format_size(needed)} or more"
        )


def fitting_segment_size(device_size: int) -> int:
    """The default, or less where a device is so small that it had few segments. In bytes."""
    whole = (device_size - DATA_START) // _SEGMENTS_WANTED // SEGMENT_SIZE_MIN * SEGMENT_SIZE_MIN
    return max(SEGMENT_SIZE_MIN, min(DEFAULT_SEGMENT_SIZE, whole))


def _refuse_used(device: FileDevice) -> None:
    path = device.path
    advice = f"if it is not needed, format it with: kvfs mkfs {path} --force"
    ring = _ring_on(device)
    if ring is not None:
        raise CommandError(f"{path} holds {ring}; {advice}")
    signature = _signature(path)
    if signature is not None:
        raise CommandError(f"{path} carries a signature of {signature}; {advice}")
    head = _blocks(min(DATA_START, device.size))
    device.read(0, [head])
    if np.frombuffer(head, np.uint8).any():
        raise CommandError(f"{path} is not empty (its first MiB holds data); {advice}")


def _ring_on(device: FileDevice) -> str | None:
    for address in SUPERBLOCK_ADDRESSES:
        block = _blocks(BLOCK)
        if address + BLOCK > device.size:
            return None
        device.read(address, [block])
        try:
            Superblock.unpack(block)
        except UnknownFormatError as fault:
            return f"a KVFS ring of another release already ({fault})"
        except FormatError:
            continue
        return "a KVFS ring already"
    return None


def _signature(path: Path) -> str | None:
    """What blkid finds on it. None also where there is no blkid."""
    blkid = shutil.which("blkid", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if blkid is None:
        return None
    result = subprocess.run(
        [blkid, "-p", "-o", "export", "--", str(path)], check=False, capture_output=True, text=True
    )
    if result.returncode == _BLKID_NOTHING_FOUND:
        return None
    found = dict(line.split("=", 1) for line in result.stdout.splitlines() if "=" in line)
    return found.get("TYPE") or found.get("PTTYPE") or "more than one kind"


def _wipe_foreign(device: FileDevice) -> None:
    """Old signatures in the first MiB and at the end, so that no other tool takes the
    device for what it was."""
    place = 0
    for address in [*SUPERBLOCK_ADDRESSES, DATA_START]:
        if address > place:
            device.write(place, [_blocks(address - place)])
        place = address + BLOCK
    device.write(device.size - DATA_START, [_blocks(DATA_START)])
    device.flush()


def _blocks(size: int) -> memoryview:
    """Zeros at an aligned address, for direct I/O."""
    memory = np.zeros(size + BLOCK, np.uint8)
    skip = -memory.ctypes.data % BLOCK
    return memoryview(memory.data)[skip : skip + size]
