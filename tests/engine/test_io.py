"""Completions, steps and worker threads; and a store driven by a real loop of threads."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.engine import ops
from kvfs.engine.device import FileDevice, create_image
from kvfs.engine.format import BLOCK, OPLOG_ALIGN
from kvfs.engine.io import (
    Completion,
    DeadlineExceeded,
    InlineExecutor,
    Step,
    Urgency,
    Work,
    WorkerThreads,
    WorkQueue,
    run,
    together,
    wait,
    wait_all,
)
from kvfs.engine.space import cost
from kvfs.engine.store import Store
from kvfs.engine.superblocks import format_device
from kvfs.tiers import oplog
from kvfs.tiers.oplog import OperationLog
from tests.engine.audit import audit
from tests.engine.kit import FILE, MIB, OPTIONS, new_device, noise
from tests.engine.test_writer import DeferredBench, make_deferred

T = TypeVar("T")


# -- completions and steps -------------------------------------------------------------


def test_steps_that_go_together_wait_at_the_same_time() -> None:
    first: Completion[None] = Completion()
    second: Completion[None] = Completion()
    ended = []

    def waits(name: str, *completions: Completion[None]) -> Step[None]:
        for completion in completions:
            yield from wait(completion)
        ended.append(name)

    step = together([waits("both", first, second), waits("none"), waits("one", second)])
    assert next(step) is first
    assert ended == ["none"]
    second.finish()
    first.finish()
    assert next(step, None) is None
    assert ended == ["none", "both", "one"]


def test_steps_that_go_together_end_with_the_first_that_fails() -> None:
    never: Completion[None] = Completion()
    failed: Completion[None] = Completion()
    waiting = wait(never)
    failed.finish(error=OSError("broken"))
    with pytest.raises(OSError, match="broken"):
        run(together([waiting, wait(failed)]))
    assert next(waiting, None) is None


def test_callbacks_come_once_when_it_is_done() -> None:
    completion: Completion[int] = Completion()
    called: list[str] = []
    completion.when_done(lambda: called.append("before"))
    assert called == []
    completion.finish(7)
    completion.when_done(lambda: called.append("after"))
    assert called == ["before", "after"]
    assert completion.result() == 7


def test_a_completion_raises_what_the_work_raised() -> None:
    completion: Completion[int] = Completion()
    completion.finish(error=ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        completion.result()
    with pytest.raises(ValueError, match="no"):
        run(wait(completion))


def test_waiting_for_all_waits_for_all_before_it_raises() -> None:
    """Buffers of the others are in use until they are done, too."""
    first, second = Completion[int](), Completion[int]()
    step = wait_all([first, second])
    assert next(step) is first
    first.finish(error=ValueError("first"))
    assert next(step) is second
    second.finish(1)
    with pytest.raises(ValueError, match="first"):
        next(step)


def test_a_step_that_waits_for_nothing_is_run_in_place() -> None:
    executor = InlineExecutor()
    assert run(wait(executor.submit(lambda: 5))) == 5
    assert executor.spawn(wait(executor.submit(lambda: 6))).result() == 6
    failed = executor.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        run(wait(failed))


def test_a_step_that_would_wait_for_ever_is_a_fault() -> None:
    with pytest.raises(RuntimeError, match="nobody will finish"):
        run(wait(Completion()))


# -- a loop with threads ---------------------------------------------------------------


class Loop(WorkerThreads):
    """The smallest loop: a queue of what is to be called in this thread."""

    def __init__(self, threads: int) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        super().__init__(threads, self.calls.put)

    def spawn(self, step: Step[T]) -> Completion[T]:
        completion: Completion[T] = Completion()
        self.calls.put(lambda: self._resume(step, completion))
        return completion

    def run(self, step: Step[T]) -> T:
        completion: Completion[T] = Completion()
        self._resume(step, completion)
        while not completion.done:
            self.calls.get(timeout=60)()
        return completion.result()

    def _resume(self, step: Step[Any], completion: Completion[Any]) -> None:
        try:
            waits_for = next(step)
        except StopIteration as stop:
            completion.finish(stop.value)
        except Exception as failure:
            completion.finish(error=failure)
        else:
            waits_for.when_done(lambda: self._resume(step, completion))


def test_work_runs_in_threads_and_is_finished_in_the_loop() -> None:
    loop = Loop(threads=3)
    here = threading.get_ident()
    finished_in: list[int] = []

    def work() -> int:
        return threading.get_ident()

    works = [loop.submit(work) for _ in range(20)]
    for completion in works:
        completion.when_done(lambda: finished_in.append(threading.get_ident()))
    loop.run(wait_all(works))
    assert all(completion.result() != here for completion in works)
    assert set(finished_in) == {here}


def test_a_thread_survives_work_that_fails() -> None:
    loop = Loop(threads=1)
    with pytest.raises(ZeroDivisionError):
        loop.run(wait(loop.submit(lambda: 1 // 0)))
    assert loop.run(wait(loop.submit(lambda: 5))) == 5


def test_a_long_queue_has_no_room_for_what_can_wait() -> None:
    loop, blocked = Loop(threads=1), threading.Event()
    works = [loop.submit(blocked.wait) for _ in range(6)]
    assert not loop.has_room
    blocked.set()
    loop.run(wait_all(works))
    assert loop.has_room


@given(
    demand_max=st.integers(1, 4),
    background_max=st.integers(1, 3),
    moves=st.lists(
        st.one_of(st.sampled_from(Urgency), st.sampled_from(["take", "take", "end", "hasten"]))
    ),
)
def test_what_is_next_is_the_most_urgent(
    demand_max: int, background_max: int, moves: list[Urgency | str]
) -> None:
    queued = WorkQueue(demand_max, background_max)
    waiting: dict[Urgency, list[Completion[Any]]] = {urgency: [] for urgency in Urgency}
    running: list[Work] = []
    passed_over = 0  # turns of demand while write-back waited, since it had one itself
    for move in moves:
        if isinstance(move, Urgency):
            work = Work(move, lambda: None, Completion())
            queued.put(work)
            waiting[move].append(work.completion)
        elif move == "end" and running:
            queued.ended(running.pop())
        elif move == "hasten" and waiting[Urgency.BACKGROUND]:
            hastened = waiting[Urgency.BACKGROUND].pop(len(waiting[Urgency.BACKGROUND]) // 2)
            queued.hasten(hastened)
            waiting[Urgency.DEMAND].append(hastened)
            queued.hasten(Completion())
        elif move == "take":
            taken = queued.take()
            in_background = sum(work.urgency is Urgency.BACKGROUND for work in running)
            reading = sum(work.urgency is Urgency.DEMAND for work in running)
            demand = waiting[Urgency.DEMAND] and reading < demand_max
            if taken is None:
                assert not demand and not waiting[Urgency.WRITE_BACK]
                assert not waiting[Urgency.BACKGROUND] or in_background == background_max
                continue
            first = waiting[taken.urgency].pop(0)
            assert taken.completion is first, "of one kind the first comes first"
            running.append(taken)
            if taken.urgency is Urgency.BACKGROUND:
                assert not demand and not waiting[Urgency.WRITE_BACK]
                assert in_background < background_max
            elif taken.urgency is Urgency.WRITE_BACK:
                assert passed_over == 3 or not demand
                passed_over = 0
            else:
                assert reading < demand_max
            if taken.urgency is Urgency.DEMAND and waiting[Urgency.WRITE_BACK]:
                passed_over += 1
                assert passed_over <= 3, "readers keep write-back from its turn"
        assert queued.urgent == len(waiting[Urgency.DEMAND]) + len(waiting[Urgency.WRITE_BACK])


def test_guesses_leave_half_of_the_threads_to_demand() -> None:
    loop, blocked, running = Loop(threads=4), threading.Event(), threading.Semaphore(0)

    def guess() -> None:
        running.release()
        blocked.wait()

    guesses = [loop.submit(guess, Urgency.BACKGROUND) for _ in range(8)]
    for _ in range(2):
        running.acquire()
    assert loop.has_room, "what waits in the background is in nobody's way"
    assert loop.run(wait(loop.submit(lambda: 5))) == 5
    assert loop.run(wait(loop.submit(lambda: 6, Urgency.WRITE_BACK))) == 6
    assert not running.acquire(blocking=False), "more than half of the threads run guesses"
    blocked.set()
    loop.run(wait_all(guesses))


def test_work_that_never_ends_holds_up_nothing_else() -> None:
    """More of it than there are threads; each ends once it may, and so does its thread."""
    loop, blocked = Loop(threads=5), threading.Event()
    before = threading.active_count()
    stuck = [loop.submit(blocked.wait) for _ in range(30)]
    # Not only readers: there are threads that they cannot take.
    assert loop.run(wait(loop.submit(lambda: 5, Urgency.WRITE_BACK))) == 5
    other = loop.submit(lambda: 6)
    limit = time.monotonic() + 30
    while not other.done:
        assert time.monotonic() < limit, "it waits for what never ends"
        loop.replace_stuck()
        time.sleep(0.02)
        with suppress(queue.Empty):
            loop.calls.get_nowait()()
    blocked.set()
    loop.run(wait_all(stuck))
    while threading.active_count() > before and time.monotonic() < limit:
        time.sleep(0.02)
    assert threading.active_count() == before
    assert loop.run(wait(loop.submit(lambda: 7))) == 7


def test_a_guess_that_somebody_waits_for_goes_at_once() -> None:
    loop, blocked = Loop(threads=2), threading.Event()
    guesses = [loop.submit(blocked.wait, Urgency.BACKGROUND) for _ in range(3)]
    wanted = loop.submit(lambda: 5, Urgency.BACKGROUND)
    loop.hasten(wanted)
    assert loop.run(wait(wanted)) == 5
    blocked.set()
    loop.run(wait_all(guesses))


def test_a_guess_that_fails_gives_its_thread_back() -> None:
    loop = Loop(threads=1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            loop.run(wait(loop.submit(lambda: 1 // 0, Urgency.BACKGROUND)))
    assert loop.run(wait(loop.submit(lambda: 5, Urgency.BACKGROUND))) == 5


def test_a_store_on_threads_and_an_image_file(tmp_path: Path, tmpfs: Path) -> None:
    """Real direct I/O, several threads, a ring that turns; then a kill and a clean end."""
    create_image(tmp_path / "ring.img", 33 * MIB)
    device = FileDevice(tmp_path / "ring.img")
    format_device(device, MIB)
    loop = Loop(threads=4)

    def opened() -> Store:
        return Store.open(device, "ring", loop, OperationLog(tmpfs / "log", 32 * MIB), OPTIONS)

    def make(name: bytes) -> int:
        return loop.run(store.create(1, name, FILE, 0, 0)).inode.ino

    store = opened()
    files = {b"%d" % number: bytearray() for number in range(6)}
    inos = {name: make(name) for name in files}
    random = Random(1)
    for number in range(400):
        name = random.choice(list(files))
        if random.random() < 0.6:
            loop.run(store.unlink(1, name))
            inos[name], files[name] = make(name), bytearray()
        content = files[name]
        offset, size = random.randrange(MIB // 2), random.randrange(1, MIB // 2)
        data = noise(size, number)
        loop.run(store.write(inos[name], offset, data))
        content.extend(bytes(max(0, offset + size - len(content))))
        content[offset : offset + size] = data
        if number % 10 == 0:
            loop.run(store.sync())
        if number % 25 == 0:
            loop.run(store.checkpoint())
        other = random.choice(list(files))
        assert bytes(loop.run(store.read(inos[other], 0, 3 * MIB))) == files[other]
    assert store.counters.device_written > device.size, "the ring has turned"
    store = opened()
    for name, ino in inos.items():
        assert bytes(loop.run(store.read(ino, 0, 3 * MIB))) == files[name]
    loop.run(store.close())
    store = opened()
    for name, ino in inos.items():
        assert bytes(loop.run(store.read(ino, 0, 3 * MIB))) == files[name]
    audit(store)
    loop.run(store.close())
    device.close()


# -- deadlines -------------------------------------------------------------------------


def give_up(bench: DeferredBench, step: Step[Any]) -> None:
    """What a driver does when a step has waited for too long."""
    next(step)
    for _ in range(3):
        bench.executor.happen()
    with pytest.raises(DeadlineExceeded):
        step.throw(DeadlineExceeded())


def test_an_unlink_that_was_done_is_not_told_as_a_failure(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is gone once that is in the log. Freeing the file is another operation,
    which may have to wait for room; who gives up on that has unlinked all the same."""
    monkeypatch.setattr(oplog, "CHUNK_SIZE", 128 * 1024)
    bench = make_deferred(tmpfs, 1, new_device(segments=32))
    bench.warm.limit = oplog.CHUNK_SIZE
    ino = bench.make_file(b"file")
    log = bench.warm._log._used[-1]
    # Room for one operation, and not for the next.
    needed = cost(ops.Drop(0, [ino])) + 2 * BLOCK
    while log.room >= needed + OPLOG_ALIGN:
        bench.go(bench.store.set_attributes(ino, mode=0o600))
    assert log.room >= needed
    unlink = bench.store.unlink(1, b"file")
    assert next(unlink, None) is not None, "freeing the file has to wait"
    assert bench.names_now() == []
    with pytest.raises(StopIteration) as ended:
        unlink.throw(DeadlineExceeded())
    assert ended.value.value == ino
    bench.executor.settle()
    bench.go(bench.store.close())
    bench.open()
    bench.executor.settle()
    assert bench.store.usage().inodes == 1


@pytest.mark.parametrize("seed", range(6))
def test_steps_that_are_given_up_leave_the_store_sound(tmpfs: Path, seed: int) -> None:
    bench = make_deferred(tmpfs, seed)
    ino = bench.make_file(b"file")
    bench.go(bench.store.write(ino, 0, noise(2 * MIB)))
    bench.go(bench.store.close())
    bench.open()
    bench.executor.settle()
    give_up(bench, bench.store.read(ino, 0, MIB))
    give_up(bench, bench.store.read(ino, 0, 2 * MIB))
    bench.go(bench.store.write(ino, MIB, noise(MIB, 1)))
    give_up(bench, bench.store.sync())
    bench.go(bench.store.write(ino, 0, noise(1000, 2)))
    give_up(bench, bench.store.checkpoint())
    expected = noise(1000, 2) + noise(2 * MIB)[1000:MIB] + noise(MIB, 1)
    assert bytes(bench.go(bench.store.read(ino, 0, 2 * MIB))) == expected
    bench.go(bench.store.close())
    assert bench.store.failure is None
    bench.open()
    bench.executor.settle()
    assert bytes(bench.go(bench.store.read(ino, 0, 2 * MIB))) == expected
    audit(bench.store)
