"""The machine, as files and programs tell of it.

All is below `root`, so that the parsers can be run over what another machine's /proc and /sys
say, with that machine's programs.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_PROGRAM_SECONDS = 10
_PROGRAMS = ("usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "sbin", "bin")


@dataclass(frozen=True, slots=True)
class System:
    """Paths are given as they are on that machine, absolute. What is not there, or may not be
    read, is None: a container shows little."""

    root: Path = Path("/")

    @property
    def is_this_machine(self) -> bool:
        """Whether the kernel may be asked as well, and clocks mean something."""
        return self.root == Path("/")

    def path(self, path: str | Path) -> Path:
        return self.root / str(path).lstrip("/")

    def text(self, path: str | Path) -> str | None:
        try:
            return os.fsdecode(self.path(path).read_bytes()).rstrip("\n")
        except OSError:
            return None

    def number(self, path: str | Path) -> int | None:
        """The first of its numbers."""
        try:
            return int((self.text(path) or "").split()[0])
        except (ValueError, IndexError):
            return None

    def names(self, path: str | Path) -> list[str]:
        """Of what is in a directory, in order; none if there is none."""
        try:
            return sorted(os.listdir(self.path(path)))
        except OSError:
            return []

    def exists(self, path: str | Path) -> bool:
        return self.path(path).exists()

    def may_write(self, path: str | Path) -> bool:
        return os.access(self.path(path), os.R_OK | os.W_OK)

    def real(self, path: str | Path) -> Path:
        """Without symlinks, as that machine names it. Absolute links of another machine lead
        nowhere here, so only relative ones are followed there."""
        real = self.path(path).resolve()
        return Path("/") / real.relative_to(self.root) if real.is_relative_to(self.root) else real

    def program(self, name: str) -> Path | None:
        where = os.pathsep.join(str(self.root / each) for each in _PROGRAMS)
        found = shutil.which(name, path=where)
        if found is None and self.is_this_machine:
            found = shutil.which(name)
        return None if found is None else Path(found)

    def output(self, name: str, *arguments: str) -> str | None:
        """What a program prints. None if it is missing, fails, or does not end in time."""
        program = self.program(name)
        if program is None:
            return None
        try:
            result = subprocess.run(
                [program, *arguments], check=False, stdin=subprocess.DEVNULL, capture_output=True,
                timeout=_PROGRAM_SECONDS,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return None
        return None if result.returncode else os.fsdecode(result.stdout).strip()

    def package_version(self, name: str) -> str | None:
        """Of a Python package where this command runs, by its metadata: nothing is imported."""
        if self.is_this_machine:
            found = importlib.metadata.distributions(name=name)
        else:
            path = [str(self.root / "site-packages")]
            found = importlib.metadata.distributions(name=name, path=path)
        return next((each.version for each in found), None)
