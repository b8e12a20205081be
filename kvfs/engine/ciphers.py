"""Authenticated encryption, in one form for all that is encrypted: nonce, ciphertext, tag."""

from __future__ import annotations

import os
from functools import lru_cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from kvfs.engine.format import NONCE_SIZE, SEAL_OVERHEAD, SECRET_SIZE, Cipher, FormatError

# What OWASP's cheat sheet on storing passwords asks of scrypt, in 64 MiB: a master key may be
# a phrase that somebody remembers.
_SCRYPT_N, _SCRYPT_R, _SCRYPT_P = 2**16, 8, 2

Bytes = bytes | bytearray | memoryview


def new_secret() -> bytes:
    return os.urandom(SECRET_SIZE)


@lru_cache(maxsize=4)
def master_secret(key: bytes, salt: bytes) -> bytes:
    """From what an operator keeps. It takes some tenths of a second, which is its purpose."""
    kdf = Scrypt(salt, SECRET_SIZE, _SCRYPT_N, _SCRYPT_R, _SCRYPT_P)
    return bytes(kdf.derive(key))


def derived(secret: bytes, purpose: bytes) -> bytes:
    """Another secret, for one purpose alone (HKDF, RFC 5869)."""
    return bytes(HKDFExpand(SHA256(), SECRET_SIZE, purpose).derive(secret))


def seal(
    cipher: Cipher, secret: bytes, data: Bytes, context: bytes, nonce: bytes | None = None
) -> bytes:
    """`context` must be the same when it is opened. A nonce must never come twice with one
    secret; without one it is drawn."""
    nonce = nonce or os.urandom(NONCE_SIZE)
    return nonce + _aead(cipher, secret).encrypt(nonce, data, context)


def unseal(cipher: Cipher, secret: bytes, sealed: Bytes, context: bytes) -> bytes:
    """Raises FormatError when it was not sealed so."""
    nonce, body = _cut(sealed)
    try:
        return _aead(cipher, secret).decrypt(nonce, body, context)
    except InvalidTag:
        raise _wrong() from None


def unseal_into(
    cipher: Cipher, secret: bytes, sealed: memoryview, context: bytes, out: memoryview
) -> None:
    """The same, to memory of just that length."""
    nonce, body = _cut(sealed)
    if len(out) != len(sealed) - SEAL_OVERHEAD:
        raise _wrong()
    try:
        _aead(cipher, secret).decrypt_into(nonce, body, context, out)
    except InvalidTag:
        raise _wrong() from None


def _cut(sealed: Bytes) -> tuple[bytes, Bytes]:
    if len(sealed) < SEAL_OVERHEAD:
        raise FormatError("what should be encrypted is too short")
    return bytes(sealed[:NONCE_SIZE]), sealed[NONCE_SIZE:]


def _aead(cipher: Cipher, secret: bytes) -> AESGCM | ChaCha20Poly1305:
    return AESGCM(secret) if cipher == Cipher.AES_256_GCM else ChaCha20Poly1305(secret)


def _wrong() -> FormatError:
    return FormatError("it cannot be decrypted: another key, or changed")
