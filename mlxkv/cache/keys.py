"""Keys: the hash chain that names what is stored.

``root = SHA-256(schema, fingerprint, compute identity, layout digest, block size, salt)`` and
``key = SHA-256(root, parent key, token ids as little-endian u32, media digests)``, every field with its length in
front. A full block's parent is the full block before it (the root for the first); a leaf inside block i hangs on
block i−1.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SCHEMA = 1


def digest(*fields: bytes) -> bytes:
    """SHA-256 over length-prefixed fields (u64 little-endian lengths), so that no two field lists collide."""
    h = hashlib.sha256()
    for field in fields:
        h.update(struct.pack("<Q", len(field)))
        h.update(field)
    return h.digest()


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian u32."""
    return np.asarray(tokens, dtype="<u4").tobytes()


def unpack(data: bytes) -> list[int]:
    return np.frombuffer(data, dtype="<u4").tolist()


def common(a: bytes, b: bytes) -> int:
    """Length of the longest common prefix of two packed token lists, in tokens."""
    n = min(len(a), len(b)) // 4
    x, y = np.frombuffer(a, "<u4", n), np.frombuffer(b, "<u4", n)
    different = np.flatnonzero(x != y)
    return int(different[0]) if different.size else n


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


@dataclass(frozen=True)
class Identity:
    """What a state depends on besides its tokens.

    fingerprint: of the weights, 32 bytes. compute: numerics mode, device kind, dtypes and the like. layout: digest.
    name is for people only and not part of any key.
    """

    fingerprint: bytes
    compute: tuple[tuple[str, str], ...]
    layout: bytes
    name: str = ""

    def compute_json(self) -> str:
        return canonical(dict(self.compute)).decode()


def root_key(fingerprint: bytes, compute: str, layout: bytes, block: int, salt: str) -> bytes:
    return digest(
        b"mlxkv",
        str(SCHEMA).encode(),
        fingerprint,
        compute.encode(),
        layout,
        str(block).encode(),
        salt.encode("utf-8", "surrogatepass"),  # JSON can carry halves of pairs
    )


@dataclass(frozen=True)
class KeySpace:
    """All keys of one identity, block size and salt."""

    root: bytes
    block: int

    @classmethod
    def of(cls, identity: Identity, block: int, salt: str = "") -> KeySpace:
        return cls(root_key(identity.fingerprint, identity.compute_json(), identity.layout, block, salt), block)

    def key(self, parent: bytes, tokens: Sequence[int], media: Sequence[bytes] = ()) -> bytes:
        return self.key_packed(parent, pack(tokens), media)

    def key_packed(self, parent: bytes, tokens: bytes, media: Sequence[bytes] = ()) -> bytes:
        return digest(self.root, parent, tokens, *media)


def answer_digest(root: bytes, prompt: Sequence[int], text: str) -> bytes:
    """Names an answer by the prompt ids it was given to and its text, for clients that send text back."""
    return digest(b"answer", root, hashlib.sha256(pack(prompt)).digest(), text.encode("utf-8", "surrogatepass"))
