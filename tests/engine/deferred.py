"""An executor in which nothing happens by itself: a test says what goes on next.

As in a mount, work is begun, its effect on the device comes later, its completion is
delivered later still, and a step that waited for it goes on later again. At each of
these points anything else may happen in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Generic, TypeVar

from kvfs.engine.io import Completion, Step, Urgency
from tests.support.devices import RecordingDevice

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Work:
    call: Callable[[], Any]
    completion: Completion[Any]
    writes_before: int
    urgency: Urgency


@dataclass(slots=True, eq=False)
class Task(Generic[T]):
    """A step that is driven: started, waiting, or at its end."""

    step: Step[T]
    completion: Completion[T] = field(default_factory=Completion)

    @property
    def done(self) -> bool:
        return self.completion.done


@dataclass(slots=True)
class DeferredExecutor:
    """Implements kvfs.engine.io.Executor. Choices are made by `random`, which the test
    seeds before it lets something happen."""

    device: RecordingDevice
    random: Random = field(default_factory=lambda: Random(0))
    has_room: bool = True
    _asked: list[_Work] = field(default_factory=list)
    _finished: list[Callable[[], None]] = field(default_factory=list)
    _ready: list[Task[Any]] = field(default_factory=list)

    def submit(self, work: Callable[[], T], urgency: Urgency = Urgency.DEMAND) -> Completion[T]:
        completion: Completion[T] = Completion()
        self._asked.append(_Work(work, completion, self.device.writes, urgency))
        return completion

    def hasten(self, completion: Completion[Any]) -> None:
        for work in self._asked:
            if work.completion is completion:
                work.urgency = Urgency.DEMAND

    @property
    def asked_for(self) -> list[Urgency]:
        """How urgent what has not begun yet is; what happens next is chosen regardless."""
        return [work.urgency for work in self._asked]

    def spawn(self, step: Step[T]) -> Completion[T]:
        """Starts later, as a task of a loop does."""
        task = Task(step)
        self._ready.append(task)
        return task.completion

    def begin(self, step: Step[T]) -> Task[T]:
        """Run a step up to its first wait, now."""
        task = Task(step)
        self._resume(task)
        return task

    def run(self, step: Step[T]) -> T:
        """Drive a step to its end; everything else may go on meanwhile."""
        task = self.begin(step)
        self.finish(task)
        return task.completion.result()

    def finish(self, task: Task[Any]) -> None:
        while not task.done:
            if not self.happen():
                raise AssertionError("the step waits for something that nobody will finish")

    def settle(self) -> None:
        """Until nothing is left to do."""
        while self.happen():
            pass

    def happen(self) -> bool:
        """One thing that may happen next does; False when there is none."""
        choices = [choices for choices in (self._asked, self._finished, self._ready) if choices]
        if not choices:
            return False
        chosen: list[Any] = self.random.choice(choices)
        one = chosen.pop(self.random.randrange(len(chosen)))
        if chosen is self._asked:
            self._do(one)
        elif chosen is self._finished:
            one()
        else:
            self._resume(one)
        return True

    def stops(self) -> None:
        """The process is killed or the power fails: what was asked for may still reach the
        device, whole or cut. Nobody learns."""
        asked = [work for work in self._asked if self.random.random() < 0.7]
        self.random.shuffle(asked)
        for work in asked:
            if self.random.random() < 0.3:
                self.device.torn_at = lambda sectors: self.random.randrange(sectors + 1)
            self._do(work)
            self.device.torn_at = None
        self._asked, self._finished, self._ready = [], [], []

    def _do(self, work: _Work) -> None:
        value, failure = None, None
        with self.device.work_asked_for(work.writes_before):
            try:
                value = work.call()
            except Exception as error:
                failure = error
        self._finished.append(lambda: work.completion.finish(value, failure))

    def _resume(self, task: Task[Any]) -> None:
        try:
            waits_for = next(task.step)
        except StopIteration as stop:
            task.completion.finish(stop.value)
        except Exception as error:
            task.completion.finish(error=error)
        else:
            waits_for.when_done(lambda: self._ready.append(task))
