"""What a check finds, and what it hands back."""

from __future__ import annotations

from dataclasses import dataclass


class CheckError(Exception):
    """The repair cannot be made; the message says why. Nothing of the ring was changed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. `structure` says in what, `ino` and `path` whose it is,
    `address` where it lies on the device. What `is_lost` no repair brings back."""

    structure: str
    message: str
    ino: int | None = None
    address: int | None = None
    is_lost: bool = False
    path: str | None = None

    def __str__(self) -> str:
        whose = self.path or (None if self.ino is None else f"inode {self.ino}")
        where = None if self.address is None else f"byte {self.address} of the device"
        places = ", ".join(place for place in (whose, where) if place is not None)
        return f"{self.structure}: {self.message}" + (f" ({places})" if places else "")


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome. `data_bytes` were read of file data, as they are stored."""

    uuid: bytes
    findings: list[Finding]
    inodes: int
    extents: int
    data_bytes: int
    is_repaired: bool

    @property
    def is_clean(self) -> bool:
        return not self.findings

    @property
    def lost(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.is_lost]
