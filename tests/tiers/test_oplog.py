"""The operation log in tmpfs: what was kept is found again, and nothing else."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs.engine.buffer import BufferedOperation
from kvfs.engine.format import (
    BLOCK,
    OPLOG_ALIGNED_MIN,
    OPLOG_RECORD,
    OPLOG_RECORD_SIZE,
    OplogChunkHeader,
)
from kvfs.tiers import oplog
from kvfs.tiers.oplog import CHUNK_SIZE, OperationLog

UUID, TOKEN, OTHER = b"u" * 16, b"t" * 16, b"o" * 16
LIMIT = 8 * CHUNK_SIZE
MIB = 1024 * 1024
Record = tuple[int, bytes, bytes]


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="kvfs-oplog-", dir="/dev/shm"))
    yield made / "log"
    shutil.rmtree(made)


def opened(
    directory: Path, token: bytes = TOKEN, sequence: int = 0, limit: int = LIMIT
) -> tuple[OperationLog, list[Record]]:
    log = OperationLog(directory, limit)
    left = [plain(record) for record in log.open(UUID, token, sequence)]
    log.begin(token)
    return log, left


def plain(record: BufferedOperation) -> Record:
    return record.sequence, record.operation, bytes(record.kept.data)


def kept(log: OperationLog, sequence: int, size: int = 100) -> Record:
    operation, data = b"op %d" % sequence, bytes([sequence % 251]) * size
    log.append(sequence, operation, data)
    return sequence, operation, data


def chunk_files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def test_the_memory_of_the_first_operation_is_there_before_it(directory: Path) -> None:
    log, _ = opened(directory)
    before = chunk_files(directory)
    assert len(before) == 1
    kept(log, 1)
    assert chunk_files(directory) == before


# -- what survives ---------------------------------------------------------------------


def test_records_survive_the_process(directory: Path) -> None:
    log, left = opened(directory)
    assert left == []
    expected = [kept(log, n) for n in range(1, 50)]
    assert opened(directory)[1] == expected


def test_records_over_several_chunks_survive(directory: Path) -> None:
    log, _ = opened(directory)
    expected = [kept(log, n, MIB) for n in range(1, 25)]
    assert len(chunk_files(directory)) > 2
    assert opened(directory)[1] == expected


def test_the_log_goes_on_where_it_was_left(directory: Path) -> None:
    log, _ = opened(directory)
    expected = [kept(log, n) for n in range(1, 5)]
    log, left = opened(directory)
    expected += [kept(log, n) for n in range(5, 9)]
    assert left == expected[:4]
    assert opened(directory)[1] == expected


def test_only_records_behind_the_sequence_are_returned(directory: Path) -> None:
    """Those before are in the ring."""
    log, _ = opened(directory)
    expected = [kept(log, n) for n in range(1, 20)]
    assert opened(directory, sequence=12)[1] == expected[12:]


def test_a_clean_end_leaves_nothing(directory: Path) -> None:
    log, _ = opened(directory)
    kept(log, 1)
    log.close(keep=False)
    assert not directory.exists()


def test_an_end_that_keeps_leaves_all(directory: Path) -> None:
    log, _ = opened(directory)
    expected = [kept(log, 1)]
    log.close(keep=True)
    assert opened(directory)[1] == expected


@pytest.mark.parametrize("size", [0, 1, OPLOG_ALIGNED_MIN - 1, OPLOG_ALIGNED_MIN, MIB])
def test_data_of_any_size_survives_and_is_what_append_returns(directory: Path, size: int) -> None:
    log, _ = opened(directory)
    data = os.urandom(size)
    kept = log.append(1, b"operation", data)
    assert bytes(kept.data) == data
    if size >= OPLOG_ALIGNED_MIN:
        assert np.frombuffer(kept.data, np.uint8).ctypes.data % BLOCK == 0, "for direct I/O"
    assert opened(directory)[1] == [(1, b"operation", data)]


APPENDS = st.lists(
    st.tuples(st.binary(min_size=1, max_size=300), st.one_of(st.binary(max_size=200),
              st.integers(0, 3 * BLOCK).map(bytes), st.integers(60_000, 70_000).map(bytes))),
    max_size=40,
)  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(appends=APPENDS, released=st.integers(0, 40), reopened=st.integers(0, 40))
def test_any_records_survive(
    monkeypatch: pytest.MonkeyPatch,
    appends: list[tuple[bytes, bytes]],
    released: int,
    reopened: int,
) -> None:
    """Some released on the way, and with another process in between."""
    monkeypatch.setattr(oplog, "CHUNK_SIZE", 128 * 1024)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        directory = Path(made, "log")
        log, _ = opened(directory)
        records = [(n, op, data) for n, (op, data) in enumerate(appends, 1)]
        for number, record in enumerate(records):
            if number == reopened:
                log, _ = opened(directory, sequence=min(released, number))
            log.append(*record)
            if number == released:
                log.release(released)
        sequence = min(released, len(records))
        assert opened(directory, sequence=sequence)[1] == records[sequence:]


# -- what does not ---------------------------------------------------------------------


def damage(directory: Path, at: int, data: bytes) -> None:
    (path,) = chunk_files(directory)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        view[at : at + len(data)] = data


def offsets(directory: Path, operations: list[bytes]) -> list[int]:
    """Where the operations lie in the only chunk."""
    (path,) = chunk_files(directory)
    content = path.read_bytes()
    return [content.index(operation) for operation in operations]


def test_a_torn_record_ends_the_log(directory: Path) -> None:
    """Whichever of its bytes is not there."""
    log, _ = opened(directory)
    expected = [kept(log, n, 40) for n in range(1, 4)]
    at = offsets(directory, [b"op 3"])[0] - OPLOG_RECORD_SIZE
    (path,) = chunk_files(directory)
    whole = path.read_bytes()
    padding = range(OPLOG_RECORD.size - 12, OPLOG_RECORD.size - 8)
    for byte in range(OPLOG_RECORD_SIZE + 4 + 40):
        if byte in padding:
            continue
        torn = bytearray(whole)
        torn[at + byte] ^= 0x55
        path.write_bytes(torn)
        assert opened(directory)[1] == expected[:2], f"byte {byte}"


@pytest.mark.parametrize("size", [10, 100, 200])
def test_records_behind_a_torn_one_are_not_replayed(directory: Path, size: int) -> None:
    """They were answered later, and an operation must not happen without those before; nor
    behind another one that is in the place of the torn one, as long or not."""
    log, _ = opened(directory)
    expected = [kept(log, n) for n in range(1, 6)]
    damage(directory, offsets(directory, [b"op 3"])[0], b"XX")
    log, left = opened(directory)
    assert left == expected[:2]
    again = kept(log, 3, size)
    assert opened(directory)[1] == [*expected[:2], again]


def test_chunks_behind_a_torn_one_are_dropped(directory: Path) -> None:
    log, _ = opened(directory)
    expected = [kept(log, n, MIB) for n in range(1, 25)]
    contents = {path: bytearray(path.read_bytes()) for path in chunk_files(directory)}
    assert len(contents) > 2
    for path, content in contents.items():
        if OplogChunkHeader.unpack(bytes(content)).first == 1:
            content[content.index(b"op 2")] ^= 1
            path.write_bytes(content)
    log, left = opened(directory)
    assert left == expected[:1]
    assert len(chunk_files(directory)) == 1


def test_records_of_another_token_are_dropped(directory: Path) -> None:
    """They were answered by a mount whose state is not the one of the ring."""
    log, _ = opened(directory)
    kept(log, 1)
    before = chunk_files(directory)
    assert opened(directory, token=OTHER)[1] == []
    assert not set(chunk_files(directory)) & set(before)


def test_records_of_another_ring_are_dropped(directory: Path) -> None:
    log = OperationLog(directory, LIMIT)
    assert list(log.open(OTHER, TOKEN, 0)) == []
    log.begin(TOKEN)
    kept(log, 1)
    assert opened(directory)[1] == []


def test_a_gap_before_the_first_record_drops_all(directory: Path) -> None:
    """The ring ends before the log begins: what lies between is missing."""
    log, _ = opened(directory, sequence=10)
    kept(log, 11)
    assert opened(directory, sequence=9)[1] == []


def test_stale_records_in_a_chunk_that_is_used_again_are_not_replayed(directory: Path) -> None:
    log, _ = opened(directory)
    for number in range(1, 20):
        kept(log, number, MIB)
    log.release(19)
    files = chunk_files(directory)
    expected = [kept(log, 20, 10), kept(log, 21, 10)]
    assert chunk_files(directory) == files, "a chunk was used again"
    assert opened(directory, sequence=19)[1] == expected


def test_a_chunk_that_was_just_taken_again_has_no_records(directory: Path) -> None:
    """Killed between its header and its first record: the old ones are still behind it."""
    log, _ = opened(directory)
    for number in range(1, 4):
        kept(log, number)
    log.release(3)
    log._next_chunk(4, 100)
    assert opened(directory, sequence=3)[1] == []


def test_files_that_are_no_chunks_are_removed(directory: Path) -> None:
    directory.mkdir()
    (directory / "chunk.1").write_bytes(b"short")
    (directory / "chunk.2").write_bytes(bytes(CHUNK_SIZE))
    log, left = opened(directory)
    assert left == []
    kept(log, 1)
    log.close(keep=False)
    assert not directory.exists()


# -- space -----------------------------------------------------------------------------


def test_released_chunks_are_used_again(directory: Path) -> None:
    log, _ = opened(directory)
    for number in range(1, 200):
        kept(log, number, MIB)
        log.release(number - 3)
    assert len(chunk_files(directory)) <= 3


def test_a_chunk_is_not_released_before_its_last_record(directory: Path) -> None:
    log, _ = opened(directory)
    records = [kept(log, number, MIB) for number in range(1, 30)]
    log.release(28)
    assert opened(directory, sequence=28)[1] == records[28:]


def test_there_is_room_up_to_the_limit_and_enospc_keeps_nothing(directory: Path) -> None:
    log, _ = opened(directory, limit=2 * CHUNK_SIZE)
    number = 0
    while log.has_room(MIB):
        number += 1
        kept(log, number, MIB)
    assert 12 <= number <= 15
    assert len(chunk_files(directory)) == 2
    log.release(number)
    assert log.has_room(MIB)


def test_a_full_tmpfs_is_enospc_with_nothing_kept(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Space is taken before it is mapped: never SIGBUS."""
    log, _ = opened(directory)
    expected = [kept(log, n, MIB) for n in range(1, 8)]

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        for number in range(8, 20):
            expected.append(kept(log, number, MIB))
    assert len(chunk_files(directory)) == 1
    assert opened(directory)[1] == expected


def test_an_operation_larger_than_a_chunk_is_refused(directory: Path) -> None:
    log, _ = opened(directory)
    with pytest.raises(OSError, match="larger than a chunk") as caught:
        log.append(1, b"operation", bytes(CHUNK_SIZE))
    assert caught.value.errno == errno.EFBIG
    assert opened(directory)[1] == []


def test_chunks_are_for_the_owner_only(directory: Path) -> None:
    log, _ = opened(directory)
    kept(log, 1)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert chunk_files(directory)[0].stat().st_mode & 0o777 == 0o600


def test_a_successor_with_the_same_process_id_gets_chunks_of_its_own(directory: Path) -> None:
    """As in a container, where the daemon's is the same after each start."""
    log, _ = opened(directory)
    expected = [kept(log, n, MIB) for n in range(1, 10)]
    log, _ = opened(directory)
    expected += [kept(log, n, MIB) for n in range(10, 30)]
    assert opened(directory)[1] == expected


# -- where an earlier mount left its log -----------------------------------------------


def test_a_log_in_another_directory_of_this_boot_is_told_of(directory: Path) -> None:
    log, _ = opened(directory)
    kept(log, 1)
    other = OperationLog(directory.parent / "elsewhere", LIMIT)
    assert other.left_at(log.home) == str(directory)
    assert log.left_at(log.home) is None, "its own"
    log.close(keep=False)
    assert other.left_at(log.home) is None, "nothing is left there"


def test_a_log_of_an_earlier_boot_is_gone(directory: Path) -> None:
    log, _ = opened(directory)
    kept(log, 1)
    other = OperationLog(directory.parent / "elsewhere", LIMIT, boot="another")
    assert other.left_at(log.home) is None
