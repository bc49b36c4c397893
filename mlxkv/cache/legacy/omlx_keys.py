"""oMLX's own keys: the hash chain that names its block files, and the names under which it knows a model.

``hash = SHA-256(model name, parent, text of the tuple of token ids[, text of the tuple of extra keys])``, concatenated
without lengths; the parent of the first block is ``omlx-root``, that of another the 32 bytes of the hash before it.
The model name is what oMLX loaded the model by: in real runs the full path of its folder.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

ROOT = b"omlx-root"
SUFFIX = ".safetensors"
#: block sizes that oMLX has used; a folder may say others
BLOCK_SIZES = (256, 512, 1024, 2048, 4096)
MAX_BLOCK = 65_536
#: the extra key of a partial block, made by another way of prefilling
STATIC = "specprefill-static-exact-v1"

_NAME = re.compile(r"[0-9a-f]{64}")


def block_hash(model: str, parent: bytes | None, tokens: Sequence[int], extra: Sequence[str] = ()) -> bytes:
    """The hash of one block. ``parent``: the hash of the block before it, None for the first."""
    return _hash(model, parent, _text(tokens) + (_text(extra) if extra else b""))


def chain(model: str, tokens: Sequence[int], block: int) -> Iterator[bytes]:
    """The hashes of the full blocks of ``tokens``."""
    return next(chains([model], tokens, block))


def chains(models: Iterable[str], tokens: Sequence[int], block: int) -> Iterator[Iterator[bytes]]:
    """The same for each of several names."""
    texts = [_text(tokens[at : at + block]) for at in range(0, len(tokens) - block + 1, block)]
    for model in models:
        yield _chained(model, texts)


def _chained(model: str, texts: list[bytes]) -> Iterator[bytes]:
    parent: bytes | None = None
    for text in texts:
        parent = _hash(model, parent, text)
        yield parent


def _hash(model: str, parent: bytes | None, text: bytes) -> bytes:
    h = hashlib.sha256(model.encode("utf-8", "surrogatepass"))
    h.update(ROOT if parent is None else parent)
    h.update(text)
    return h.digest()


def _text(items: Sequence[Any]) -> bytes:
    """As Python writes a tuple."""
    return str(tuple(items)).encode()


def digest_of(name: str) -> bytes | None:
    """The hash that a file is named by, from its name; None for any other name."""
    stem = name.removesuffix(SUFFIX)
    return bytes.fromhex(stem) if stem != name and _NAME.fullmatch(stem) else None


def is_hash(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def file_of(folder: Path, digest: bytes) -> Path:
    name = digest.hex()
    return folder / name[0] / (name + SUFFIX)


def our_names(name: str, path: Path | None = None) -> tuple[str, ...]:
    """The names that oMLX may know our model by, the likeliest first. ``path``: its folder, where it is known."""
    paths = [path.absolute(), path.resolve()] if path is not None else []
    return tuple(dict.fromkeys([*(str(p) for p in paths), name, PurePath(name).name]))


def same_model(theirs: str, ours: Sequence[str]) -> bool:
    """Whether a model name in a file may mean our model: one of its names, or a path that ends in one. A model in the
    hub's own cache is called ``…/models--org--name/snapshots/<revision>``: where both tell whose model it is, that is
    compared too."""
    if theirs in ours:
        return True
    whose, known = _hub_id(theirs), {_hub_id(o) for o in ours} - {None}
    if whose is not None and known:
        return whose in known
    path = PurePath(theirs)
    ends = {path.name, "/".join(path.parts[-2:])}
    for part in path.parts:
        if part.startswith("models--"):
            ends |= {part.removeprefix("models--").replace("--", "/"), part.split("--")[-1]}
    return any(e in ours or any(PurePath(o).name == e for o in ours) for e in ends if e)


def _hub_id(name: str) -> str | None:
    """The ``org/name`` of a model on the hub, as far as a name or path tells it."""
    path = PurePath(name)
    for part in path.parts:
        if part.startswith("models--") and part.count("--") > 1:
            return part.removeprefix("models--").replace("--", "/", 1)
    return name if len(path.parts) == 2 and not path.is_absolute() else None
