"""The recorder: what a running sequence leaves behind for the store, provisional until a clean barrier.

It follows one sequence. ``flush`` copies rows computed since the last flush to private host memory, and states at
boundaries that a forward went past; ``boundary`` adds the recurrent state at exactly this position and cuts entries on
the block grid; ``commit``, called after a barrier, hands the finished entries to the writer; ``drop`` forgets what no
barrier has confirmed.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from .host import private_copy
from .inside import Inside
from .keys import Identity, KeySpace, answer_digest
from .layout import Layout, tensor_name
from .planner import Plan
from .ram import Draft
from .record import Body, HostArrays, Meta
from .state import Member, PositionError
from .tensors import TensorSpec
from .tiers import Handover

log = logging.getLogger("mlxkv.cache")

#: a group is handed over once this many bytes are confirmed; with the rows that are not cut yet this stays well below
#: the 64 MB that storing may take beyond the queue
GROUP_BYTES = 32 << 20


def _fault_is_a_miss(method: Callable[..., None]) -> Callable[..., None]:
    """What goes wrong in recording costs a later miss, not the request. Errors of the device (RuntimeError) are raised:
    what it computed cannot be trusted."""

    @functools.wraps(method)
    def guarded(self: Recorder, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except RuntimeError:
            raise
        except Exception as e:
            log.warning("nothing more of this request is stored: %s: %s", type(e).__name__, e)
            self.drop()

    return guarded


@dataclass
class _Rows:
    start: int
    end: int
    arrays: HostArrays


class Followed(Protocol):
    """A sequence's state as a recorder needs it: a ``SequenceState``, or a row of a batch."""

    @property
    def members(self) -> Sequence[Member] | None: ...

    @property
    def position(self) -> int: ...

    def catch_up(self) -> None: ...


@dataclass
class Recorder:
    """``tokens`` is the sequence's own list (prompt, then generated ids) and may grow. ``handover`` takes finished
    groups; ``stored`` says whether a key is stored with all its rows, and with a state."""

    state: Followed
    tokens: list[int]
    space: KeySpace
    layout: Layout
    identity: Identity
    software: str
    handover: Handover
    stored: Callable[[bytes], tuple[bool, bool]]
    plan: Plan
    barrier: Callable[[], None]
    #: tokens whose records were handed to the writer
    stored_tokens: int = 0
    # the block being filled hangs on _parent, the block before it on _before; rows up to _written are in entries,
    # rows up to _flushed are on the host; _base has the rows before _written
    _parent: bytes = b""
    _before: bytes | None = None
    _base: bytes | None = None
    _written: int = 0
    _flushed: int = 0
    _rows: list[_Rows] = field(default_factory=list)
    _provisional: list[Draft] = field(default_factory=list)
    _dead: bool = False
    #: where the state was captured last
    _kept: int = 0

    def __post_init__(self) -> None:
        self._parent = self.plan.parent or self.space.root
        self._base = self.plan.base.key if self.plan.base else None
        self._written = self._flushed = self.plan.position  # what was restored is stored, in ``plan.base`` or before it

    def _block_start(self, position: int) -> int:
        return position // self.space.block * self.space.block

    @property
    def reach(self) -> int:
        """How many decoded tokens may pass before ``flush`` must be called: windows forget older rows."""
        return min((*self.layout.windows, self.space.block))

    @_fault_is_a_miss
    def flush(self, inside: Inside | None = None, roles: Mapping[int, str] | None = None) -> None:
        """Copy rows [flushed, position) out. Call while the state is evaluated and no newer step is built.

        ``inside``: boundaries that the last forward, all of which is not flushed yet, went past without a cut; their
        states are kept too, in the ``roles`` that they have (position -> one of ``policy.ROLES``).
        """
        a, b = self._flushed, self.state.position
        if self._dead or a >= b:
            return
        if inside and not all(a < p < b for p in inside.positions):
            raise PositionError(f"Boundaries {inside.positions} are not inside tokens [{a}, {b}).")
        # lazy, and before rows are made: a head forgets hidden states then
        members = [m for m in self.state.members or () if m.record == "state"]
        states = {p: {m: m.state_at(p, inside) for m in members} for p in inside.positions} if inside else {}
        self.state.catch_up()
        arrays = self._capture(self.layout.row_kinds, lambda member: member.rows(a, b), b - a, a)
        if arrays is None:
            return
        self._rows.append(_Rows(a, b, arrays))
        self._flushed = b
        for position, state in states.items():
            self._fill(position)
            self._keep(position, state.__getitem__, role=(roles or {}).get(position, "message"))
        self._fill(b)

    def _fill(self, end: int) -> None:
        """Cut the full blocks up to ``end``."""
        while not self._dead and self._block_start(end) > self._block_start(self._written):
            self._entry(self._block_start(self._written) + self.space.block, None)

    @_fault_is_a_miss
    def boundary(self, answer: tuple[int, str, int | None] | None = None, role: str = "message") -> None:
        """The sequence stands at a boundary: keep its state here. ``role`` is one of ``policy.ROLES``; ``answer`` =
        (first token, text, last unprocessed id) marks this position as the end of an answer."""
        if self._dead:
            return
        self.flush()
        self._keep(self.state.position, lambda member: member.arrays(), answer, role)

    def _keep(
        self,
        position: int,
        read: Callable[[Member], dict[str, mx.array]],
        answer: tuple[int, str, int | None] | None = None,
        role: str = "message",
    ) -> None:
        """Cut the entry that ends at ``position``, with the state that ``read`` gives. Blocks before it are cut."""
        if self._dead or self._flushed < position or position == 0:
            return
        start = self._block_start(position - 1)
        parent = self._parent if position % self.space.block else self._before
        if parent is None:
            return  # restored to exactly this full block: it is stored already
        key = self.space.key(parent, self.tokens[start:position])
        state: HostArrays | None = None
        if self.layout.needs_state and self._kept != position and not self.stored(key)[1]:
            state = self._capture(("state",), read, 0)
            if state is None:
                return
            self._kept = position
        digest = None
        if answer is not None:
            first, text, last = answer
            digest = (answer_digest(self.space.root, self.tokens[:first], text), first, last)
        if position == self._written:
            # rows up to here are cut already (a full block) or stored (a leaf): only what is new is added
            if state is not None or digest is not None:
                self._add(key, parent, start, position, start, None, {}, state, digest, role)
        else:
            self._entry(position, state, digest, role)

    @_fault_is_a_miss
    def commit(self, *, everything: bool = False, now: bool = False) -> None:
        """A barrier has confirmed all that was captured so far; hand over full groups, ``now`` what there is, or
        ``everything`` at the end of the request."""
        size = sum(d.nbytes for d in self._provisional)
        if size < GROUP_BYTES and not everything and not (now and size):
            return
        if self._provisional:
            self.barrier()
        group, self._provisional = self._provisional, []
        if self.handover.submit(group, everything):
            if not self.handover.ram_only:
                self.stored_tokens += sum(d.meta.end - d.meta.row_start for d in group if "rows" in d.bodies)
        else:
            self._dead = True  # later entries would hang on these

    def drop(self) -> None:
        """Forget everything that was not handed over, and record nothing more."""
        self._provisional.clear()
        self._rows.clear()
        self._dead = True
        self.handover.drop()

    # cutting entries

    def _entry(
        self,
        end: int,
        state: HostArrays | None,
        answer: tuple[bytes, int, int | None] | None = None,
        role: str = "",
    ) -> None:
        """Cut the entry that ends at ``end`` (a leaf, or a full block if on the grid) from the rows flushed so far."""
        start = self._block_start(end - 1)
        key = self.space.key(self._parent, self.tokens[start:end])
        row_start = self._written
        rows: dict[str, HostArrays] = {}
        if not self.stored(key)[0]:
            for kind in self.layout.row_kinds:
                rows[kind] = self._cut(row_start, end, self.layout.tensors(kind))
        if rows or state is not None or answer is not None:
            self._add(key, self._parent, start, end, row_start, self._base, rows, state, answer, role)
        if end % self.space.block == 0:
            self._before, self._parent, self._base = self._parent, key, None
        else:
            self._base = key
        self._written = end
        self._rows = [r for r in self._rows if r.end > end]

    def _add(
        self,
        key: bytes,
        parent: bytes,
        start: int,
        end: int,
        row_start: int,
        base: bytes | None,
        rows: dict[str, HostArrays],
        state: HostArrays | None,
        answer: tuple[bytes, int, int | None] | None,
        role: str,
    ) -> None:
        bodies = {kind: Body.of(arrays) for kind, arrays in rows.items()}
        if state is not None:
            bodies["state"] = Body.of(state)
        note = "" if answer is None else json.dumps({"digest": answer[0].hex(), "start": answer[1], "last": answer[2]})
        meta = Meta(
            kind="",
            key=key,
            root=self.space.root,
            parent=parent,
            start=start,
            end=end,
            row_start=row_start,
            base=base,
            tokens=tuple(self.tokens[start:end]),
            block=self.space.block,
            layout=self.layout.digest,
            model=self.identity.name,
            fingerprint=self.identity.fingerprint,
            compute=self.identity.compute_json(),
            software=self.software,
            answer=note,
            role=role if state is not None else "",
            store_bits=self.layout.store_bits or 0,
        )
        needs = tuple(k for k in (parent, base) if k is not None)
        if not rows:
            needs = (*needs, key)  # a state or an answer alone is of use only where its rows are
        self._provisional.append(Draft(meta, bodies, needs, answer))

    def _cut(self, a: int, b: int, specs: Sequence[TensorSpec]) -> HostArrays:
        parts = [r for r in self._rows if r.start < b and r.end > a]
        if not parts or parts[0].start > a or parts[-1].end < b:
            raise PositionError(f"Rows [{a}, {b}) were not flushed.")
        out: HostArrays = {}
        for t in sorted(specs, key=lambda t: t.name):
            slices = [r.arrays[t.name][1][:, :, t.part(max(a, r.start), min(b, r.end), r.start)] for r in parts]
            out[t.name] = (parts[0].arrays[t.name][0], np.ascontiguousarray(np.concatenate(slices, axis=2)))
        return out

    def _capture(
        self, kinds: tuple[str, ...], read: Callable[[Member], dict[str, mx.array]], tokens: int, start: int = 0
    ) -> HostArrays | None:
        """Private host copies, taken after a barrier, of what ``read`` gives for the members of these record kinds
        (rows: of ``tokens`` tokens from ``start`` on), in the form that is stored.

        None if a member does not hold yet what the layout says (a slot that fills with the first tokens, a head before
        its second): there is nothing to resume from. None too, and nothing more is recorded, if a value is not finite.
        """
        lazy = {
            tensor_name(spec, name): array
            for member, spec in zip(self.state.members or (), self.layout.members, strict=True)
            if member.record in kinds
            for name, array in read(member).items()
        }
        if not self.layout.fits(kinds, lazy, tokens, start):
            return None
        finite = [mx.isfinite(a).all() for a in lazy.values() if mx.issubdtype(a.dtype, mx.floating)]
        for name, packing in self.layout.packings.items():
            if name in lazy:
                parts = packing.pack(name, lazy.pop(name))
                # what a restore makes of them: in float16 a wide group can run over
                finite.append(mx.isfinite(packing.unpack(name, parts)).all())
                lazy |= parts
        mx.eval(list(lazy.values()), finite)
        self.barrier()
        if not all(f.item() for f in finite):
            quantised = ", or does once it is quantised" if self.layout.packings else ""
            log.warning(
                "the model's state at token %d holds NaN or infinity%s: nothing is stored",
                self.state.position,
                quantised,
            )
            self.drop()
            return None
        return {name: private_copy(a) for name, a in lazy.items()}
