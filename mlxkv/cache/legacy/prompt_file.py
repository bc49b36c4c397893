"""An mlx-lm prompt-cache file as the cache objects it was made of, whichever version wrote it.

Found by reading the ``cache_prompt`` and ``models/cache`` of the releases 0.14 to 0.32.2. A file is a flattened tree:
tensor ``3.0.1`` is element 1 of element 0 of layer 3's state, and metadata is flattened the same way.

========  ===========================================================================================================
0.18 on   (``--kv-cache-file``) tensors ``3_keys`` and ``3_values``, cut to the prompt's rows; no classes. Metadata
          ``max_kv_size`` is "None", or the size of rings in place of growing rows. Before 0.18 nothing was written.
0.19.2    [meta states, user's metadata, class names]; a layer's state is what its class calls state, cut to its rows:
          ``KVCache`` (keys, values), ``MambaCache`` (slots…), ``RotatingKVCache`` (keys, values) with meta (keep,
          max_size, step, offset, index).
0.20.1    ``QuantizedKVCache`` ((packed, scales, biases) twice) with meta (step, offset, group_size, bits).
0.24.0    ``ChunkedKVCache`` (keys, values) with meta (chunk_size, start): its offset is not written. ``CacheList``: the
          states of its members one behind the other, without their classes and metas.
0.25.3    ``ConcatenateKVCache`` (keys, values).
0.26.4    ``ArraysCache`` (slots…), which ``MambaCache`` is a case of.
0.28.1    metas without ``step``.
0.31.0    ``CacheList``: a list of states, with meta (class names, metas).
0.32.0    [user's metadata, class names, scalars]; scalars begins with "", then (path, "scalar" | "string" | "none") of
          leaves that are no arrays: a number is a tensor without dimensions, a string its code points, None an empty
          tensor. ``KVCache`` (keys, values, offset), not cut to its rows; ``QuantizedKVCache`` (keys, values, offset,
          group_size, bits); ``RotatingKVCache`` (keys, values, offset, keep, max_size, index); ``ChunkedKVCache``
          (keys, values, offset, chunk_size, start); ``ArraysCache`` (slots, left_padding, lengths); ``CacheList``
          [(state, class name)…].
========  ===========================================================================================================

No version writes the tokens, a checksum, the weights' revision or the adapter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from .header import HostileFile
from .reasons import Refused

_OLDEST = re.compile(r"(0|[1-9][0-9]{0,5})_(keys|values)")
_INDEX = re.compile(r"0|[1-9][0-9]{0,5}")
_MAX_DEPTH = 8
_WHOLE = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8")
_PARTS = ("packed", "scales", "biases")
#: class -> how many elements its state has: from 0.32, and before
_ELEMENTS = {
    "KVCache": (3, 2),
    "ConcatenateKVCache": (2, 2),
    "QuantizedKVCache": (5, 2),
    "RotatingKVCache": (6, 2),
    "ChunkedKVCache": (5, 2),
    "ArraysCache": (3, None),
    "MambaCache": (3, None),
}

#: a tensor's name, or a list of such by index
Node = str | dict[int, Any]


@dataclass(frozen=True)
class Held:
    """One cache object of a file.

    ``arrays``: as its member names them (``keys``, ``slot0``, ``keys.packed``) -> tensor of the file. ``numbers``: of
    offset, keep, max_size, index, chunk, start, group_size and bits those that the file tells. ``inner``: what a
    CacheList holds; ``loose`` where the file tells neither classes nor which of these elements belong together.
    """

    label: str
    cls: str
    arrays: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    inner: tuple[Held, ...] = ()
    loose: tuple[Node, ...] = ()


def read(file: HostileFile) -> list[Held]:
    """The layers of a prompt-cache file. Raises Refused: FORM, TENSORS, CLASS, COUNTS, TOO_NEW."""
    meta = file.metadata
    if meta.get("2.0") == "":
        return _recent(file)
    if meta.get("2.0"):
        return _older(file)
    if file.tensors and all(_OLDEST.fullmatch(name) for name in file.tensors):
        return _oldest(file)
    raise Refused("FORM", "", file.path)


def _recent(file: HostileFile) -> list[Held]:
    """From 0.32.0."""
    kinds: dict[str, str] = {}
    for entry in _list(_sub(_tree(k for k in file.metadata if k.startswith("2.")), 2))[1:]:
        path, kind = (file.metadata[_leaf(e)] for e in _list(entry, 2))
        if kind not in ("scalar", "string", "none"):
            raise Refused("TOO_NEW", f"it holds a {kind[:20]!r}")
        if path not in file.tensors or path in kinds:
            raise Refused("TENSORS", f"{path[:80]} is listed, and is no tensor or listed twice")
        kinds[path] = kind
    return _Reader(file, kinds, {}).layers(_classes(file, "1."))


def _older(file: HostileFile) -> list[Held]:
    """From 0.19.2 to 0.31.3."""
    metas = _sub(_tree(k for k in file.metadata if k.startswith("0.")), 0)
    return _Reader(file, None, metas if isinstance(metas, dict) else {}).layers(_classes(file, "2."))


def _oldest(file: HostileFile) -> list[Held]:
    """0.18.x and 0.19.0."""
    layers = len(file.tensors) // 2
    if set(file.tensors) != {f"{i}_{name}" for i in range(layers) for name in ("keys", "values")}:
        raise Refused("TENSORS", "a layer has no keys or no values")
    size = file.metadata.get("max_kv_size", "None")
    if size != "None":
        raise Refused("LAYOUT", f"it was made with --max-kv-size {size[:12]}, which keeps windows in place of all rows")
    reader = _Reader(file, None, {})
    return [reader.plain(str(i), "KVCache", [f"{i}_keys", f"{i}_values"], []) for i in range(layers)]


@dataclass(frozen=True)
class _Reader:
    """``kinds``: tensor -> what it stands for where it is no array; None before 0.32.0. ``metas``: the tree of meta
    states before 0.32.0."""

    file: HostileFile
    kinds: dict[str, str] | None
    metas: dict[int, Any]

    def layers(self, classes: list[str]) -> list[Held]:
        states = _list(_tree(self.file.tensors))
        if len(states) != len(classes):
            raise Refused("COUNTS", f"{len(states)} layers, {len(classes)} classes")
        return [self.layer(str(i), cls, states[i], self.metas.get(i)) for i, cls in enumerate(classes)]

    def layer(self, label: str, cls: str, state: Node, meta: Node | None) -> Held:
        parts = _list(state)
        if cls == "CacheList":
            return self._cache_list(label, parts, meta)
        if cls not in _ELEMENTS:
            raise Refused("CLASS", f"layer {label} is a {cls[:40]}")
        return self.plain(label, cls, parts, self._numbers(meta))

    def plain(self, label: str, cls: str, parts: list[Node], meta: list[int]) -> Held:
        """A cache object that is no CacheList. ``meta``: its numbers before 0.32.0."""
        wanted = _ELEMENTS[cls][0 if self.kinds is not None else 1]
        if wanted is not None and len(parts) != wanted:
            raise Refused("COUNTS", f"layer {label}: a {cls} of {len(parts)} elements")
        if cls in ("ArraysCache", "MambaCache"):
            return Held(label, "ArraysCache", self._slots(label, parts), {})
        if cls == "QuantizedKVCache":
            arrays = {
                f"{name}.{part}": self._tensor(label, leaf)
                for name, node in zip(("keys", "values"), parts, strict=False)
                for part, leaf in zip(_PARTS, _list(node, 3), strict=True)
            }
        else:
            arrays = {name: self._tensor(label, node) for name, node in zip(("keys", "values"), parts, strict=False)}
        numbers = self._told(cls, parts[2:]) if self.kinds is not None else self._meant(label, cls, meta)
        first = next(iter(arrays.values()))
        shape = self.file.tensors[first].shape
        if len(shape) != 4:
            raise Refused("SHAPE", f"layer {label} keeps rows in {len(shape)} dimensions")
        if cls in ("KVCache", "ConcatenateKVCache", "QuantizedKVCache"):
            numbers = {"offset": shape[2]} | numbers
        elif cls == "ChunkedKVCache" and numbers.get("start") == 0 and self.kinds is None:
            numbers["offset"] = shape[2]  # nothing was dropped, so that its rows are cut to the prompt
        return Held(label, cls, arrays, numbers)

    def loose(self, held: Held, at: int, count: int, label: str, cls: str) -> Held:
        """``count`` elements of a CacheList without classes, taken for one ``cls``."""
        return self.plain(label, cls, list(held.loose[at : at + count]), [])

    def _cache_list(self, label: str, parts: list[Node], meta: Node | None) -> Held:
        inner: list[Held] = []
        if self.kinds is not None:
            for i, part in enumerate(parts):
                state, name = _list(part, 2)
                inner.append(self.layer(f"{label}.{i}", self._text(name), state, None))
        elif isinstance(meta, dict):
            names, metas = _list(meta, 2)
            classes = [self.file.metadata[_leaf(e)] for e in _list(names)]
            if not len(classes) == len(parts) == len(_list(metas)):
                raise Refused("COUNTS", f"layer {label}: {len(parts)} states, {len(classes)} classes")
            inner = [
                self.layer(f"{label}.{i}", cls, part, m)
                for i, (cls, part, m) in enumerate(zip(classes, parts, _list(metas), strict=True))
            ]
        else:
            return Held(label, "CacheList", loose=tuple(parts))
        return Held(label, "CacheList", inner=tuple(inner))

    def _slots(self, label: str, parts: list[Node]) -> dict[str, str]:
        if self.kinds is not None:
            slots, *padding = parts
            if any(self.kinds.get(_leaf(p)) != "none" for p in padding):
                raise Refused("LAYOUT", f"layer {label} is padded for a batch")
            parts = _list(slots)
        named = {f"slot{i}": _leaf(p) for i, p in enumerate(parts)}
        return {slot: self._tensor(label, n) for slot, n in named.items() if (self.kinds or {}).get(n) != "none"}

    def _tensor(self, label: str, node: Node) -> str:
        name = _leaf(node)
        if name not in self.file.tensors:
            raise Refused("TENSORS", f"layer {label} lacks {name[:80]}")
        kind = (self.kinds or {}).get(name)
        if kind is not None:
            raise Refused("SHORT" if kind == "none" else "TENSORS", f"layer {label} holds no rows")
        return name

    def _told(self, cls: str, parts: list[Node]) -> dict[str, int]:
        """Numbers behind the arrays, from 0.32.0."""
        names = {
            "KVCache": ("offset",),
            "ConcatenateKVCache": (),
            "QuantizedKVCache": ("offset", "group_size", "bits"),
            "RotatingKVCache": ("offset", "keep", "max_size", "index"),
            "ChunkedKVCache": ("offset", "chunk", "start"),
        }[cls]
        return {name: self._number(node) for name, node in zip(names, parts, strict=True)}

    def _meant(self, label: str, cls: str, meta: list[int]) -> dict[str, int]:
        """Numbers of a meta state, before 0.32.0; none at all where a CacheList lost them."""
        if not meta:
            return {}
        names: tuple[str, ...] = {
            "QuantizedKVCache": ("step", "offset", "group_size", "bits"),
            "RotatingKVCache": ("keep", "max_size", "step", "offset", "index"),
            "ChunkedKVCache": ("chunk", "start"),
        }.get(cls, ())
        if len(meta) == len(names) - 1:  # from 0.28.1
            names = tuple(name for name in names if name != "step")
        if len(meta) != len(names):
            raise Refused("COUNTS", f"layer {label}: a {cls} with {len(meta)} numbers")
        return {name: value for name, value in zip(names, meta, strict=True) if name != "step"}

    def _numbers(self, meta: Node | None) -> list[int]:
        if not isinstance(meta, dict):
            return []
        texts = [self.file.metadata[_leaf(leaf)] for leaf in _list(meta)]
        if bad := next((t for t in texts if not re.fullmatch(r"[0-9]{1,15}", t)), None):
            raise Refused("COUNTS", f"{bad[:20]!r} stands for a number")
        return [int(t) for t in texts]

    def _number(self, node: Node) -> int:
        name = _leaf(node)
        tensor = self.file.tensors.get(name)
        if tensor is None or (self.kinds or {}).get(name) != "scalar" or tensor.shape or tensor.dtype not in _WHOLE:
            raise Refused("TENSORS", f"{name[:80]} is no whole number")
        value = int(self.file.read(name))
        if not 0 <= value < 10**15:
            raise Refused("COUNTS", f"{name[:80]} is {value}")
        return value

    def _text(self, node: Node) -> str:
        name = _leaf(node)
        tensor = self.file.tensors.get(name)
        short = tensor is not None and len(tensor.shape) == 1 and tensor.shape[0] <= 64 and tensor.dtype in _WHOLE
        if (self.kinds or {}).get(name) != "string" or not short:
            raise Refused("TENSORS", f"{name[:80]} is no class name")
        return "".join(chr(int(c)) if 32 <= c < 127 else "?" for c in self.file.read(name))


def assign(file: HostileFile, held: Held, classes: Iterable[tuple[str, str, int]]) -> Held:
    """A CacheList that was written without classes, as the model holds it: (label, class, slots) of its members."""
    reader = _Reader(file, None, {})
    inner: list[Held] = []
    at = 0
    for label, cls, slots in classes:
        count = slots if cls == "ArraysCache" else 2
        if at + count > len(held.loose):
            break
        inner.append(reader.loose(held, at, count, label, cls))
        at += count
    if at != len(held.loose):
        raise Refused("LAYOUT", f"layer {held.label} holds {len(held.loose)} elements, the model's others")
    return replace(held, inner=tuple(inner), loose=())


def _classes(file: HostileFile, prefix: str) -> list[str]:
    names = _list(_sub(_tree(k for k in file.metadata if k.startswith(prefix)), int(prefix[0])))
    return [file.metadata[_leaf(name)] for name in names]


def _tree(names: Iterable[str]) -> dict[int, Any]:
    """The tree of dotted names; a leaf is its whole name. Raises Refused (TENSORS)."""
    root: dict[int, Any] = {}
    for name in names:
        parts = name.split(".", _MAX_DEPTH + 1)
        if len(parts) > _MAX_DEPTH or not all(_INDEX.fullmatch(part) for part in parts):
            raise Refused("TENSORS", f"{name[:80]} is no place in a cache")
        at = root
        for part in parts[:-1]:
            at = at.setdefault(int(part), {})
            if not isinstance(at, dict):
                raise Refused("TENSORS", f"{name[:80]} is below another")
        if int(parts[-1]) in at:
            raise Refused("TENSORS", f"{name[:80]} is above another")
        at[int(parts[-1])] = name
    return root


def _sub(tree: dict[int, Any], index: int) -> Node:
    return tree.get(index, {})


def _list(node: Node, length: int | None = None) -> list[Node]:
    if isinstance(node, str) or sorted(node) != list(range(len(node))) or length not in (None, len(node)):
        raise Refused("TENSORS", "a list has gaps or another length")
    return [node[i] for i in range(len(node))]


def _leaf(node: Node) -> str:
    if not isinstance(node, str):
        raise Refused("TENSORS", "a list stands where one array belongs")
    return node
