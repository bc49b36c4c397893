"""What the layers of an oMLX block mean to a model: which element is which tensor of which member of its layout.

Only what is exactly a member's state is taken: class, slots, heads, widths and dtypes. A member of which a block holds
nothing (a placeholder) is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..layout import Layout, MemberSpec, tensor_name
from ..tensors import TensorSpec
from .omlx_file import BlockFile, Element, Layer, Part
from .reasons import Refused

#: kind of a member -> the class that oMLX stores it as, and the arrays it has then
_CLASSES = {"growing": "KVCache", "window": "RotatingKVCache", "recurrent": "ArraysCache"}
_ROWS = ("keys", "values")

Path_ = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """Where a tensor of the layout is in a file; "" for one without elements."""

    spec: TensorSpec
    tensor: str


@dataclass(frozen=True)
class Rows:
    """``rows`` rows of a growing member: of the block (``flat``, ``pm``), or of all tokens so far (``legacy``)."""

    mode: str
    rows: int
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Ring:
    """A windowed member: ``rows`` rows in the order of the ring, the next of which goes to ``index``."""

    rows: int
    offset: int
    index: int
    window: int
    keep: int
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class State:
    """A recurrent member. ``refused``: why its arrays cannot be used, None if they can."""

    sources: tuple[Source, ...]
    refused: Refused | None = None


@dataclass
class Fitted:
    """What a block holds of each member, by the member's path."""

    block: BlockFile
    rows: dict[Path_, Rows] = field(default_factory=dict)
    rings: dict[Path_, Ring] = field(default_factory=dict)
    states: dict[Path_, State] = field(default_factory=dict)
    #: "pm" or "legacy" of layers that are CacheLists and no placeholders
    modes: dict[int, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.block.path


def importable(layout: Layout) -> Refused | None:
    """Why no file of oMLX can hold what this layout needs; None if one can."""
    if layout.store_bits is not None:
        return Refused("LAYOUT", f"rows are stored in {layout.store_bits} bits here, and exactly there")
    for m in layout.members:
        names = {t.name for t in m.tensors}
        if m.kind in ("head", "hidden"):
            return Refused("HEAD")
        if m.kind not in _CLASSES or len(m.path) > 2:
            return Refused("LAYOUT", f"member {m.path} is of a kind ({m.kind}) that is not stored there")
        if m.record != "state" and names != {tensor_name(m, a) for a in _ROWS}:
            return Refused("LAYOUT", f"member {m.path} keeps its rows in another form")
    if len({(m.window, m.keep) for m in layout.members if m.record == "window"}) > 1:
        return Refused("LAYOUT", "windows of different lengths are not taken over")
    return None


def fit(block: BlockFile, layout: Layout) -> Fitted:
    """Raises Refused: HEAD, LAYOUT, SHAPE, DTYPE, PADDED."""
    if (no := importable(layout)) is not None:
        raise Refused(no.code, no.detail, block.path)
    members: dict[int, list[MemberSpec]] = {}
    for m in layout.members:
        members.setdefault(m.path[0], []).append(m)
    try:
        if sorted(members) != list(range(len(block.layers))):
            raise Refused("LAYOUT", f"{len(block.layers)} layers, the model has {len(members)}")
        fitted = Fitted(replace(block, layers=()))  # what is of use of them is kept below
        for layer in block.layers:
            _layer(layer, members[layer.index], fitted)
        return fitted
    except Refused as e:
        raise Refused(e.code, e.detail, block.path) from None


def _layer(layer: Layer, members: list[MemberSpec], fitted: Fitted) -> None:
    listed = len(members[0].path) == 2
    want = "CacheList" if listed else _CLASSES[members[0].kind]
    if layer.cls != want:
        raise Refused("LAYOUT", f"layer {layer.index} is a {layer.cls}, the model has a {want}")
    if layer.mode == "placeholder":
        return
    if len(layer.parts) != len(members):
        raise Refused("LAYOUT", f"layer {layer.index} has {len(layer.parts)} members, the model {len(members)}")
    if listed:
        fitted.modes[layer.index] = layer.mode
    for part, m in zip(layer.parts, members, strict=True):
        if part.cls != _CLASSES[m.kind]:
            raise Refused("LAYOUT", f"member {m.path} is a {part.cls}, the model has a {_CLASSES[m.kind]}")
        if m.kind == "growing":
            rows, sources = _rows(part, m)
            fitted.rows[m.path] = Rows(layer.mode, rows, sources)
        elif m.kind == "window":
            fitted.rings[m.path] = _ring(part, m)
        else:
            fitted.states[m.path] = _state(part, m)


def _rows(part: Part, m: MemberSpec) -> tuple[int, tuple[Source, ...]]:
    rows = part.elements[0].shape[2]
    specs = {t.name: t for t in m.tensors}
    sources = []
    for name, element in zip(_ROWS, part.elements, strict=True):
        spec = specs[tensor_name(m, name)]
        sources.append(_source(spec, spec.sized(rows), element))
    return rows, tuple(sources)


def _source(spec: TensorSpec, shape: tuple[int, ...], element: Element) -> Source:
    if element.shape != shape:
        raise Refused("SHAPE", f"{spec.name} is {list(element.shape)}, the model keeps {list(shape)}")
    if element.empty:
        return Source(spec, "")  # its dtype was lost, and nothing depends on it
    if element.dtype != spec.dtype:
        raise Refused("DTYPE", f"{spec.name} is {element.dtype}, the model keeps {spec.dtype}")
    return Source(spec, element.tensor)


def _ring(part: Part, m: MemberSpec) -> Ring:
    meta = part.meta
    whole = isinstance(meta, list) and len(meta) == 4
    if not whole or not all(isinstance(n, str) and n.isascii() and n.isdigit() and len(n) < 11 for n in meta):
        raise Refused("COUNTS", f"member {m.path} does not say where its window stands")
    keep, size, offset, index = map(int, meta)
    if (keep, size) != (m.keep, (m.window or 0) + m.keep):
        raise Refused("LAYOUT", f"member {m.path} keeps {keep} of {size} rows")
    rows, sources = _rows(part, m)
    return Ring(rows, offset, index, size - keep, keep, sources)


def _state(part: Part, m: MemberSpec) -> State:
    elements: Sequence[Element] = part.elements
    if elements[0].inner is not None:  # (slots, left padding, lengths)
        if len(elements) != 3 or any(e.inner is not None for e in elements[1:]):
            raise Refused("LAYOUT", f"member {m.path} has a state of another form")
        if not all(e.none or e.empty for e in elements[1:]):
            raise Refused("PADDED", f"member {m.path}")
        elements = elements[0].inner
    if any(e.inner is not None for e in elements):
        raise Refused("LAYOUT", f"member {m.path} has slots inside slots")
    slots = dict(m.params)["slots"]
    if len(elements) != slots:
        return State((), Refused("SLOTS", f"member {m.path} has {len(elements)} slots, the model {slots}"))
    specs = {t.name: t for t in m.tensors}
    sources = []
    for k, element in enumerate(elements):
        spec = specs.get(tensor_name(m, f"slot{k}"))
        if spec is not None and not element.absent:
            sources.append(_source(spec, spec.shape, element))
        elif spec is not None or not element.absent:
            return State((), Refused("SLOTS", f"slot {k} of member {m.path} is filled on one side only"))
    return State(tuple(sources))
