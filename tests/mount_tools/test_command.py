"""The command as a whole: help, version, usage, sizes."""

from __future__ import annotations

import pytest
import typer

import kvfs as package
from mount_tools.common import format_age, format_size, parse_age, parse_size, printable
from tests.support.command import error_line
from tests.support.mounter import kvfs

VERBS = (
    "mkfs", "mount", "umount", "fsck", "ls", "stat", "profile", "replay", "monitoring", "top",
    "heatmap", "doctor", "plan", "bench", "send", "receive", "export", "import",
)  # fmt: skip


def test_the_version_is_that_of_the_package() -> None:
    assert kvfs("--version").stdout == f"kvfs {package.__version__}\n"


def test_help_names_the_verbs() -> None:
    output = kvfs("--help").stdout
    assert all(f"  {verb} " in output for verb in VERBS)
    assert kvfs().stdout == output


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_has_examples(verb: str) -> None:
    _, examples = kvfs(verb, "--help").stdout.split("Examples:\n")
    assert f"kvfs {verb}" in examples.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("format",), "No such command 'format'"),
        (("mkfs",), "Missing argument 'DEV'"),
        (("mkfs", "x", "--size", "4X"), "'4X' is not a size"),
        (("mount", "/mnt", "x", "-o", "fast"), "-o fast is not known; known are ro, rw"),
        (("umount", "--fast", "/mnt"), "No such option: --fast"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(
    arguments: tuple[str, ...], message: str
) -> None:
    assert message in error_line(kvfs(*arguments, check=False), status=2)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("64K", 64 * 1024),
        ("1.5G", 3 * 512 * 1024**2),
        ("2 GiB", 2 * 1024**3),
        ("512mb", 512 * 1024**2),
        ("1T", 1024**4),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "4 G B", "1e9", "0x10"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a size"):
        parse_size(text)


def test_sizes_are_shown() -> None:
    sizes = (0, 1023, 1024, 1536 * 1024, 4 * 1024**3)
    assert [format_size(size) for size in sizes] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 MiB",
        "4.0 GiB",
    ]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("30s", 30), ("15m", 900), ("1.5h", 5400), ("7D", 604_800)]
)
def test_ages_are_read(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1h", "1y", "1 h 2 m"])
def test_what_is_no_age_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a time"):
        parse_age(text)


def test_ages_are_shown_in_one_unit() -> None:
    ages = (0, 0.9, 59, 61, 7199, 86_399, 10**6)
    assert [format_age(age) for age in ages] == ["0s", "0s", "59s", "1m", "1h", "23h", "11d"]


def test_names_cannot_drive_the_terminal() -> None:
    assert printable("é \x1b[31m\udcff\n") == "é \\x1b[31m\\udcff\\n"
