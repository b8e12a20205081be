"""vLLM with its ExampleConnector, which keeps a file a layer in a directory a prompt:
vllm_example.py DIR"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving import Outcome, serve
from vllm_model import Served

# isort: split
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class Stopwatch:
    """What the connector takes; the rest of an answer is the model's."""

    seconds = 0.0

    def of(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


def main() -> None:
    place = Path(sys.argv[1])
    saving, loading = Stopwatch(), Stopwatch()
    ExampleConnector.save_kv_layer = saving.of(ExampleConnector.save_kv_layer)
    ExampleConnector.start_load_kv = loading.of(ExampleConnector.start_load_kv)
    served = Served("ExampleConnector", shared_storage_path=str(place))

    def answer(watch: Stopwatch) -> Outcome:
        watch.seconds = 0.0
        hits, digest = served.answer()
        files = place.rglob("*.safetensors")
        return Outcome(watch.seconds, sum(file.stat().st_size for file in files), hits, digest)

    serve(lambda: answer(saving), lambda: answer(loading))


main()
