"""Payloads under a secret: AES-256-GCM, in frames, with the record's key as associated data.

``magic, salt, frames``: each object has a key of its own, HKDF-SHA256 of the secret's key and a random salt, and each
frame (at most 32 MiB) its number as the nonce, so that no nonce is used twice. Key and kind of the record, the frame's
number and how many there are, are associated data: an object that stands in another's place, a frame that is missing or
moved, does not open. Whoever lacks the secret can neither read nor forge one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Iterable

from ...errors import ConfigError
from ..record import RecordError

MAGIC = b"mlxkv-sealed-1\0\0"
SALT = 32
FRAME = 32 << 20
TAG = 16
#: characters of a secret at least
LEAST = 16


class Secret:
    """Keys derived from what the user gave, which need not be uniform: scrypt makes each guess at it dear. The same
    text gives the same keys on every machine. Raises ConfigError."""

    def __init__(self, text: str) -> None:
        if len(text) < LEAST:
            raise ConfigError(
                f"The object store's secret has {len(text)} characters.",
                f"It needs at least {LEAST}; `openssl rand -base64 32` makes a good one.",
            )
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise ConfigError(
                "The object store's secret needs the package cryptography.", "pip install 'mlxkv[object]'"
            ) from None
        self._aead = AESGCM
        both = hashlib.scrypt(text.encode(), salt=b"mlxkv object store", n=1 << 14, r=8, p=1, dklen=64)
        #: for names
        self.names, self._payloads = both[:32], both[32:]

    def _open(self, salt: bytes):  # noqa: ANN202 - an AESGCM
        """HKDF-SHA256 (RFC 5869), one block of output."""
        extracted = hmac.digest(salt, self._payloads, "sha256")
        return self._aead(hmac.digest(extracted, b"mlxkv object payload\x01", "sha256"))

    def seal(self, key: bytes, kind: str, parts: Iterable[bytes | memoryview]) -> bytes:
        """The object of a record."""
        plain = b"".join(parts)
        salt = os.urandom(SALT)
        cipher, count = self._open(salt), max(1, -(-len(plain) // FRAME))
        view = memoryview(plain)
        frames = (
            cipher.encrypt(_nonce(i), view[i * FRAME : (i + 1) * FRAME], _about(key, kind, i, count))
            for i in range(count)
        )
        return b"".join([MAGIC, salt, *frames])

    def open(self, key: bytes, kind: str, data: memoryview) -> memoryview:
        """The record in an object. Raises RecordError."""
        from cryptography.exceptions import InvalidTag

        begin = len(MAGIC) + SALT
        if len(data) < begin + TAG or data[: len(MAGIC)] != MAGIC:
            raise RecordError("the object is not sealed as mlxkv seals")
        cipher, body = self._open(bytes(data[len(MAGIC) : begin])), data[begin:]
        step = FRAME + TAG
        count = -(-len(body) // step)
        try:
            plain = [
                cipher.decrypt(_nonce(i), body[i * step : (i + 1) * step], _about(key, kind, i, count))
                for i in range(count)
            ]
        except (InvalidTag, ValueError):
            raise RecordError("the object does not open with this secret") from None
        return memoryview(plain[0] if count == 1 else b"".join(plain))


def _nonce(i: int) -> bytes:
    return struct.pack(">4xQ", i)


def _about(key: bytes, kind: str, i: int, count: int) -> bytes:
    return key + struct.pack(">II", i, count) + kind.encode()
