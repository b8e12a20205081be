"""What the control groups of a process allow, as the kernel's files tell it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfs.mount.memory import cgroup_limit

GIB = 1024**3
V1_NO_LIMIT = "9223372036854771712\n"


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        # A systemd service: its own group has the limit, the topmost has no such file.
        ("0::/system.slice/kvfs.service", {"system.slice/kvfs.service/memory.max": 8 * GIB}, 8),
        # The slice above it allows less.
        (
            "0::/kv.slice/kvfs.service",
            {"kv.slice/kvfs.service/memory.max": "max", "kv.slice/memory.max": 4 * GIB},
            4,
        ),
        # A container with a namespace of its own.
        ("0::/", {"memory.max": 2 * GIB}, 2),
        # One without: the path is the host's, and its own group is mounted as the topmost.
        ("4:memory:/docker/f00d", {"memory/memory.limit_in_bytes": 3 * GIB}, 3),
        (
            "9:name=systemd:/\n4:cpu,memory:/a:b\n0::/",
            {
                "memory/memory.limit_in_bytes": V1_NO_LIMIT,
                "memory/a:b/memory.limit_in_bytes": GIB,
            },
            1,
        ),
        ("4:memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": V1_NO_LIMIT}, None),
        ("0::/a", {"a/memory.max": "max\n"}, None),
        ("", {}, None),
    ],
)
def test_the_least_limit_of_a_group_and_those_above_it_counts(
    tmp_path: Path, groups: str, files: dict[str, object], limit: int | None
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, content in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(content))
    assert cgroup_limit(tmp_path) == (None if limit is None else limit * GIB)


def test_a_machine_that_tells_nothing_has_no_limit(tmp_path: Path) -> None:
    assert cgroup_limit(tmp_path) is None
