"""What all sessions of one rank of one engine have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvfs.torch.fingerprint import Fingerprint
from kvfs.torch.layout import RowLayout


@dataclass(frozen=True)
class Shape:
    """The model, and how many tokens a block has: what the engine stores and loads at once."""

    fingerprint: Fingerprint
    block: int

    @property
    def layers(self) -> int:
        """How many layer files a session has."""
        return self.fingerprint.layers

    @cached_property
    def row(self) -> RowLayout:
        """A token in a layer file."""
        return self.fingerprint.row_layout()

    @cached_property
    def blocks(self) -> RowLayout:
        """A layer file seen as rows of a block each."""
        return self.row.batched(self.block)

    @property
    def block_bytes(self) -> int:
        """A block in one layer."""
        return self.blocks.row_bytes

    @property
    def names(self) -> list[str]:
        """Those of the layer files."""
        return [f"layer.{index:03d}" for index in range(self.layers)]

    def whole(self, tokens: int) -> int:
        """`tokens`, without those of a block that is not full."""
        return tokens - tokens % self.block
