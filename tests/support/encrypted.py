"""`pytest --encrypted`: every ring that a test makes is encrypted, and opened with its key."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from kvfs.engine import check, ciphers, store, superblocks
from kvfs.engine.format import Cipher
from kvfs.engine.store import Store
from kvfs.engine.superblocks import Encryption

KEY = b"the key of rings that tests make"
ENCRYPTION = Encryption(Cipher.AES_256_GCM, KEY)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--encrypted", action="store_true", help="on encrypted rings")


def pytest_configure(config: pytest.Config) -> None:
    # It is to take long, for who guesses; here each ring has a salt of its own.
    ciphers._SCRYPT_N = 2
    if config.getoption("--encrypted"):
        superblocks.format_device = partial(superblocks.format_device, encryption=ENCRYPTION)
        check.check = partial(check.check, key=KEY)
        store.Store.open = classmethod(_open)  # type: ignore[assignment,arg-type]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--encrypted"):
        skip = pytest.mark.skip(reason="of rings that are not encrypted")
        for item in items:
            if item.get_closest_marker("plain"):
                item.add_marker(skip)


_store_open = Store.open.__func__  # type: ignore[attr-defined]


def _open(cls: type[Store], *arguments: Any, **options: Any) -> Store:
    opened: Store = _store_open(cls, *arguments, **{"key": KEY, **options})
    return opened
