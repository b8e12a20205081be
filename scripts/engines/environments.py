"""Each engine's own virtual environment, made by pip when it is missing.

They lie below `.engines/` here, or below the folder that KVFS_ENGINES names.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
_MARK = "installed"


@dataclass(frozen=True, slots=True)
class Environment:
    """What pip installs, in this order: `first` and `needs` with what they ask for themselves;
    then `engine` without, as engines ask for what only a machine with a GPU can use."""

    name: str
    engine: tuple[str, ...]
    needs: tuple[str, ...]
    first: tuple[str, ...] = field(default=("torch==2.13.0",))

    @property
    def folder(self) -> Path:
        return Path(os.environ.get("KVFS_ENGINES", ROOT / ".engines")) / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def is_made(self) -> bool:
        """With what is asked for now."""
        mark = self.folder / _MARK
        return mark.exists() and mark.read_text() == self._list

    @property
    def _list(self) -> str:
        return "\n".join((*self.first, *self.needs, *self.engine)) + "\n"

    def make(self) -> None:
        """Raises subprocess.CalledProcessError if pip fails."""
        if self.is_made:
            return
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", self.folder], check=True)
        if self.first:
            self._install(*self.first)
        if self.needs:
            self._install(*self.first, *self.needs)
        self._install("--no-deps", *self.engine)
        (self.folder / _MARK).write_text(self._list)

    def _install(self, *what: str) -> None:
        command = [self.python, "-m", "pip", "install", "--disable-pip-version-check", "-q", *what]
        subprocess.run(command, check=True)


LMCACHE = Environment(
    "lmcache",
    engine=("lmcache==0.5.6",),
    needs=(
        "aiofile==3.12.3",
        "aiofiles==25.1.0",
        "aiohttp==3.14.5",
        "blake3==1.0.11",
        "fastapi==0.165.0",
        "grpcio==1.85.3",
        "httpx==0.28.1",
        "msgspec==0.23.0",
        "numba==0.68.1",
        "nvtx==0.2.17",
        "opentelemetry-api==1.45.2",
        "opentelemetry-exporter-otlp==1.45.2",
        "opentelemetry-exporter-prometheus==0.66b2",
        "opentelemetry-sdk==1.45.2",
        "prometheus-client==0.26.0",
        "protobuf==7.36.2",
        "psutil==7.2.2",
        "py-cpuinfo==9.0.0",
        "pyyaml==6.0.4",
        "pyzmq==27.3.0",
        "redis==8.1.0",
        "safetensors==0.8.0",
        "sortedcontainers==2.4.0",
        "transformers==5.24.0",
        "uvicorn==0.54.0",
    ),
)

MOONCAKE = Environment(
    "mooncake",
    engine=("mooncake-transfer-engine-non-cuda==0.3.13.post1",),
    needs=("aiohttp==3.14.5", "msgpack==1.2.4", "numpy==2.4.6", "requests==2.34.2"),
    first=(),
)
