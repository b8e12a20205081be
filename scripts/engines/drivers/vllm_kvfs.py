"""vLLM with KVFS's own connector: vllm_kvfs.py DIR"""

from __future__ import annotations

import sys
from pathlib import Path

from serving import Outcome, serve
from stopwatch import Stopwatch
from vllm_model import Served

# isort: split
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvfs.vllm import KVFSConnector

_SAVING = ("wait_for_save", "save_kv_layer")
_LOADING = ("get_num_new_matched_tokens", "start_load_kv", "wait_for_layer_load", "wait_for_save")


def main() -> None:
    place = Path(sys.argv[1])
    saving, loading = Stopwatch(), Stopwatch()
    for stopwatch, methods in ((saving, _SAVING), (loading, _LOADING)):
        for method in methods:
            setattr(KVFSConnector, method, stopwatch.of(getattr(KVFSConnector, method)))
    served = Served("KVFSConnector", module="kvfs.vllm", path=str(place))
    # What is written in the background counts too.
    flush = saving.of(get_kv_transfer_group().flush)

    def answer(watch: Stopwatch) -> Outcome:
        watch.seconds = 0.0
        hits, digest = served.answer()
        flush()
        files = place.rglob("layer.*")
        return Outcome(watch.seconds, sum(file.stat().st_size for file in files), hits, digest)

    serve(lambda: answer(saving), lambda: answer(loading))


main()
