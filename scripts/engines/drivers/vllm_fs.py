"""vLLM with tiers of KV, the second of them files: vllm_fs.py DIR"""

from __future__ import annotations

import sys

from serving import Outcome, serve
from vllm_model import Served

# isort: split
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

FIRST_TIER_BYTES = 64 << 20


class Transfers:
    """What the tier itself says of its finished jobs."""

    def __init__(self) -> None:
        self.seconds, self.bytes = 0.0, 0
        finished = FileSystemTierManager.get_finished_jobs

        def observed(tier: FileSystemTierManager):
            results = list(finished(tier))
            for result in results:
                self.seconds += result.transfer_time or 0.0
                self.bytes += result.transfer_bytes or 0
            return results

        FileSystemTierManager.get_finished_jobs = observed


def main() -> None:
    transfers = Transfers()
    served = Served(
        "OffloadingConnector",
        spec_name="TieringOnCpu",
        spec_module_path="vllm_copies",
        cpu_bytes_to_use=FIRST_TIER_BYTES,
        secondary_tiers=[{"type": "fs", "root_dir": sys.argv[1]}],
    )

    def answer() -> Outcome:
        transfers.seconds, transfers.bytes = 0.0, 0
        hits, digest = served.answer()
        return Outcome(transfers.seconds, transfers.bytes, hits, digest)

    serve(answer, answer)


main()
