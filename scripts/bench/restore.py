"""Row 1: a session of 30 layers x 8 MiB is restored cold by one reader, through the mount with
O_DIRECT and with plain reads (the daemon sets the read-ahead of its bdi to 4 MiB), beside
the raw disk and what else one would keep a session in."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable

from scripts.bench.disk import MIB, drop_caches, read_ahead_kib, read_limit, timed, write_limit
from scripts.bench.mount import fresh_mount
from scripts.bench.peers import DirectFiles, Files, Peer, installed
from scripts.bench.plan import Plan, shuffled
from scripts.bench.rows import Row, Series, fastest, speed_row
from scripts.bench.sessions import Source, Target, verify

LAYERS = 30
LAYER_SIZE = 8 * MIB
SIZE = LAYERS * LAYER_SIZE
NAME = "session"


def measure(plan: Plan) -> list[Row]:
    expected = Source().session(0, [LAYER_SIZE] * LAYERS)
    target = Target(LAYERS, LAYER_SIZE)
    raw = plan.directory / "raw"
    write_limit(raw, SIZE)
    speeds: dict[str, list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        mount = stack.enter_context(fresh_mount(plan.directory, "2G"))
        direct, plain = DirectFiles(mount.point), Files(mount.point)
        peers = stack.enter_context(installed(plan.directory / "peers"))
        direct.save(NAME, expected)
        for peer in peers:
            peer.open()
            peer.save(NAME, expected)

        def restore(peer: Peer) -> float:
            """MB/s of a restore into memory that had nothing of it."""
            target.clear()
            peer.close()
            drop_caches()
            into = target.shaped([LAYER_SIZE] * LAYERS)
            seconds = timed(lambda: (peer.open(), peer.restore(NAME, into)))
            verify(into, expected)
            return SIZE / seconds / 1e6

        def restore_ours(peer: Peer) -> float:
            mount.make_cold(mount.point / NAME)
            return restore(peer)

        works: dict[str, Callable[[], float]] = {
            "raw": lambda: read_limit(raw, SIZE),
            "direct": lambda: restore_ours(direct),
            "plain": lambda: restore_ours(plain),
        } | {peer.name: functools.partial(restore, peer) for peer in peers}
        for number in range(plan.rounds + 1):
            for name, work in shuffled(works, number):
                speeds[name].append(work())
    counted = {name: Series(name, values[1:]) for name, values in speeds.items()}
    others = [counted[peer.name] for peer in peers]
    best = fastest(
        counted[peer.name] for peer in peers if peer.stores_layers_apart and peer.is_buffered
    )
    remark = f"read-ahead of the peers' disk: {read_ahead_kib(plan.directory)} KiB"
    title = f"restore {LAYERS} x 8 MiB, cold, one reader"
    sides = (f"{title}, O_DIRECT", counted["direct"]), (f"{title}, plain reads", counted["plain"])
    return [
        speed_row("1a", sides[0][0], 0.9, sides[0][1], counted["raw"]),
        speed_row("1b", sides[1][0], 0.6, sides[1][1], counted["raw"]),
        speed_row("1c", sides[1][0], 1.5, sides[1][1], best, peers=others, remark=remark),
        speed_row("1d", sides[0][0], 1.5, sides[0][1], best, peers=others, remark=remark),
    ]
