"""Make the manual pages, docs/man/, from the help of the command and its verbs.

    python scripts/make_man.py [--directory docs/man]        (make man)

The help is put into reStructuredText, of which docutils makes roff. Commit what it makes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from docutils.core import publish_string

import kvfs
from mount_tools.main import app
from mount_tools.mount_helper import app as mount_helper

DIRECTORY = Path(__file__).parents[1] / "docs" / "man"
# What the help sets in lines of its own begins with this mark.
_AS_IT_IS = "\b"
_TYPE = re.compile(r" <\w+>$")
_MARKUP = re.compile(r"([*`|_\\])")


def pages() -> dict[str, str]:
    """Names of the files and their roff."""
    group: Any = typer.main.get_command(app)
    helper: Any = typer.main.get_command(mount_helper)
    made = {"man1/kvfs.1": _page("kvfs", 1, group, _verbs(group))}
    for name, verb in group.commands.items():
        made[f"man1/kvfs-{name}.1"] = _page(f"kvfs {name}", 1, verb, [])
    made["man8/mount.kvfs.8"] = _page("mount.kvfs", 8, helper, [])
    return made


def _page(name: str, section: int, command: Any, more: list[str]) -> str:
    title = name.replace(" ", "-")
    summary, *paragraphs = (command.help or "").split("\n\n")
    short, _, rest = summary.replace("\n", " ").partition(". ")
    lines = [
        *_heading(title, "="),
        *_heading(_escaped(short.rstrip(".")), "~"),
        f":Manual section: {section}",
        f":Version: KVFS {kvfs.__version__}",
        "",
        *_heading("SYNOPSIS"),
        *_as_it_is(_usage(name, command)),
    ]
    if rest or any(not _is_examples(paragraph) for paragraph in paragraphs):
        lines += [*_heading("DESCRIPTION"), _escaped(rest), ""]
        for paragraph in paragraphs:
            if not _is_examples(paragraph):
                lines += _paragraph(paragraph)
    lines += [*_options(command), *more]
    for paragraph in filter(_is_examples, paragraphs):
        lines += [*_heading("EXAMPLES"), *_as_it_is(paragraph.partition("Examples:\n")[2])]
    settings = {"report_level": 2, "halt_level": 2, "output_encoding": "unicode"}
    source = "\n".join(lines)
    return str(publish_string(source, writer="manpage", settings_overrides=settings))


def _usage(name: str, command: Any) -> str:
    context = _context(name, command)
    return f"{name} {' '.join(command.collect_usage_pieces(context))}"


def _context(name: str, command: Any) -> Any:
    settings = {"help_option_names": ["-h", "--help"]}
    return command.make_context(name, [], resilient_parsing=True, **settings)


def _options(command: Any) -> Iterator[str]:
    context = _context("kvfs", command)
    records = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    yield from _heading("OPTIONS")
    for names, text in filter(None, records):
        yield from (f"**{_escaped(_TYPE.sub('', names))}**", f"    {_escaped(text) or '..'}", "")


def _verbs(group: Any) -> list[str]:
    lines = _heading("COMMANDS")
    for name, verb in group.commands.items():
        summary = (verb.help or "").partition("\n\n")[0].replace("\n", " ")
        lines += [f"**kvfs-{name}**\\(1)", f"    {_escaped(summary)}", ""]
    return lines


def _is_examples(paragraph: str) -> bool:
    return paragraph.startswith(f"{_AS_IT_IS}\nExamples:")


def _paragraph(paragraph: str) -> list[str]:
    if paragraph.startswith(_AS_IT_IS):
        return _as_it_is(paragraph.removeprefix(f"{_AS_IT_IS}\n"))
    return [_escaped(paragraph), ""]


def _heading(text: str, line: str = "-") -> list[str]:
    return [text, line * len(text), ""]


def _as_it_is(text: str) -> list[str]:
    return ["::", "", *(f"    {line.strip()}" for line in text.splitlines()), ""]


def _escaped(text: str) -> str:
    return _MARKUP.sub(r"\\\1", text)


def main(
    directory: Annotated[Path, typer.Option(help="Where the pages go.")] = DIRECTORY,
) -> None:
    for name, roff in pages().items():
        page = directory / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(roff)
        print(page)


if __name__ == "__main__":
    typer.run(main)
