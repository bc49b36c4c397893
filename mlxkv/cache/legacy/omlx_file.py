"""One block file of oMLX, checked as far as it can be by itself: its name, header, metadata, tensors and layers.

The state of a layer is a list of elements, one tensor each: ``layer_{i}_state_{k}`` (or ``_keys`` and ``_values``), of
a member of a CacheList ``layer_{i}_sub_{j}_state_{k}``. Metadata marks elements that are None or have a dimension of 0,
whose tensor is a single float32 zero then. A layer that could not be cut at the block's end is a *placeholder*: two
such zeros without a mark. What a layer means to a model is the business of ``omlx_layers``; where the block stands in
a chain, of ``omlx_chain``.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .header import HostileFile
from .omlx_keys import MAX_BLOCK, digest_of
from .reasons import Refused
from .strict import loads

#: state elements of a layer or member
MAX_ELEMENTS = 16
MAX_LAYERS = 1024
MAX_MEMBERS = 16
_MAX_NESTING = 2
#: bytes at the end of a file; oMLX does not sync, so that a loss of power leaves pages of zeros there
_PAGE = 4096
_LIST = "CacheList"
#: names under which oMLX stores what another class holds
_CANONICAL: dict[str, str] = {
    "SizedArraysCache": "ArraysCache",
    "PrefillReadyRotatingKVCache": "RotatingKVCache",
    "BufferedRotatingKVCache": "RotatingKVCache",
    "BatchTurboQuantKVCache": "TurboQuantKVCache",
}
_KNOWN = {"KVCache", "RotatingKVCache", "ArraysCache", _LIST}
_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")
_DIMS = re.compile(r"[0-9]{1,10}(,[0-9]{1,10}){0,7}")


@dataclass(frozen=True)
class Element:
    """One element of a state. ``tensor`` holds it, unless it is None (``none``), empty (``shape`` has a 0 that is not
    the tensor's), or made of others (``inner``)."""

    tensor: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    none: bool = False
    empty: bool = False
    inner: tuple[Element, ...] | None = None

    @property
    def absent(self) -> bool:
        """It stands for nothing: None, or an array of shape (0,), which is how None was written once."""
        return self.none or (self.empty and self.shape == (0,))


@dataclass(frozen=True)
class Part:
    """The state of a layer, or of member ``sub`` of a CacheList. ``meta`` is what its class says beside its arrays."""

    cls: str
    elements: tuple[Element, ...]
    meta: Any
    sub: int | None = None


@dataclass(frozen=True)
class Layer:
    """``mode``: ``flat`` (a layer by itself), ``pm`` (members of a CacheList, rows of this block only), ``legacy``
    (members with all rows from the first token on), ``placeholder`` (nothing)."""

    index: int
    cls: str
    mode: str
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True)
class BlockFile:
    """``tokens``: how many this block has; ``block`` the block size that it says, None if it says none."""

    file: HostileFile
    digest: bytes
    version: str
    model: str
    tokens: int
    block: int | None
    layers: tuple[Layer, ...]

    @property
    def path(self) -> Path:
        return self.file.path


def _canonical(cls: str) -> str:
    return _CANONICAL.get(cls, cls)


def name_of(path: Path) -> bytes:
    """The hash that a block file is named by. Raises Refused (NAME, NOT_A_FILE): neither it nor its folder is opened
    through a link."""
    digest = digest_of(path.name)
    if digest is None or path.parent.name != path.name[0]:
        raise Refused("NAME", f"{path.parent.name}/{path.name}"[:200], path)
    try:
        parent = os.lstat(path.parent)
    except OSError as e:
        raise Refused("UNREADABLE", e.strerror or str(e), path) from None
    if not stat.S_ISDIR(parent.st_mode):
        raise Refused("NOT_A_FILE", "its folder is a link", path)
    return digest


def read_block(path: Path, ours: Callable[[str], bool] = bool) -> BlockFile:
    """Checks 1 to 5 of one file; the first that fails is its reason. ``ours`` says whether a model name may be ours.
    Raises Refused. The file is closed again."""
    digest = name_of(path)
    with HostileFile.open(path) as file:
        try:
            block = _Parser(file, digest, ours).block()
            file.metadata.clear()  # many blocks are held at a time, and there may be much in it that nobody asks for
            return block
        except Refused as e:
            raise e if e.path is not None else Refused(e.code, e.detail, path) from None


@dataclass
class _Parser:
    file: HostileFile
    digest: bytes
    ours: Callable[[str], bool]
    #: tensors and marks that nothing has asked for yet
    tensors: set[str] = field(default_factory=set)
    marks: set[str] = field(default_factory=set)

    def block(self) -> BlockFile:
        meta = self.meta = self.file.metadata
        version = self._version()
        self.tensors = set(self.file.tensors)
        self.marks = {key for key in meta if key.startswith("layer_")} - {"layer_cache_types", "layer_meta_states"}
        if meta.get("block_hash") != self.digest.hex():
            raise Refused("HASH", f"it says {meta.get('block_hash', 'nothing')[:80]}")
        model = meta.get("model_name", "")
        if not self.ours(model):
            raise Refused("MODEL", f"it is of {model[:200]!r}")
        types, metas = self._list("layer_cache_types"), self._list("layer_meta_states")
        layers, tokens = self._number("num_layers", MAX_LAYERS), self._number("token_count", MAX_BLOCK)
        if not len(types) == len(metas) == layers or not all(isinstance(t, str) for t in types):
            raise Refused("COUNTS", f"{layers} layers, {len(types)} types, {len(metas)} metas")
        block = self._number("block_size", MAX_BLOCK, "BLOCK_SIZE") if "block_size" in meta else None
        if block is not None and tokens > block:
            raise Refused("COUNTS", f"{tokens} tokens in a block of {block}")
        read = [self._layer(i, _canonical(t), m) for i, (t, m) in enumerate(zip(types, metas, strict=True))]
        if self.tensors or self.marks:
            left = sorted(self.tensors or self.marks)
            raise Refused("TENSORS", f"nothing says what {left[0][:80]} is")
        for layer in read:
            self._check(layer)
        if self.file.ends_in_zeros(_PAGE):
            raise Refused("HOLE")
        return BlockFile(self.file, self.digest, version, model, tokens, block, tuple(read))

    def _version(self) -> str:
        meta = self.meta
        version = meta.get("omlx_cache_format_version", "1")
        if version == "1":
            raise Refused("TOO_OLD", "format 1" if "omlx_cache_format_version" in meta else "no format version")
        if version not in ("2", "3"):
            raise Refused("TOO_NEW", f"format {version[:20]}")
        if any("_turboquant" in key or "_tq_" in key for key in meta) or any("_tq_" in t for t in self.file.tensors):
            raise Refused("TURBOQUANT")
        if "layer_cache_types" in meta and "TurboQuantKVCache" in meta["layer_cache_types"]:
            raise Refused("TURBOQUANT")
        if "cache_signature" in meta:
            signature = self._json("cache_signature", {}, "COUNTS")
            if signature.get("turboquant_kv_bits"):
                raise Refused("TURBOQUANT", f"{str(signature['turboquant_kv_bits'])[:20]} bits")
            if signature.get("gdn_sidecar_state_dtype"):
                raise Refused("SIDECAR", f"states in {str(signature['gdn_sidecar_state_dtype'])[:40]}")
        return version

    # metadata

    def _json(self, key: str, kind: Any, code: str) -> Any:
        try:
            value = loads(self.meta.get(key, ""), values=100_000)
        except ValueError as e:
            raise Refused(code, f"{key}: {e}"[:200]) from None
        if not isinstance(value, type(kind)):
            raise Refused(code, f"{key} is of another type")
        return value

    def _list(self, key: str) -> list[Any]:
        value = self._json(key, [], "COUNTS")
        if len(value) > MAX_LAYERS:
            raise Refused("COUNTS", f"{key} has {len(value):,} items")
        return value

    def _number(self, key: str, most: int, code: str = "COUNTS") -> int:
        text = self.meta.get(key, "")
        if not _NUMBER.fullmatch(text) or not 0 < int(text) <= most:
            raise Refused(code, f"{key} is {text[:40]!r}")
        return int(text)

    def _mark(self, key: str) -> str | None:
        self.marks.discard(key)
        return self.meta.get(key)

    def _count(self, key: str, most: int) -> int | None:
        text = self._mark(key)
        if text is None:
            return None
        if not _NUMBER.fullmatch(text) or not 1 <= int(text) <= most:
            raise Refused("ELEMENTS", f"{key} is {text[:40]!r}")
        return int(text)

    # layers

    def _layer(self, i: int, cls: str, meta: Any) -> Layer:
        here = f"layer_{i}"
        members = self._count(f"{here}_sub_count", MAX_MEMBERS)
        mode = self._mark(f"{here}_storage_mode")
        if mode not in (None, "pm"):
            raise Refused("TOO_NEW", f"layer {i} is stored as {mode[:40]!r}")
        if (cls != _LIST and members is not None) or (mode is not None and members is None):
            raise Refused("COUNTS", f"layer {i} is a {cls[:40]} with members")
        if members is not None:
            names, metas = self._members(i, meta, members)
            subs = [self._part(f"{here}_sub_{j}", names[j], metas[j], j) for j in range(members)]
            return Layer(i, cls, mode or "legacy", tuple(subs))
        part = self._part(here, cls, meta, None)
        if cls != "KVCache" and self._is_placeholder(part):
            return Layer(i, cls, "placeholder")
        if cls == _LIST:
            raise Refused("COUNTS", f"layer {i} is a CacheList without members")
        return Layer(i, cls, "flat", (part,))

    @staticmethod
    def _members(i: int, meta: Any, members: int) -> tuple[list[str], list[Any]]:
        """Class names and metas of a CacheList's members."""
        lists = isinstance(meta, list) and len(meta) == 2 and all(isinstance(m, list) for m in meta)
        if not lists or not len(meta[0]) == len(meta[1]) == members or not all(isinstance(n, str) for n in meta[0]):
            raise Refused("COUNTS", f"layer {i} has {members} members, and its meta names others")
        return [_canonical(n) for n in meta[0]], meta[1]

    def _part(self, here: str, cls: str, meta: Any, sub: int | None) -> Part:
        said = self._mark(f"{here}_state_class_name")
        if said is not None and said.endswith("Cache") and _canonical(said) != cls:  # else the type of the list
            raise Refused("CLASS", f"{here} is a {cls[:40]} and a {said[:40]}")
        if f"{here}_keys" in self.tensors or f"{here}_values" in self.tensors:
            elements = [self._element(f"{here}_{name}", 0) for name in ("keys", "values")]
        else:
            elements = self._elements(here, 0)
        return Part(cls, tuple(elements), meta, sub)

    def _elements(self, here: str, depth: int) -> list[Element]:
        count = self._count(f"{here}_state_count", MAX_ELEMENTS)
        if count is None:
            raise Refused("TENSORS", f"{here} has no state")
        return [self._element(f"{here}_state_{k}", depth) for k in range(count)]

    def _element(self, name: str, depth: int) -> Element:
        nested = self._mark(f"{name}_nested")
        if nested is not None:
            if nested not in ("tuple", "nstate") or depth == _MAX_NESTING:
                raise Refused("MARKERS", f"{name}_nested is {nested[:40]!r}")
            return Element(inner=tuple(self._elements(name, depth + 1)))
        if name not in self.tensors:
            raise Refused("TENSORS", f"{name} is missing")
        self.tensors.discard(name)
        tensor = self.file.tensors[name]
        none, zero = self._mark(f"{name}_none"), self._mark(f"{name}_zero_dim")
        if none is None and zero is None:
            return Element(name, tensor.dtype, tensor.shape)
        if none not in (None, "1") or (none is not None and zero is not None) or not self._is_zero(name):
            raise Refused("MARKERS", f"{name} is marked as None, or as empty, and is not")
        if zero is None:
            return Element(name, none=True)
        if not _DIMS.fullmatch(zero) or 0 not in (shape := tuple(map(int, zero.split(",")))):
            raise Refused("MARKERS", f"{name}_zero_dim is {zero[:40]!r}")
        return Element(name, shape=shape, empty=True)

    def _is_zero(self, name: str) -> bool:
        """One float32 zero: what stands where there is no array."""
        t = self.file.tensors[name]
        return (t.dtype, t.shape) == ("F32", (1,)) and self.file.read(name)[0] == 0

    def _is_placeholder(self, part: Part) -> bool:
        plain = len(part.elements) == 2 and all(e.inner is None and not e.none and not e.empty for e in part.elements)
        return plain and all(self._is_zero(e.tensor) for e in part.elements)

    # classes

    def _check(self, layer: Layer) -> None:
        if layer.cls not in _KNOWN:
            raise Refused("CLASS", f"layer {layer.index} is a {layer.cls[:60]}")
        for part in layer.parts:
            place = f"layer {layer.index}" + (f", member {part.sub}" if part.sub is not None else "")
            if part.cls not in _KNOWN or (part.cls == _LIST and part.sub is not None):
                raise Refused("CLASS", f"{place} is a {part.cls[:60]}")
            if part.cls in ("KVCache", "RotatingKVCache"):
                self._rows(part, place)

    @staticmethod
    def _rows(part: Part, place: str) -> None:
        """Keys and values, [1, heads, rows, width] both, of one floating dtype."""
        if len(part.elements) != 2 or any(e.inner is not None or e.none for e in part.elements):
            raise Refused("SHAPE", f"{place}: not keys and values")
        keys, values = (e.shape for e in part.elements)
        if len(keys) != 4 or keys[:3] != values[:3] or len(values) != 4 or keys[0] != 1:
            raise Refused("SHAPE", f"{place}: keys {list(keys)}, values {list(values)}")
        dtypes = {e.dtype for e in part.elements if not e.empty}
        if len(dtypes) > 1 or not dtypes <= {"F16", "BF16", "F32"}:
            raise Refused("DTYPE", f"{place}: {', '.join(sorted(dtypes))}")
