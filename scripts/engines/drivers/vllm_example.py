"""vLLM with its ExampleConnector, which keeps a file a layer in a directory a prompt:
vllm_example.py DIR"""

from __future__ import annotations

import sys
from pathlib import Path

from serving import Outcome, serve
from stopwatch import Stopwatch
from vllm_model import Served

# isort: split
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


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
