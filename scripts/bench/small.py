"""Row 3: sessions of 32 layers of 128 to 256 KiB are restored cold in random order, through
the mount with O_DIRECT, beside the raw disk and peers that store layers apart."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from random import Random

from scripts.bench.disk import drop_caches, fio, preadv, read_ahead_kib, timed, write_limit
from scripts.bench.mount import fresh_mount
from scripts.bench.peers import ALL, DirectFiles, Peer, installed
from scripts.bench.plan import Plan, shuffled
from scripts.bench.rows import Row, Series, fastest, speed_row
from scripts.bench.sessions import BLOCK, Source, Target, verify

LAYERS = 32
LAYER_SIZE_MIN, LAYER_SIZE_MAX = 128 * 1024, 256 * 1024
SEED = 3


def measure(plan: Plan) -> list[Row]:
    draw = Random(SEED)
    sizes = [_layer_sizes(draw) for _ in range(plan.pick(500, 60))]
    # A dozen peers with all of it would take more of the disk than there may be.
    peer_sizes = sizes[: plan.pick(100, 20)]
    source, target = Source(), Target(LAYERS, LAYER_SIZE_MAX)
    raw = plan.directory / "raw"
    total = sum(map(sum, sizes))
    write_limit(raw, total)
    starts = list(itertools.accumulate(map(sum, sizes), initial=0))
    speeds: dict[str, list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        # All of them are dirty at first, and go down together.
        ring, warm = f"{plan.pick(6, 2)}G", f"{plan.pick(4, 1)}G"
        mount = stack.enter_context(fresh_mount(plan.directory, ring, "--warm", warm))
        ours = Restores(DirectFiles(mount.point), sizes, source, target)
        kinds = [kind for kind in ALL if kind.stores_layers_apart]
        peers = stack.enter_context(installed(plan.directory / "peers", kinds))
        others = [Restores(peer, peer_sizes, source, target) for peer in peers]
        for restores in (ours, *others):
            restores.save()
        block = total // len(sizes) // BLOCK * BLOCK

        def read_raw(order: Sequence[int]) -> float:
            spans = [(starts[session], sum(sizes[session])) for session in order]
            return max(preadv(raw, spans), fio(raw, "randread", total, block=block))

        def restore_ours(order: Sequence[int], is_checked: bool) -> float:
            mount.make_cold(*(mount.point / str(session) for session in order))
            return ours.in_order(order, is_checked=is_checked)

        for number in range(plan.rounds + 1):
            is_checked = number == 0
            order = draw.sample(range(len(sizes)), len(sizes))
            part = [session for session in order if session < len(peer_sizes)]
            works: dict[str, Callable[[], float]] = {
                "raw": functools.partial(read_raw, order),
                "ours": functools.partial(restore_ours, order, is_checked),
            } | {
                peer.name: functools.partial(restores.in_order, part, is_checked=is_checked)
                for peer, restores in zip(peers, others, strict=True)
            }
            for name, work in shuffled(works, number):
                speeds[name].append(work())
    counted = {name: Series(name, values[1:]) for name, values in speeds.items()}
    best = fastest(counted[peer.name] for peer in peers if peer.is_buffered)
    title = f"restore {len(sizes)} sessions of 32 x 128-256 KiB, random order, cold, O_DIRECT"
    return [
        speed_row("3a", title, 0.85, counted["ours"], counted["raw"]),
        speed_row(
            "3b", title, 1.5, counted["ours"], best,
            peers=[counted[peer.name] for peer in peers],
            remark=f"peers hold {len(peer_sizes)} of the sessions; read-ahead of their disk: "
            f"{read_ahead_kib(plan.directory)} KiB",
        ),
    ]  # fmt: skip


class Restores:
    """Sessions of these sizes, by number, in a peer."""

    def __init__(
        self, peer: Peer, sizes: Sequence[Sequence[int]], source: Source, target: Target
    ) -> None:
        self.peer, self.sizes, self.source, self.target = peer, sizes, source, target

    def save(self) -> None:
        self.peer.open()
        for number, sizes in enumerate(self.sizes):
            self.peer.save(str(number), self.source.session(number, sizes))

    def in_order(self, order: Sequence[int], *, is_checked: bool) -> float:
        """MB/s over all. The bytes of the last one are compared, or of each one, which takes
        time that the peer may use."""
        self.peer.close()
        drop_caches()
        seconds = timed(self.peer.open)
        for run in [[number] for number in order] if is_checked else [order]:
            self.target.clear()
            seconds += timed(functools.partial(self._restore, run))
            self._verify(run[-1])
        return sum(sum(self.sizes[number]) for number in order) / seconds / 1e6

    def _restore(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.peer.restore(str(number), self.target.shaped(self.sizes[number]))

    def _verify(self, number: int) -> None:
        sizes = self.sizes[number]
        verify(self.target.shaped(sizes), self.source.session(number, sizes))


def _layer_sizes(draw: Random) -> list[int]:
    blocks = range(LAYER_SIZE_MIN // BLOCK, LAYER_SIZE_MAX // BLOCK + 1)
    return [draw.choice(blocks) * BLOCK for _ in range(LAYERS)]
