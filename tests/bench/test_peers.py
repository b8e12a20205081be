"""Each peer that is installed gives back the bytes that it was given."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

from scripts.bench.disk import touched
from scripts.bench.peers import ALL, Files, Layers, Peer, installed
from scripts.bench.peers.stores import Lmdb

LAYER_SIZES = {"layer.000": 8192, "layer.001": 4096, "layer.002": 131_072}


def layers_of(content: bool) -> dict[str, memoryview]:
    layers = {name: touched(size) for name, size in LAYER_SIZES.items()}
    for data in layers.values():
        data[:] = os.urandom(len(data)) if content else bytes(len(data))
    return layers


def was_restored(peer: Peer, session: str, into: Layers, expected: Layers) -> bool:
    with contextlib.suppress(Exception):
        peer.restore(session, into)
    return into == expected


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_a_restore_gives_back_what_was_saved(kind: type[Peer], tmp_path: Path) -> None:
    with installed(tmp_path, [kind]) as found:
        if not found:
            pytest.skip(f"{kind.name} is not installed")
        (peer,) = found
        first, second = layers_of(True), layers_of(True)
        peer.open()
        peer.save("first", first)
        peer.save("second", second)
        peer.close()
        peer.open()
        for session, expected in (("second", second), ("first", first)):
            into = layers_of(False)
            peer.restore(session, into)
            assert into == expected
        peer.remove("first")
        into = layers_of(False)
        peer.restore("second", into)
        assert into == second
        assert not was_restored(peer, "first", layers_of(False), first)


def test_a_peer_whose_package_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with installed(tmp_path, [Files, Lmdb]) as found:
        assert [type(peer) for peer in found] == [Files]
    assert "LMDB is left out" in capsys.readouterr().out
