"""A mount's handlers without a kernel: a store on a ring in memory, asked by bytes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvfs.engine.io import Completion, InlineExecutor, Step, run
from kvfs.engine.store import Store
from kvfs.mount.attach import Connection
from kvfs.mount.config import MountConfig
from kvfs.mount.control import Mounted
from kvfs.mount.fuse import Filesystem
from kvfs.mount.loop import Loop
from kvfs.mount.protocol import ANSWER, REQUEST, UNANSWERED
from kvfs.mount.scrubbing import Scrubbing, ScrubOptions
from kvfs.mount.session import Session
from kvfs.tiers.budget import Budget
from kvfs.tiers.migrate import Migration
from kvfs.tiers.planner import Planner
from kvfs.tiers.predict import Predictor
from kvfs.tiers.prefetch import LookAhead
from kvfs.tiers.sessions import WarmSessions
from kvfs.tiers.uses import Uses
from kvfs.tiers.warm import WarmTier
from tests.fuzz.rings import MIB, OPTIONS, base
from tests.support.devices import MemoryDevice

_DEADLINE_SECONDS = 5.0


class Asked:
    """A session whose kernel is a socket."""

    def __init__(self, directory: Path) -> None:
        executor = InlineExecutor()
        warm = WarmTier(directory / "warm", 64 * MIB, executor)
        store = Store.open(MemoryDevice(bytearray(base())), "ring", executor, warm, OPTIONS)
        self.store = store
        migration = Migration(store, warm, executor)
        planner = Planner(
            WarmSessions(migration), Predictor(), Budget(), 10, _spawn, lambda: False, lambda: 0
        )
        config = MountConfig(directory, directory, store=replace(OPTIONS))
        uses = Uses(warm.policy, warm.clock)
        mounted = Mounted(store, migration, planner, uses, config, False, False)
        filesystem = Filesystem(
            store, LookAhead(store, MIB), migration, planner, uses,
            Scrubbing(store, ScrubOptions(every_seconds=0), lambda: False), mounted, _aside,
        )  # fmt: skip
        self._kernel, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._kernel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MIB)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MIB)
        ours.setblocking(False)
        self._kernel.setblocking(False)
        connection = Connection(ours.detach(), directory)
        self.session = Session(connection, filesystem, Loop(), _DEADLINE_SECONDS)
        self.inodes = self._known()

    def _known(self) -> list[int]:
        """Some of each kind."""
        found = [1, 2, 3, 4, 5, 6, 7]
        for path in ("session", "session/layer.none", "kinds", "kinds/linked", "kinds/short link"):
            ino = 1
            for name in path.split("/"):
                ino = run(self.store.lookup(ino, name.encode())).inode.ino
            found.append(ino)
        return found

    def ask(self, request: bytes) -> bytes | None:
        """The answer; None where there is none, which only some requests may have."""
        self._kernel.send(request)
        self.session._receive()
        try:
            answer = self._kernel.recv(4 * MIB)
        except BlockingIOError:
            answer = None
        _, opcode, unique, *_ = REQUEST.unpack_from(request)
        if opcode in UNANSWERED:
            assert answer is None, f"request {opcode} wants no answer"
            return None
        assert answer is not None, f"request {opcode} has no answer"
        length, error, answered = ANSWER.unpack_from(answer)
        assert answered == unique and length == len(answer) and -4096 < error <= 0
        return answer


def _spawn(step: Step[None]) -> Completion[None]:
    run(step)
    done: Completion[None] = Completion()
    done.finish()
    return done


def _aside(work: Callable[[], Any]) -> Completion[None]:
    work()
    done: Completion[None] = Completion()
    done.finish()
    return done


def request(opcode: int, inode: int, body: bytes, uid: int = 0) -> bytes:
    head = REQUEST.pack(REQUEST.size + len(body), opcode, 77, inode, uid, uid, os.getpid(), 0)
    return head + body
