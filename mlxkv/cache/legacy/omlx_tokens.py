"""The ``.tokens`` sidecar of an oMLX block: which tokens it holds, and which block comes before it.

JSON: format_version 1, block_hash, parent_hash, model, token_start, token_count, token_ids, media. What it says is
believed only because it hashes to the block's own name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .header import read_small
from .omlx_keys import MAX_BLOCK, STATIC, SUFFIX, block_hash, is_hash
from .reasons import Refused
from .strict import loads

_MAX_BYTES = 4 << 20


def sidecar_of(path: Path) -> Path:
    """Of a block file."""
    return path.with_name(path.name.removesuffix(SUFFIX) + ".tokens")


def read_tokens(path: Path, digest: bytes, model: str | None) -> tuple[list[int], bytes | None, str]:
    """(token ids, hash of the block before it or None, model name) of the block ``digest``, from its sidecar at
    ``path``. ``model``: the name in the block file; None: there is no block file, and the sidecar's counts. Raises
    Refused: NO_TOKENS where there is none or it says nothing, HASH, EXTRA_KEYS where it is not that block's."""
    try:
        said = loads(read_small(path, _MAX_BYTES), values=2 * MAX_BLOCK)
    except Refused as e:
        raise Refused("NO_TOKENS", "" if e.code == "UNREADABLE" else f"{path.name}: {e.code}") from None
    except ValueError as e:
        raise Refused("NO_TOKENS", f"{path.name}: {e}"[:200]) from None
    if not isinstance(said, dict) or said.get("format_version") not in (1, "1"):
        raise Refused("NO_TOKENS", f"{path.name} is of another version")
    tokens, before = _ids(said), said.get("parent_hash")
    if tokens is None or not (before in (None, "") or (isinstance(before, str) and is_hash(before))):
        raise Refused("NO_TOKENS", f"{path.name} makes no sense")
    parent = bytes.fromhex(before) if before else None
    name = said.get("model") if model is None else model
    if not isinstance(name, str):
        raise Refused("NO_TOKENS", f"{path.name} names no model")
    if said.get("media"):
        raise Refused("EXTRA_KEYS", f"{path.name} names images")
    if block_hash(name, parent, tokens) != digest:
        if block_hash(name, parent, tokens, (STATIC,)) == digest:
            raise Refused("EXTRA_KEYS")
        raise Refused("HASH", f"the tokens in {path.name} have another hash")
    return tokens, parent, name


def _ids(said: dict[str, Any]) -> list[int] | None:
    tokens = said.get("token_ids")
    if not isinstance(tokens, list) or not 0 < len(tokens) <= MAX_BLOCK:
        return None
    if said.get("token_count", len(tokens)) != len(tokens):
        return None
    return tokens if all(type(t) is int and 0 <= t < 1 << 32 for t in tokens) else None
