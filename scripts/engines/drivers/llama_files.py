"""llama.cpp through its Python binding, a file a prompt: llama_files.py DIR states|sequences

states: `Llama.save_state`, pickled as the binding's own cache does it.
sequences: `llama_state_seq_save_file`, what the server saves its slots with.
"""

from __future__ import annotations

import ctypes
import hashlib
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path

import llama_cpp
from llama_cpp import Llama
from real_text import prompts
from serving import Outcome, serve
from smollm2 import gguf

CONTEXT_TOKENS = 2048
BATCH_TOKENS = 64  # a state holds as many rows of logits
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 4, 256, 4

Save = Callable[[Llama, Path], None]
Restore = Callable[[Llama, Path], None]


def save_state(model: Llama, file: Path) -> None:
    """What is cut off when it is half written is seen when it is read: no name of its own."""
    with file.open("wb") as out:
        pickle.dump(model.save_state(), out, protocol=5)


def restore_state(model: Llama, file: Path) -> None:
    with file.open("rb") as stored:
        model.load_state(pickle.load(stored))


def save_sequence(model: Llama, file: Path) -> None:
    tokens = model.input_ids[: model.n_tokens].tolist()
    array = (llama_cpp.llama_token * len(tokens))(*tokens)
    if not llama_cpp.llama_state_seq_save_file(
        model.ctx, str(file).encode(), 0, array, len(tokens)
    ):
        raise OSError(f"llama_state_seq_save_file: {file}")


def restore_sequence(model: Llama, file: Path) -> None:
    """The binding keeps the tokens itself."""
    array = (llama_cpp.llama_token * CONTEXT_TOKENS)()
    count = ctypes.c_size_t()
    if not llama_cpp.llama_state_seq_load_file(
        model.ctx, str(file).encode(), 0, array, CONTEXT_TOKENS, ctypes.byref(count)
    ):
        raise FileNotFoundError(f"llama_state_seq_load_file: {file}")
    model.n_tokens = count.value
    model.input_ids[: count.value] = array[: count.value]


WAYS: dict[str, tuple[Save, Restore]] = {
    "states": (save_state, restore_state),
    "sequences": (save_sequence, restore_sequence),
}


class Served:
    def __init__(self, place: Path, save: Save, restore: Restore) -> None:
        self._place, self._save, self._restore = place, save, restore
        # More threads wait for each other in loops: on a busy machine, for ever.
        self._model = Llama(
            str(gguf()),
            n_ctx=CONTEXT_TOKENS,
            n_batch=BATCH_TOKENS,
            n_threads=1,
            n_threads_batch=1,
            verbose=False,
        )
        self._prompts = prompts(
            lambda text: self._model.tokenize(text.encode()), PROMPTS, PROMPT_TOKENS
        )

    def answer(self, *, is_storing: bool) -> Outcome:
        """The last token of a prompt is computed alone, found or not: the answers are the same."""
        seconds, hits, answers = 0.0, 0, hashlib.blake2b(digest_size=16)
        for number, prompt in enumerate(self._prompts):
            file = self._place / f"{number}.bin"
            self._model.reset()
            started = time.perf_counter()
            if is_storing:
                self._model.eval(prompt[:-1])
                started = time.perf_counter()
                self._save(self._model, file)
                seconds += time.perf_counter() - started
            else:
                try:
                    self._restore(self._model, file)
                    seconds += time.perf_counter() - started
                    hits += 1
                except FileNotFoundError:
                    self._model.eval(prompt[:-1])
            if self._model.input_ids[: self._model.n_tokens].tolist() != prompt[:-1]:
                raise RuntimeError(f"{file} holds another prompt")
            answers.update(str(self._continue(prompt[-1])).encode())
        size = sum(file.stat().st_size for file in self._place.iterdir())
        return Outcome(seconds, size, hits, answers.hexdigest())

    def _continue(self, token: int) -> list[int]:
        answer = []
        for _ in range(ANSWER_TOKENS):
            self._model.eval([token])
            token = self._model.sample(temp=0.0)
            answer.append(token)
        return answer


def main() -> None:
    served = Served(Path(sys.argv[1]), *WAYS[sys.argv[2]])
    serve(lambda: served.answer(is_storing=True), lambda: served.answer(is_storing=False))


main()
