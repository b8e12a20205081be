"""What goes wrong is raised with the file's name, and no file is left that lies."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import DynamicCache, PreTrainedModel

from kvfs.torch import KVFSCache
from kvfs.torch.files import SessionFile
from tests.support.mounter import Mounter

Prompt = Callable[..., torch.Tensor]
ROW_BYTES = 2 * 2 * 16 * 4


def fill(model: PreTrainedModel, cache: object, ids: torch.Tensor) -> torch.Tensor:
    """Run `ids`, shape [1, n], and return their logits."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, cache=cache).logits
    return logits


def sizes(session: Path) -> list[int]:
    """Bytes of each layer file."""
    return [(session / f"layer.{index:03d}").stat().st_size for index in range(8)]


class Broken(Exception):
    """Raised by a layer of the model in the middle of a forward."""


def break_layer(model: PreTrainedModel, index: int) -> Any:
    """Let layer `index` raise; the handle ends it."""

    def fail(*_: Any) -> None:
        raise Broken

    return model.get_submodule(f"model.layers.{index}").register_forward_pre_hook(fail)


@pytest.mark.parametrize("cut", ["layer.005", "tokens"])
def test_open_crops_to_the_shortest_file(
    cut: str, kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    ids = prompt(40)
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        fill(model, cache, ids[:, :20])
        cache.end_round()
        fill(model, cache, ids[:, 20:])
        cache.end_round()
    session = kv_directory / "agent"
    width = 4 if cut == "tokens" else ROW_BYTES
    os.truncate(session / cut, 30 * width - 3)
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        assert cache.tokens == ids[0, :29].tolist()
        assert cache.rounds == [20]
        assert sizes(session) == [29 * ROW_BYTES] * 8
        assert (session / "tokens").stat().st_size == 29 * 4
        reference = DynamicCache()
        fill(model, reference, ids[:, :20])
        fill(model, reference, ids[:, 20:])
        reference.crop(-11)
        more = prompt(5, seed=3)
        assert torch.equal(fill(model, cache, more), fill(model, reference, more))


def test_a_missing_layer_is_an_empty_session(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        fill(model, cache, prompt(10))
    (kv_directory / "agent" / "layer.002").unlink()
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        assert cache.get_seq_length() == 0
        assert sizes(cache.path) == [0] * 8


def test_after_release_the_kv_comes_from_the_files(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        fill(model, cache, prompt(10))
        cache.release()
        assert all(layer.keys is None for layer in cache.layers)
        row = torch.arange(ROW_BYTES // 4, dtype=torch.float32)
        with open(cache.path / "layer.004", "r+b") as file:
            file.write(row.numpy().tobytes())
        cache.load()
        keys = cache.layers[4].keys
        assert keys is not None
        assert torch.equal(keys[0, :, 0].flatten(), row[: len(row) // 2])


def test_a_file_that_lost_its_end_is_an_error_with_its_name(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        fill(model, cache, prompt(10))
        cache.release()
        os.truncate(cache.path / "layer.006", 9 * ROW_BYTES)
        with pytest.raises(OSError, match=r"file ends at .*layer\.006") as failed:
            fill(model, cache, prompt(3, seed=1))
        assert failed.value.errno == errno.EIO
        assert failed.value.filename == str(cache.path / "layer.006")


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("released", [False, True])
def test_a_forward_that_fails_leaves_no_trace(
    released: bool, kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    reference = DynamicCache()
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        for one in (reference, cache):
            fill(model, one, prompt(30))
        if released:
            cache.release()
        handle = break_layer(model, 5)
        with pytest.raises(Broken):
            fill(model, cache, prompt(50, seed=1))
        handle.remove()
        # Others may have its workspaces at once.
        assert cache.pool.free_slabs == (
            (cache.pool.budget_bytes - cache.pool.used_bytes) // cache.pool.slab_bytes
        )
        assert cache.get_seq_length() == 30
        cache.sync()
        assert sizes(cache.path) == [30 * ROW_BYTES] * 8
        ids = prompt(20, seed=2)
        assert torch.equal(fill(model, cache, ids), fill(model, reference, ids))
        assert cache.tokens == [*prompt(30)[0].tolist(), *ids[0].tolist()]


@pytest.mark.usefixtures("small_slabs")
def test_a_write_that_fails_is_raised_and_can_be_tried_again(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SessionFile.append

    def half(self: SessionFile, memory: memoryview, offset: int) -> None:
        if self.path.name != "layer.003":
            return real(self, memory, offset)
        real(self, memory[: len(memory) // 2], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    reference = DynamicCache()
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        for one in (reference, cache):
            fill(model, one, prompt(10))
        monkeypatch.setattr(SessionFile, "append", half)
        with pytest.raises(OSError, match=r"No space left.*layer\.003"):
            cache.sync()
        monkeypatch.setattr(SessionFile, "append", real)
        # What the failed write left behind the new end must not come back.
        cache.crop(-8)
        assert sizes(cache.path)[3] <= 2 * ROW_BYTES
        reference.crop(-8)
        ids = prompt(20, seed=2)
        assert torch.equal(fill(model, cache, ids), fill(model, reference, ids))
        cache.sync()
        assert sizes(cache.path) == [22 * ROW_BYTES] * 8


def test_a_cut_that_fails_is_made_before_the_next_write(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SessionFile.truncate

    def fail(self: SessionFile, nbytes: int) -> None:
        if self.path.name == "layer.003":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.path))
        real(self, nbytes)

    with KVFSCache.open(kv_directory, "agent", model) as cache:
        fill(model, cache, prompt(10))
        cache.sync()
        monkeypatch.setattr(SessionFile, "truncate", fail)
        with pytest.raises(OSError, match=r"layer\.003"):
            cache.crop(-4)
        with pytest.raises(OSError, match=r"layer\.003"):
            cache.sync()
        monkeypatch.setattr(SessionFile, "truncate", real)
        cache.sync()
        assert sizes(cache.path) == [6 * ROW_BYTES] * 8
        assert cache.tokens == prompt(10)[0, :6].tolist()


@pytest.mark.parametrize("asked", [1, 2])
def test_a_crop_waits_for_a_read_that_runs(
    asked: int,
    kv_directory: Path,
    model: PreTrainedModel,
    prompt: Prompt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when the layer was asked for again, and that has not begun."""
    monkeypatch.setattr("kvfs.torch.cache._WORKERS", 1)
    real, started, ended = SessionFile.open_direct, threading.Event(), threading.Event()

    def slow(self: SessionFile) -> int:
        started.set()
        time.sleep(0.05)
        ended.set()
        return real(self)

    reference = DynamicCache()
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        for one in (reference, cache):
            fill(model, one, prompt(30))
        cache.release()
        monkeypatch.setattr(SessionFile, "open_direct", slow)
        for _ in range(asked):
            cache.prefetch(2)
        assert started.wait(5)
        for one in (reference, cache):
            one.crop(-10)
        assert ended.is_set()
        ids = prompt(5, seed=1)
        assert torch.equal(fill(model, cache, ids), fill(model, reference, ids))


@pytest.mark.usefixtures("small_slabs")
def test_full_slabs_are_in_the_files_before_any_sync(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt
) -> None:
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        fill(model, cache, prompt(40))
        fill(model, cache, prompt(3, seed=1))
        assert sizes(cache.path) == [40 * ROW_BYTES] * 8
        assert (cache.path / "tokens").stat().st_size == 40 * 4


def test_close_lets_go_even_if_it_cannot_write(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: SessionFile, memory: memoryview, offset: int) -> None:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(self.path))

    cache = KVFSCache.open(kv_directory, "agent", model)
    fill(model, cache, prompt(10))
    with monkeypatch.context() as patched:
        patched.setattr(SessionFile, "append", fail)
        with pytest.raises(OSError, match=r"layer\.000"):
            cache.close()
    with KVFSCache.open(kv_directory, "agent", model) as again:
        assert again.get_seq_length() == 0


def test_an_error_inside_the_with_block_is_the_one_that_is_seen(
    kv_directory: Path, model: PreTrainedModel, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: SessionFile, memory: memoryview, offset: int) -> None:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(self.path))

    cache = KVFSCache.open(kv_directory, "agent", model)
    fill(model, cache, prompt(10))
    monkeypatch.setattr(SessionFile, "append", fail)
    break_layer(model, 5)
    with pytest.raises(Broken), cache:
        fill(model, cache, prompt(10))


def test_a_dead_daemon_is_an_error_and_the_next_mount_has_what_was_written(
    mounter: Mounter, model: PreTrainedModel, prompt: Prompt
) -> None:
    reference = DynamicCache()
    mounter.mount()
    cache = KVFSCache.open(mounter.mountpoint, "agent", model)
    for one in (reference, cache):
        fill(model, one, prompt(40))
    cache.release()
    mounter.kill()
    with pytest.raises(OSError, match=r"layer\.000") as failed:
        fill(model, cache, prompt(5, seed=1))
    # The kernel answers a request that was under way with the other one.
    assert failed.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)

    mounter.mount()
    with pytest.raises(OSError, match="agent/tokens"):
        cache.sync()
    with suppress(OSError):
        cache.close()
    with KVFSCache.open(mounter.mountpoint, "agent", model) as resumed:
        assert resumed.tokens == prompt(40)[0].tolist()
        ids = prompt(5, seed=1)
        assert torch.equal(fill(model, resumed, ids), fill(model, reference, ids))


def test_after_the_daemon_died_reopen_goes_on(
    mounter: Mounter, model: PreTrainedModel, prompt: Prompt
) -> None:
    reference = DynamicCache()
    mounter.mount()
    with KVFSCache.open(mounter.mountpoint, "agent", model) as cache:
        for one in (reference, cache):
            fill(model, one, prompt(40))
        cache.end_round()
        cache.release()
        for one in (reference, cache):
            fill(model, one, prompt(7, seed=1))
        mounter.kill()
        began = time.monotonic()
        # What is hot needs no daemon; what is to be written, or is not hot, does.
        for one in (reference, cache):
            fill(model, one, prompt(2, seed=2))
        for call in (cache.sync, cache.release, cache.end_round, cache.reopen):
            with pytest.raises(OSError, match="agent"):
                call()
        assert time.monotonic() - began < 20

        mounter.mount()
        assert cache.reopen() == 0
        assert cache.get_seq_length() == 49
        assert cache.rounds == [40]
        cache.sync()
        assert sizes(cache.path) == [49 * ROW_BYTES] * 8
        cache.release()
        ids = prompt(5, seed=3)
        assert torch.equal(fill(model, cache, ids), fill(model, reference, ids))
    with KVFSCache.open(mounter.mountpoint, "agent", model) as again:
        assert again.get_seq_length() == 54


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("hot", [False, True])
def test_reopen_writes_again_what_files_lack_and_is_hot_and_crops_the_rest(
    hot: bool,
    kv_directory: Path,
    model: PreTrainedModel,
    prompt: Prompt,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reference = DynamicCache()
    with KVFSCache.open(kv_directory, "agent", model) as cache:
        for seed in range(2):
            for one in (reference, cache):
                fill(model, one, prompt(32, seed=seed))
            cache.end_round()
        if not hot:
            cache.demote_oldest_round()
        # As after a power cut: what was written last is gone.
        os.truncate(cache.path / "layer.005", 20 * ROW_BYTES)
        description = json.loads((cache.path / "session.json").read_text())
        (cache.path / "session.json").write_text(json.dumps({**description, "rounds": []}))
        lost = cache.reopen()
        if hot:
            assert (lost, cache.rounds) == (0, [32, 64])
        else:
            assert (lost, cache.rounds) == (44, [])
            assert "44 tokens were neither in its files nor hot" in caplog.text
            reference.crop(-44)
        assert (
            cache.tokens == [*prompt(32)[0].tolist(), *prompt(32, seed=1)[0].tolist()][: 64 - lost]
        )
        assert sizes(cache.path) == [(64 - lost) * ROW_BYTES] * 8
        ids = prompt(5, seed=3)
        assert torch.equal(fill(model, cache, ids), fill(model, reference, ids))


def test_reopen_after_a_forward_that_died_with_the_daemon(
    mounter: Mounter, model: PreTrainedModel, prompt: Prompt
) -> None:
    reference = DynamicCache()
    mounter.mount()
    with KVFSCache.open(mounter.mountpoint, "agent", model) as cache:
        for one in (reference, cache):
            fill(model, one, prompt(40))
        cache.release()
        mounter.kill()
        with pytest.raises(OSError, match=r"layer\.000"):
            fill(model, cache, prompt(5, seed=1))
        mounter.mount()
        assert cache.reopen() == 0
        ids = prompt(5, seed=1)
        assert torch.equal(fill(model, cache, ids), fill(model, reference, ids))
        assert cache.tokens == [*prompt(40)[0].tolist(), *ids[0].tolist()]
