"""Questions about past rounds, answered by bringing in the round that each is about.

    python scripts/recall.py [--dir DIR] [--json FILE]

A small model (SmolLM2-135M-Instruct) holds three conversations whose KV lies in a mounted
KVFS image: one about twelve different matters, and the two incidents of the demo, in which
each round is about the same matter as the one before. Each round gets its summary, made by
all-MiniLM-L6-v2. Then the image is unmounted and mounted, so that all KV is cold, and
questions are asked: the index names a round, and only the rows of its tokens are read. What
that takes from the device is compared with reading the whole session. A question that
finds another round than it is about pays for both: the wrong round and the whole session.
"""

from __future__ import annotations

import argparse
import io
import json
import mmap
import os
import sys
from collections.abc import Iterable
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import psutil
import torch
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfs.torch import KVFSCache
from kvfs.torch.minilm import MiniLM
from kvfs.torch.summary import Encoder, SummaryIndex, project
from scripts.demo import (
    TEXTS,
    Conversation,
    DemoError,
    Message,
    Mount,
    console,
    drop_page_cache,
    fresh_mount,
    generate,
    load_model,
    progress,
    read_script,
    work_directory,
)

SUBJECTS = {"different matters": ("topics",), "one matter each": ("agent-1", "agent-2")}
SESSIONS = tuple(name for names in SUBJECTS.values() for name in names)


@dataclass(frozen=True)
class Question:
    """A question, and the round that it is about."""

    session: str
    round: int
    text: str


@dataclass(frozen=True)
class Asked:
    """What one question cost, in bytes: rows of the round found and of the whole session, and
    what the daemon read from the device for each."""

    question: Question
    hit: bool
    hit_of_three: bool
    round_bytes: int
    session_bytes: int
    round_device_bytes: int
    session_device_bytes: int


def read_questions() -> list[Question]:
    """A line each: session, round, text."""
    lines = (TEXTS / "questions.txt").read_text().splitlines()
    return [
        Question(session, int(round), text)
        for session, round, text in (line.split(" ", 2) for line in lines)
    ]


def text_of(turn: Iterable[Message]) -> str:
    """What the user and the tools said in a round; a model this small adds little to it."""
    return "\n".join(message.content for message in turn if message.role != "system")


def remember(
    session: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    encoder: Encoder,
    mount: Mount,
) -> None:
    """Hold a conversation, and give each of its rounds a summary."""
    conversation = Conversation(tokenizer)
    turns = read_script(session)
    with (
        KVFSCache.open(mount.point, session, model) as kv,
        progress(session, len(turns)) as advance,
    ):
        for number, turn in enumerate(turns):
            conversation.ask(turn)
            answer = generate(model, conversation.ids, kv)
            conversation.answered(answer)
            kv.end_round()
            kv.summary.put(number, project(encoder(text_of(turn))))
            advance()


@dataclass(frozen=True)
class Rows:
    """The tokens of a round, or of a session, in all layers of a session."""

    session: Path
    first: int
    last: int

    @classmethod
    def of_round(cls, session: Path, round: int) -> Rows:
        """Of one round."""
        first, last = list(pairwise([0, *_description(session)["rounds"]]))[round]
        return cls(session, first, last)

    @classmethod
    def of_all(cls, session: Path) -> Rows:
        """Of all rounds."""
        return cls(session, 0, _description(session)["rounds"][-1])

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum((self.last - self.first) * width for width in self._widths())

    def read(self) -> None:
        """Bring them in, past the page cache."""
        widest = max(self._widths()) * (self.last - self.first) + 2 * mmap.PAGESIZE
        memory = memoryview(mmap.mmap(-1, widest))
        for number, width in enumerate(self._widths()):
            start = self.first * width // mmap.PAGESIZE * mmap.PAGESIZE
            request = -(-(self.last * width - start) // mmap.PAGESIZE) * mmap.PAGESIZE
            fd = os.open(self.session / f"layer.{number:03d}", os.O_RDONLY | os.O_DIRECT)
            try:
                got = os.preadv(fd, [memory[:request]], start)
            finally:
                os.close(fd)
            if start + got < self.last * width:
                raise DemoError(f"layer {number} of {self.session} ends early")

    def _widths(self) -> list[int]:
        """Bytes of a row, by layer."""
        sizes = {"bfloat16": 2, "float16": 2, "float32": 4}
        return [
            sizes[layer["dtype"]] * layer["shape"][0] * layer["shape"][1] * layer["shape"][2]
            for layer in _description(self.session)["layers"]
        ]


def _description(session: Path) -> dict[str, list]:
    content: dict[str, list] = json.loads((session / "session.json").read_bytes())
    return content


def read_cold(mount: Mount, rows: Rows) -> int:
    """Read them when nothing is in memory; the bytes that the daemon took from the device."""
    mount.unmount()
    drop_page_cache()
    mount.mount()
    daemon = psutil.Process(int(mount.stats()["pid"]))
    before = daemon.io_counters().read_bytes
    rows.read()
    return int(daemon.io_counters().read_bytes - before)


def ask(questions: list[Question], encoder: Encoder, mount: Mount) -> list[Asked]:
    """Search, and read what was found."""
    index = SummaryIndex(mount.point)
    whole = {name: Rows.of_all(mount.point / name) for name in SESSIONS}
    whole_bytes = {name: rows.nbytes for name, rows in whole.items()}
    device_bytes = cache(lambda rows: read_cold(mount, rows))
    asked = []
    with progress("questions, all cold", len(questions)) as advance:
        for question in questions:
            found = index.search(project(encoder(question.text)), 3)
            places = [(match.session, match.round) for match in found]
            wanted = (question.session, question.round)
            rows = Rows.of_round(mount.point / found[0].session, found[0].round)
            asked.append(
                Asked(
                    question,
                    hit=places[0] == wanted,
                    hit_of_three=wanted in places,
                    round_bytes=rows.nbytes,
                    session_bytes=whole_bytes[question.session],
                    round_device_bytes=device_bytes(rows),
                    session_device_bytes=device_bytes(whole[question.session]),
                )
            )
            advance()
    return asked


@dataclass(frozen=True)
class Row:
    """The table's row for one kind of conversation; shares of the bytes of whole sessions."""

    conversations: str
    questions: int
    hit_at_1: float
    hit_at_3: float
    saved_if_right: float
    saved: float
    saved_device: float


def summarise(kind: str, asked: list[Asked]) -> Row:
    """Means over the questions about one kind of conversation."""
    mine = [one for one in asked if one.question.session in SUBJECTS[kind]]
    right = [one for one in mine if one.hit]
    whole = sum(one.session_bytes for one in mine)
    whole_device = sum(one.session_device_bytes for one in mine)
    in_vain = [one for one in mine if not one.hit]
    return Row(
        kind,
        len(mine),
        hit_at_1=len(right) / len(mine),
        hit_at_3=sum(one.hit_of_three for one in mine) / len(mine),
        saved_if_right=1 - sum(o.round_bytes for o in right) / sum(o.session_bytes for o in right),
        saved=1
        - (sum(o.round_bytes for o in mine) + sum(o.session_bytes for o in in_vain)) / whole,
        saved_device=1
        - (sum(o.round_device_bytes for o in mine) + sum(o.session_device_bytes for o in in_vain))
        / whole_device,
    )


def show(rows: list[Row]) -> None:
    """The table."""
    table = Table(title="cold reads saved by bringing in the round found instead of the session")
    table.add_column("conversation")
    headings = ("questions", "hit@1", "hit@3", "saved, if right", "saved", "of device reads")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        shares = (row.hit_at_1, row.hit_at_3, row.saved_if_right, row.saved, row.saved_device)
        table.add_row(row.conversations, str(row.questions), *(f"{share:.0%}" for share in shares))
    console.print(table)


def recall(directory: Path) -> list[Row]:
    """The whole, in `directory`."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    with console.status("loading the models"):
        model, tokenizer = load_model()
        with redirect_stderr(io.StringIO()):
            encoder = MiniLM()
    with fresh_mount(directory) as mount:
        for session in SESSIONS:
            remember(session, model, tokenizer, encoder, mount)
        asked = ask(read_questions(), encoder, mount)
    return [summarise(kind, asked) for kind in SUBJECTS]


def main() -> int:
    """Exit code 0 if the table could be made."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dir", type=Path, help="put the image and the mountpoint below DIR")
    parser.add_argument("--json", type=Path, help="write the table's rows to this file too")
    options = parser.parse_args()
    try:
        with work_directory(options.dir, keep=False) as directory:
            rows = recall(directory)
    except (DemoError, OSError, ModuleNotFoundError) as error:
        console.print(f"recall: {error}", style="red", markup=False, highlight=False)
        return 1
    show(rows)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
