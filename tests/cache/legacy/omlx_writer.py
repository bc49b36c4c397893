"""An independent writer of oMLX's cache folders: numpy and the standard library, from the format's description alone.

It shares no code with the reader under test. It is given what a run's caches held after so many tokens (``Story``, from
``stories.py``) and writes what an oMLX of that time (``Style``) would have left on disk, its known faults included.

Where the description leaves a choice, this writer's is: a member of a CacheList without a meta state has ``""``, a
layer without has ``[]``; a CacheList of growing members alone is stored in slices, as a flat layer is; a placeholder
keeps the meta state of the live cache and names no class; a slot that is None is a ``_zero_dim`` of ``"0"`` in a flat
layer (as observed) and a ``_none`` in a member of a list.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

#: numpy dtype -> safetensors name; bfloat16 is held as uint16, as numpy has none
DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "uint16": "BF16",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint32": "U32",
    "bool": "BOOL",
}


@dataclass(frozen=True)
class KV:
    """``KVCache``: arrays [1, heads, rows, dim]."""

    keys: np.ndarray
    values: np.ndarray
    name = "KVCache"

    def cut(self, a: int, b: int) -> KV:
        return KV(self.keys[:, :, a:b], self.values[:, :, a:b])


@dataclass(frozen=True)
class Ring:
    """``RotatingKVCache``: at most ``max_size`` rows, the next one goes to ``index``."""

    keys: np.ndarray
    values: np.ndarray
    keep: int
    max_size: int
    offset: int
    index: int
    name = "RotatingKVCache"


@dataclass(frozen=True)
class Slots:
    """``ArraysCache``; a slot is None before it is filled."""

    slots: tuple[np.ndarray | None, ...]
    name = "ArraysCache"


@dataclass(frozen=True)
class Listed:
    """``CacheList``"""

    members: tuple[KV | Ring | Slots, ...]
    name = "CacheList"

    @property
    def sliced(self) -> bool:
        return all(isinstance(m, KV) for m in self.members)


Layer = KV | Ring | Slots | Listed


@dataclass(frozen=True)
class Story:
    """``at[n]``: the layers after the first n of ``tokens``."""

    tokens: list[int]
    at: dict[int, list[Layer]]


@dataclass(frozen=True)
class Style:
    """Which oMLX writes, and how it was run.

    ``names``: "state" (N elements a layer) or "keys" (two). ``composite``: "cumulative" or "pm". ``snapshots``: the
    boundaries whose state was caught (None: all). ``live``: how many tokens the caches stood at when the chain was
    stored (None: where it ends). ``stamped``: block size and signature are written. ``class_names``: each state is
    said to be of its cache's class ("class"), of its own ("tuple"), or of none (""). ``cut_slots``: flat ArraysCache
    layers lose all but two slots, and those of one slot are placeholders. ``extra`` are keys in the hash of every block
    that ends after ``extra_from``.
    """

    model: str = "test-model"
    block: int = 4
    version: str | None = "3"
    names: str = "state"
    composite: str = "cumulative"
    snapshots: frozenset[int] | None = None
    live: int | None = None
    stamped: bool = False
    sidecars: bool = True
    class_names: str = "class"
    cut_slots: bool = False
    extra: tuple[str, ...] = ()
    extra_from: int = 0


def block_hash(model: str, parent: bytes | None, tokens: list[int] | tuple[int, ...], extra: tuple = ()) -> bytes:
    """SHA-256 over name, parent and the texts that Python gives the tuples; nothing between them."""
    text = "(" + ", ".join(str(t) for t in tokens) + ("," if len(tokens) == 1 else "") + ")"
    parts = [model.encode(), parent if parent is not None else b"omlx-root", text.encode()]
    if extra:
        parts.append(("(" + ", ".join(repr(e) for e in extra) + ("," if len(extra) == 1 else "") + ")").encode())
    return hashlib.sha256(b"".join(parts)).digest()


def packed(metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> bytes:
    """The bytes of a safetensors file: tensors in the order given."""
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    return framed(json.dumps(header, separators=(",", ":")).encode(), b"".join(a.tobytes() for a in tensors.values()))


def framed(header: bytes, data: bytes) -> bytes:
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data


@dataclass
class Block:
    """One file before it is written: change what you like, then ``save``."""

    index: int
    tokens: list[int]
    hash: bytes
    parent: bytes | None
    style: Style
    extra: tuple[str, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.hash.hex()

    def path(self, folder: Path) -> Path:
        return folder / self.name[0] / f"{self.name}.safetensors"

    def sidecar(self) -> dict[str, Any]:
        return {
            "format_version": 1,
            "renderer_version": 2,
            "block_hash": self.name,
            "parent_hash": self.parent.hex() if self.parent is not None else None,
            "model": self.style.model,
            "tokenizer": self.style.model,
            "token_start": self.index * self.style.block,
            "token_count": len(self.tokens),
            "token_ids": self.tokens,
            "media": [{"key": key} for key in self.extra],
        }

    def save(self, folder: Path) -> Path:
        path = self.path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(packed(self.metadata, self.tensors))
        if self.style.sidecars:
            path.with_suffix(".tokens").write_text(json.dumps(self.sidecar()))
        return path


def blocks(story: Story, style: Style) -> list[Block]:
    """The chain that the story's whole blocks make. In "pm" it ends before the first state that was not caught."""
    out: list[Block] = []
    parent: bytes | None = None
    count = len(story.tokens) // style.block
    live = style.live if style.live is not None else count * style.block
    for i in range(count):
        end = (i + 1) * style.block
        caught = style.snapshots is None or end in style.snapshots
        if not caught and style.composite == "pm" and not (end == live and i == count - 1):
            break
        tokens = story.tokens[i * style.block : end]
        extra = style.extra if end > style.extra_from else ()
        block = Block(i, tokens, block_hash(style.model, parent, tokens, extra), parent, style, extra)
        state = story.at[end] if caught else story.at[live] if i == count - 1 else None
        _fill(block, story.at[live], state)
        out.append(block)
        parent = block.hash
    return out


def save(folder: Path, story: Story, style: Style) -> list[Path]:
    """Write the chain and what else stands in such a folder."""
    prepare(folder)
    return [block.save(folder) for block in blocks(story, style)]


def prepare(folder: Path) -> None:
    for digit in "0123456789abcdef":
        (folder / digit).mkdir(parents=True, exist_ok=True)


def _fill(block: Block, live: list[Layer], state: list[Layer] | None) -> None:
    """``live`` gives growing rows, ``state`` what cannot be cut; None where nothing was caught."""
    style = block.style
    meta = block.metadata
    if style.version is not None:
        meta["omlx_cache_format_version"] = style.version
    meta |= {
        "block_hash": block.name,
        "token_count": str(len(block.tokens)),
        "num_layers": str(len(live)),
        "model_name": style.model,
        "created_at": "1778112000.25",
        "layer_cache_types": json.dumps([layer.name for layer in live]),
    }
    metas = [_meta(state[i] if state is not None else layer) for i, layer in enumerate(live)]
    meta["layer_meta_states"] = json.dumps(metas)
    if style.stamped:
        meta["block_size"] = str(style.block)
        meta["cache_signature"] = _signature(style, live)
    for i, layer in enumerate(live):
        _layer(block, f"layer_{i}", layer, state[i] if state is not None else None)


def _layer(block: Block, at: str, live: Layer, state: Layer | None) -> None:
    style = block.style
    a, b = block.index * style.block, (block.index + 1) * style.block
    if isinstance(live, KV):
        _elements(block, at, live.cut(a, b))
    elif isinstance(live, Listed):
        if live.sliced:
            _members(block, at, [m.cut(a, b) for m in live.members])  # type: ignore[union-attr]
        elif state is None:
            _placeholder(block, at)
        elif style.composite == "cumulative":
            _members(block, at, list(state.members))  # type: ignore[union-attr]
        else:
            pairs = zip(live.members, state.members, strict=True)  # type: ignore[union-attr]
            _members(block, at, [m.cut(a, b) if isinstance(m, KV) else s for m, s in pairs])
            block.metadata[f"{at}_storage_mode"] = "pm"
    elif state is None or (style.cut_slots and isinstance(state, Slots) and len(state.slots) == 1):
        _placeholder(block, at)
    else:
        _elements(block, at, state)


def _placeholder(block: Block, at: str) -> None:
    _elements(block, at, KV(np.zeros(1, np.float32), np.zeros(1, np.float32)))
    block.metadata.pop(f"{at}_state_class_name", None)


def _members(block: Block, at: str, members: list[Any]) -> None:
    block.metadata[f"{at}_sub_count"] = str(len(members))
    for j, member in enumerate(members):
        _elements(block, f"{at}_sub_{j}", member, inner=True)


def _elements(block: Block, at: str, layer: KV | Ring | Slots, inner: bool = False) -> None:
    """The elements of a flat layer or of a member of a list."""
    style, meta = block.style, block.metadata
    elements: list[np.ndarray | None] = list(layer.slots) if isinstance(layer, Slots) else [layer.keys, layer.values]
    if isinstance(layer, Slots) and (style.names == "keys" or (style.cut_slots and not inner)):
        elements = elements[:2]
    names = ["keys", "values"] if style.names == "keys" else [f"state_{k}" for k in range(len(elements))]
    if style.names == "state":
        meta[f"{at}_state_count"] = str(len(elements))
        if style.class_names:
            meta[f"{at}_state_class_name"] = layer.name if style.class_names == "class" else "tuple"
    for name, array in zip(names, elements, strict=False):
        key = f"{at}_{name}"
        if array is None and inner and style.names == "state":
            meta[f"{key}_none"] = "1"
        elif array is None:
            meta[f"{key}_zero_dim"] = "0"
        elif 0 in array.shape:
            meta[f"{key}_zero_dim"] = ",".join(str(n) for n in array.shape)
            array = None
        block.tensors[key] = np.zeros(1, np.float32) if array is None else np.ascontiguousarray(array)


def _meta(layer: Layer) -> list[Any]:
    if isinstance(layer, Listed):
        return [[m.name for m in layer.members], [_meta(m) or "" for m in layer.members]]
    if isinstance(layer, Ring):
        index = min(layer.index, layer.keys.shape[2])
        return [str(n) for n in (layer.keep, layer.max_size, layer.offset, index)]
    return []


def _signature(style: Style, live: list[Layer]) -> str:
    made: dict[str, Any] = {
        "model_name": style.model,
        "num_layers": len(live),
        "block_size": style.block,
        "layer_cache_types": [layer.name for layer in live],
    }
    subtypes = {}
    for i, layer in enumerate(live):
        if isinstance(layer, Listed) and not layer.sliced:
            names = [f"{m.name}:{len(m.slots)}" if isinstance(m, Slots) else m.name for m in layer.members]
            subtypes[str(i)] = [*names, "@pm"] if style.composite == "pm" else names
    if subtypes:
        made["cachelist_subtypes"] = subtypes
    return json.dumps(made, sort_keys=True, separators=(",", ":"))
