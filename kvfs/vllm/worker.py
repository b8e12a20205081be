"""A worker's half: the loads and saves of a step, and what may be saved after a load failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from kvfs.vllm.loading import Loader
from kvfs.vllm.pages import PageOrder, Pages, Write
from kvfs.vllm.place import Place
from kvfs.vllm.plan import Plan
from kvfs.vllm.saving import Saver
from kvfs.vllm.settings import Settings
from kvfs.vllm.shape import Shape


class Worker:
    """Of one rank. `use` comes before all else."""

    def __init__(
        self, place: Place, shape: Shape, settings: Settings, agreed: Callable[[bool], bool]
    ) -> None:
        """`agreed(has_failed)` is the same on all ranks: whether it has on any."""
        self._place = place
        self._shape = shape
        self._settings = settings
        self._agreed = agreed
        self._layers: dict[str, int] = {}
        self._failures = 0
        self._errors: set[int] = set()

    def use(self, caches: Mapping[str, torch.Tensor], write: Write) -> None:
        """The engine's memory by layer, in order, and the kernel that writes to it.

        Raises:
            ValueError: the pages are not K and V of whole tokens.
        """
        self._layers = {name: index for index, name in enumerate(caches)}
        memory = list(caches.values())
        order = PageOrder.learn(write, memory[0][:1], self._shape.row)
        pages = Pages(memory, order, self._shape.block_bytes)
        self._loader = Loader(self._place, self._shape, pages)
        self._saver = Saver(self._place, self._shape, pages, self._settings)

    def start(self, plan: Plan) -> None:
        """Begin to load, before the forward pass."""
        self._loader.start(plan.loads)

    def wait(self, layer: str) -> None:
        """Until the layer is loaded, before its attention."""
        self._loader.wait(self._layers[layer])

    def save(self, plan: Plan) -> None:
        """What the forward pass computed. When this returns, the pages may be used again."""
        if plan.loads:
            for load in self._loader.finish():
                self._errors.update(load.pages)
            self._failures += self._agreed(bool(self._errors))
        for request in plan.ended:
            self._saver.end(request)
        # Until the scheduler knows of a failure, what it plans to save was computed from it.
        if plan.failures == self._failures:
            for save in plan.saves:
                self._saver.save(save)

    def take_errors(self) -> set[int]:
        """The pages of the last step that do not hold what they should."""
        errors, self._errors = self._errors, set()
        return errors

    def flush(self) -> None:
        """Return when all that was saved is written."""
        self._saver.flush()

    def close(self) -> None:
        """Write what is on its way."""
        if self._layers:
            self._loader.close()
            self._saver.close()
