"""`user.kvfs.extents` of long files: a page costs what it holds, not what the file has."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

from kvfs.engine.files import Part
from kvfs.engine.io import Step, run
from kvfs.engine.store import Store
from kvfs.mount import control
from tests.engine.kit import Bench, new_device

COUNT, STRIDE = 4000, 256 * 1024


def test_a_page_does_not_look_at_the_whole_rest_of_the_file(tmp_path: Path) -> None:
    bench = Bench(tmp_path, new_device(segments=32))
    ino = bench.make(b"f")
    for number in range(COUNT):
        bench.write(ino, b"x", number * STRIDE)
    run(bench.store.sync())
    looked_at: list[int] = []
    parts = Store.parts

    def counted(self: Store, ino: int, offset: int, length: int) -> Step[list[Part]]:
        found = yield from parts(self, ino, offset, length)
        looked_at.append(len(found))
        return found

    with patch.object(Store, "parts", counted):
        page = json.loads(run(control._extents(bench.store, ino, 0)))
    assert page[-1]["truncated"]
    assert [extent["offset"] for extent in page[:-1]] == [n * STRIDE for n in range(len(page) - 1)]
    assert sum(looked_at) < 4 * len(page) < COUNT
