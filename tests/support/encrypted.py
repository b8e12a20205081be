"""`pytest --encrypted`: rings that tests of the engine make are encrypted."""

from __future__ import annotations

from functools import partial

import pytest

from kvfs.engine import check, ciphers
from kvfs.engine.format import Cipher
from kvfs.engine.superblocks import Encryption

KEY = b"the key of rings that tests make"
ENCRYPTION = Encryption(Cipher.AES_256_GCM, KEY)
by_option: Encryption | None = None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--encrypted", action="store_true", help="rings of tests are encrypted")


def pytest_configure(config: pytest.Config) -> None:
    # It is to take long, for who guesses; here each ring has a salt of its own.
    ciphers._SCRYPT_N = 2
    # A key is not looked at where a ring is not encrypted.
    check.check = partial(check.check, key=KEY)
    if config.getoption("--encrypted"):
        global by_option
        by_option = ENCRYPTION


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="an encrypted ring has more blocks")
    for item in items:
        if config.getoption("--encrypted") and item.get_closest_marker("plain"):
            item.add_marker(skip)
