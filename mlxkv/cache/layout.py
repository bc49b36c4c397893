"""Layout: the kinds, shapes and dtypes of a model's state, found by running the model, and their digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mlx.core as mx

from ..errors import MlxkvError
from .kinds import members_of
from .member import Member
from .packing import Packing
from .rules import spans
from .state import SequenceState
from .tensors import RECORD_KINDS, ROW_KINDS, TensorSpec, check_store_bits

#: tokens run, one after the other, until two forwards in a row leave the same shapes
_PROBE = (2, *[1] * 16)

#: safetensors dtype name -> MLX dtype, for each dtype of ``tensors.HOST_DTYPE``
MLX_DTYPE: dict[str, mx.Dtype] = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "U8": mx.uint8,
    "I64": mx.int64,
}
DTYPE_NAME = {dtype: name for name, dtype in MLX_DTYPE.items()}


class LayoutError(MlxkvError):
    """The state of this model has no stable layout, so it cannot be stored; the message says why."""


@dataclass(frozen=True)
class MemberSpec:
    """One member: ``tensors`` as it holds them, ``stored`` as records do. ``bits``: what its rows are quantised to in
    records, None for rows as they are."""

    path: tuple[int, ...]
    kind: str
    record: str
    params: tuple[tuple[str, int], ...]
    window: int | None
    keep: int
    tensors: tuple[TensorSpec, ...]
    packable: bool = False
    bits: int | None = None

    @cached_property
    def packings(self) -> dict[str, Packing]:
        """By name, for the tensors that are stored quantised."""
        if self.bits is None or not self.packable:
            return {}
        found = {t.name: Packing.of(t, self.bits) for t in self.tensors}
        return {name: packing for name, packing in found.items() if packing is not None}

    @cached_property
    def stored(self) -> tuple[TensorSpec, ...]:
        """The tensors of a record of this member."""
        packings = self.packings
        return tuple(s for t in self.tensors for s in (packings[t.name].stored(t) if t.name in packings else (t,)))

    def needs(self, position: int) -> list[tuple[int, int]]:
        """The spans of rows that must be there to resume at ``position``, in order and disjoint."""
        return spans(self, position)


@dataclass(frozen=True)
class Layout:
    """The tuple of members. Two models whose layouts have the same digest can read each other's records."""

    members: tuple[MemberSpec, ...]

    @cached_property
    def digest(self) -> bytes:
        plain = []
        for m in self.members:
            plain.append([m.path, m.kind, m.params, [[t.name, t.dtype, t.shape] for t in m.tensors]])
            if m.packings:
                plain[-1].append([[name, p.bits, p.group] for name, p in m.packings.items()])
        return hashlib.sha256(json.dumps(plain, separators=(",", ":")).encode()).digest()

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The record kinds of an entry, in the order of RECORD_KINDS. Rows are always one of them: without growing
        members the record has no tensors, and carries the chain of tokens."""
        present = {m.record for m in self.members} | {"rows"}
        return tuple(kind for kind in RECORD_KINDS if kind in present)

    @cached_property
    def row_kinds(self) -> tuple[str, ...]:
        """The record kinds that hold rows: an entry without one of them cannot be stood on."""
        return tuple(kind for kind in self.kinds if kind in ROW_KINDS)

    @property
    def growing_only(self) -> bool:
        """Every member can stand at any position that has rows."""
        return {m.kind for m in self.members} == {"growing"}

    @property
    def needs_state(self) -> bool:
        return "state" in self.kinds

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """The windows of windowed members, in rows, shortest first."""
        return tuple(sorted(m.window or 0 for m in self.members if m.record == "window"))

    def packed(self, bits: int | None) -> Layout:
        """This layout with rows that are stored quantised to ``bits`` wherever they can be; None: nowhere. Raises
        ConfigError."""
        check_store_bits(bits)
        asked = [replace(m, bits=bits) for m in self.members]
        return Layout(tuple(m if m.packings else replace(m, bits=None) for m in asked))

    @cached_property
    def packings(self) -> dict[str, Packing]:
        """By name, for the tensors that are stored quantised."""
        return {name: packing for m in self.members for name, packing in m.packings.items()}

    @property
    def store_bits(self) -> int | None:
        """What rows are quantised to in records; None if none are."""
        return next((m.bits for m in self.members if m.packings), None)

    def tensors(self, *kinds: str) -> list[TensorSpec]:
        """The tensors of records of these kinds."""
        return [t for m in self.members if m.record in kinds for t in m.stored]

    def held(self, *kinds: str) -> list[TensorSpec]:
        """What the members of these record kinds hold; ``tensors`` are what records have of it."""
        return [t for m in self.members if m.record in kinds for t in m.tensors]

    def fits(self, kinds: tuple[str, ...], arrays: dict[str, mx.array], tokens: int, start: int = 0) -> bool:
        """Whether ``arrays`` are just what the members of these record kinds hold of ``tokens`` tokens from ``start``
        on."""
        want = {t.name: (t.dtype, t.sized(tokens, start)) for t in self.held(*kinds)}
        return want == {name: (DTYPE_NAME.get(a.dtype), a.shape) for name, a in arrays.items()}

    def describe(self) -> str:
        """For people: how many members of each kind, for instance ``6 recurrent, 2 growing (stored in 8 bits)``."""
        counts: dict[str, int] = {}
        for m in self.members:
            kind = f"{m.kind} (stored in {m.bits} bits)" if m.packings else m.kind
            counts[kind] = counts.get(kind, 0) + 1
        return ", ".join(f"{n} {kind}" for kind, n in counts.items())


def tensor_name(member: Member | MemberSpec, array: str) -> str:
    return ".".join(map(str, member.path)) + "." + array


def _spec(member: Member) -> MemberSpec:
    tensors = []
    for name, array in member.arrays().items():
        if array.dtype not in DTYPE_NAME:
            raise LayoutError(f"Member {member.label} keeps {array.dtype}, which records do not hold.")
        if array.shape[0] != 1:
            raise LayoutError(f"Member {member.label} has a batch axis of {array.shape[0]}.")
        shape = list(array.shape)
        if member.record != "state":
            if array.ndim != 4:
                raise LayoutError(f"Member {member.label} keeps rows in {array.ndim} dimensions, not 4.")
            shape[2] = 0
        tensors.append(TensorSpec(tensor_name(member, name), DTYPE_NAME[array.dtype], tuple(shape), member.per()))
    spec = MemberSpec(
        path=member.path,
        kind=member.kind,
        record=member.record,
        params=tuple(sorted(member.params().items())),
        window=member.window(),
        keep=member.keep(),
        tensors=tuple(tensors),
        packable=member.packable,
    )
    spec.needs(1)
    return spec


def probe(model: Callable[..., mx.array], make_cache: Callable[[], list[Any]]) -> Layout:
    """The layout that ``model`` really uses, seen on a throw-away cache once two forwards leave the same shapes: a
    slot may take a few tokens to fill.

    Raises UnknownCache for a class without a kind, RuleError for a kind without a rule, LayoutError where shapes or
    dtypes do not settle, PositionError where a member does not count its tokens.
    """
    caches = make_cache()
    state = SequenceState(caches, members_of(caches))
    before: tuple[MemberSpec, ...] = ()
    for n in _PROBE:
        logits = model(mx.zeros((1, n), dtype=mx.int32), cache=caches)
        state.advance(n)
        state.catch_up()
        mx.eval(logits, state.live())
        seen = tuple(_spec(m) for m in state.members or ())
        if seen == before:
            return Layout(seen)
        before = seen
    raise LayoutError("The shapes or dtypes of the state change from token to token.")
