"""Layout: the kinds, shapes and dtypes of a model's state, found by running the model, and their digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from ..errors import MlxkvError
from .kinds import members_of
from .member import Member
from .state import SequenceState
from .tensors import RECORD_KINDS, ROW_KINDS, TensorSpec

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
    path: tuple[int, ...]
    kind: str
    record: str
    params: tuple[tuple[str, int], ...]
    window: int | None
    keep: int
    tensors: tuple[TensorSpec, ...]

    def needs(self, position: int) -> list[tuple[int, int]]:
        """The spans of rows that must be there to resume at ``position``, in order and disjoint."""
        if self.record == "state":
            return []
        if self.window is None or position <= self.keep + self.window:
            spans = [(0, position)]
        else:
            spans = [(0, self.keep), (position - self.window, position)]
        return [(a, b) for a, b in spans if a < b]


@dataclass(frozen=True)
class Layout:
    """The tuple of members. Two models whose layouts have the same digest can read each other's records."""

    members: tuple[MemberSpec, ...]

    @cached_property
    def digest(self) -> bytes:
        plain = [[m.path, m.kind, m.params, [[t.name, t.dtype, t.shape] for t in m.tensors]] for m in self.members]
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

    def tensors(self, *kinds: str) -> list[TensorSpec]:
        return [t for m in self.members if m.record in kinds for t in m.tensors]

    def fits(self, kinds: tuple[str, ...], arrays: dict[str, mx.array], rows: int) -> bool:
        """Whether ``arrays`` are just what records of these kinds hold of ``rows`` rows."""
        want = {t.name: (t.dtype, t.sized(rows)) for t in self.tensors(*kinds)}
        return want == {name: (DTYPE_NAME.get(a.dtype), a.shape) for name, a in arrays.items()}

    def describe(self) -> str:
        """For people: how many members of each kind, for instance ``6 recurrent, 2 growing``."""
        counts: dict[str, int] = {}
        for m in self.members:
            counts[m.kind] = counts.get(m.kind, 0) + 1
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
        tensors.append(TensorSpec(tensor_name(member, name), DTYPE_NAME[array.dtype], tuple(shape)))
    return MemberSpec(
        path=member.path,
        kind=member.kind,
        record=member.record,
        params=tuple(sorted(member.params().items())),
        window=member.window(),
        keep=member.keep(),
        tensors=tuple(tensors),
    )


def probe(model: Callable[..., mx.array], make_cache: Callable[[], list[Any]]) -> Layout:
    """The layout that ``model`` really uses, seen on a throw-away cache once two forwards leave the same shapes: a
    slot may take a few tokens to fill.

    Raises UnknownCache for a class without a kind, LayoutError where shapes or dtypes do not settle, PositionError
    where a member does not count its tokens.
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
