"""Proof that a prompt-cache file was made from a prompt: the first layer that keeps all its rows is computed again.

The model is called with a cache whose first such member takes the keys and values that it is given and ends the forward
there: only the layers below it and its own projections run, in chunks. A token that is another one gives other rows at
its own place, whatever follows, so that the rows are compared token by token.

What is compared, and what each says:

* every row of that member, with the prompt's: the tokens, the embedding, the layers below, the projection's weights;
* what the members below it hold at the end (states, the rows of a window): that it belongs to these tokens;
* of the first ``SAMPLE`` tokens the rows of every growing member, from one forward of the whole model: the weights of
  the layers up to the last that grows (another model of the same shape, an adapter on upper layers).

Not compared: states and windows above, and rows of upper layers behind the first tokens. Nothing short of a prefill
computes those.

**Bounds.** The distance of a row is |file − computed| / |computed| (2-norms over its heads), the larger of keys and
values: keys may be mostly bias, values are not. Another token is far: at least 0.22 away in SmolLM2-135M (half of its
tokens 0.48 from the nearest other one), 0.9 and more in models of random weights. Exceptions are tokens that were never
trained apart (two of SmolLM2's 17 special ones are 7e-4 apart): what they lead to is as near, and they are not told
apart. The same token, computed by another BLAS and in other chunks, was at most 2e-6 away in float32, 2.1e-3 in float16
and 1.4e-2 in bfloat16, layers below included; a GPU's TF32 products cost 1e-3. The bounds stand between.
In ``exact`` on a CPU the promise is bits: rows that nothing below could make differ must be equal bit by bit, and the
others (a chunked scan, a window that is cut elsewhere) within 1e-5; what is further off was computed with other
numerics and is refused as NUMERICS, not as another prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList

from ..host import from_host, private_copy
from ..layout import MemberSpec, tensor_name
from ..member import Member
from ..state import members_of
from .prefix import HostArrays
from .prompt_members import Contents, FileMember
from .reasons import Refused

#: how far a row of the same token may be, by the dtype that it is kept in
BOUND = {"F32": 2e-3, "F16": 2e-2, "BF16": 6e-2}
#: the same in ``exact``, where layers below are cut by chunks
EXACT = 1e-5
#: what upper layers add, for the middle of the sampled rows: experts that are chosen otherwise move a few of them far
UPPER = 5.0
SAMPLE = 32

Model = Callable[..., mx.array]


@dataclass(frozen=True)
class Prover:
    """``model`` and ``make_cache`` as they run; ``chunk`` tokens a forward; ``exact``: bits are promised."""

    model: Model
    make_cache: Callable[[], list[Any]]
    chunk: int
    exact: bool

    def prove(self, contents: Contents, tokens: list[int]) -> str:
        """What was compared, for people. Raises Refused: PROMPT, NUMERICS, STATE, WEIGHTS; NO_PROOF where no member
        holds a row for each token, after those that one holds were compared."""
        n = len(tokens)
        rows = [m for m in contents.members if m.spec.record != "state"]
        whole = [m for m in rows if m.holds(0, n)]
        if not rows:
            raise Refused("NO_PROOF")
        target = (whole or rows)[0]
        caches = list(self.make_cache())
        members = members_of(caches)
        below = [(m, held) for m, held in zip(members, contents.members, strict=True) if m.path != target.spec.path]
        tap = _tap(caches, members, target.spec.path)
        for a in range(0, n, self.chunk):
            b = min(n, a + self.chunk)
            arrays = self._run(tap, caches, tokens[a:b], [m for m, _ in below])
            if not arrays:
                raise Refused("NO_PROOF", f"layer {target.label} does not run on its own")
            self._compare(contents, target, arrays, a, tokens[a:b], deep=target is not contents.members[0])
        for member, held in below:
            if member.path < target.spec.path:
                self._compare_below(contents, member, held, n)
        self._sample(contents, tokens)
        if not whole:
            held = sum(run.end - run.start for run in target.runs)
            raise Refused("NO_PROOF", f"its windows hold rows of {held} tokens, which are the prompt's, of {n}")
        return f"the rows of layer {target.label} are the prompt's"

    def _run(self, tap: _Tap, caches: list[Any], tokens: list[int], below: list[Member]) -> dict[str, mx.array]:
        """The rows that the tapped member is given for ``tokens``; empty if it is given none."""
        tap.begin()
        try:
            self.model(mx.array(tokens, mx.int32)[None], cache=caches)
        except _Taken:
            mx.eval(list(tap.taken.values()), [a for m in below for a in m.live()])
            return tap.taken
        return {}

    def _compare(
        self, contents: Contents, target: FileMember, arrays: dict[str, mx.array], a: int, tokens: list[int], deep: bool
    ) -> None:
        for run in target.runs:
            x, y = max(a, run.start), min(a + len(tokens), run.end)
            if x >= y:
                continue
            mine = _named(target.spec, {name: array[..., x - a : y - a, :] for name, array in arrays.items()})
            held = target.rows(contents.file, x, y)
            distance, bound = _distance(target.spec, held, mine)
            if len(bad := np.flatnonzero(~(distance <= bound))):
                i = x + int(bad[0])
                raise Refused(
                    "PROMPT",
                    f"token {i} (id {tokens[i - a]}) is the first whose row in layer {target.label} is another one "
                    "than this prompt and these weights give",
                    contents.file.path,
                )
            if self.exact and not _same(held, mine) and not (deep and bool((distance <= EXACT).all())):
                raise Refused("NUMERICS", f"layer {target.label}: up to {distance.max():.1e} off", contents.file.path)

    def _compare_below(self, contents: Contents, member: Member, held: FileMember, n: int) -> None:
        member.catch_up()
        if member.record == "state":
            spans, mine = [(0, 0)], [member.arrays()]
            theirs = [held.state(contents.file)]
        else:
            spans = [(a, b) for a, b in held.spec.needs(n) if held.holds(a, b) and b == n]
            mine = [member.rows(a, b) for a, b in spans]
            theirs = [held.rows(contents.file, a, b) for a, b in spans]
        for arrays, there in zip(mine, theirs, strict=True):
            if not arrays:
                continue  # the forward never came there
            distance, bound = _distance(held.spec, there, _named(held.spec, arrays))
            if not bool((distance <= (EXACT if self.exact else bound)).all()):
                raise Refused("STATE", f"layer {held.label}: {distance.max():.1e} off", contents.file.path)

    def _sample(self, contents: Contents, tokens: list[int]) -> None:
        """Compare the first rows of all growing members."""
        some = tokens[:SAMPLE]
        growing = [(i, m) for i, m in enumerate(contents.members) if m.spec.kind == "growing"]
        if len(growing) < 2:
            return
        caches = self.make_cache()
        members = members_of(caches)
        mx.eval(self.model(mx.array(some, mx.int32)[None], cache=caches), [a for m in members for a in m.live()])
        for i, held in growing:
            there = held.rows(contents.file, 0, len(some))
            distance, bound = _distance(held.spec, there, _named(held.spec, members[i].rows(0, len(some))))
            off = float(distance.max() if self.exact else np.median(distance))
            if not off <= (10 * EXACT if self.exact else UPPER * bound):
                raise Refused("WEIGHTS", f"layer {held.label}: {off:.1e} off", contents.file.path)


class _Taken(Exception):
    """The tapped member was given its rows: nothing above is needed."""


class _Tap:
    """Mixed in before a cache's own class: masks and positions are its own, but it keeps no rows. The forward ends in
    it, or once its neighbours in a CacheList have been written: some layers write those behind it."""

    taken: dict[str, mx.array]
    offset: int
    beside: list[_Beside]

    def begin(self) -> None:
        self.taken = {}
        for neighbour in self.beside:
            neighbour.written = set()

    def end(self) -> None:
        if self.taken and all(len(neighbour.written) == len(neighbour.cache) for neighbour in self.beside):
            raise _Taken

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self.taken = {"keys": keys, "values": values}
        if (bits := getattr(self, "bits", None)) is not None:
            parts = {
                name: mx.quantize(v, group_size=self.group_size, bits=bits)  # type: ignore[attr-defined]
                for name, v in self.taken.items()
            }
            self.taken = {
                f"{name}.{part}": array
                for name, arrays in parts.items()
                for part, array in zip(("packed", "scales", "biases"), arrays, strict=True)
            }
        self.offset += keys.shape[2]  # the next chunk stands behind this one
        self.end()
        return keys, values


class _Beside(ArraysCache):
    """A recurrent neighbour of a tap, which tells it when each of its slots has been written."""

    tap: _Tap
    written: set[int]

    def __setitem__(self, index: int, value: mx.array) -> None:
        super().__setitem__(index, value)
        self.written.add(index)
        self.tap.end()


def _tap(caches: list[Any], members: list[Member], path: tuple[int, ...]) -> _Tap:
    """Put a tap in place of the cache object at ``path``."""
    inside: list[Any] = caches
    for i in path[:-1]:
        inner = list(inside[i].caches)
        inside[i] = CacheList()
        inside[i].caches = inner  # a list, so that it can be assigned into
        inside = inner
    old = inside[path[-1]]
    cls = type("Tap", (_Tap, type(old)), {})
    tap = cls.__new__(cls)
    tap.__dict__.update(vars(old), beside=[])
    inside[path[-1]] = tap
    for member in members:
        if len(path) > 1 and member.path[:-1] == path[:-1] and member.record == "state":
            member.cache = inside[member.path[-1]] = neighbour = _Beside(len(member.cache.cache))
            neighbour.tap, neighbour.written = tap, set()
            tap.beside.append(neighbour)
    return tap


def _named(spec: MemberSpec, arrays: dict[str, mx.array]) -> HostArrays:
    mx.eval(list(arrays.values()))
    return {tensor_name(spec, name): private_copy(mx.contiguous(array)) for name, array in arrays.items()}


def _same(a: HostArrays, b: HostArrays) -> bool:
    return all(a[name][1].tobytes() == array.tobytes() for name, (_, array) in b.items())


def _distance(spec: MemberSpec, theirs: HostArrays, mine: HostArrays) -> tuple[np.ndarray, float]:
    """How far each row of a file is from the computed one (one number for a state), and how far it may be."""
    if set(theirs) != set(mine):
        raise Refused("TENSORS", f"{', '.join(sorted(set(theirs) ^ set(mine)))[:80]} on one side only")
    bound = max([BOUND.get(dtype, 0.0) for dtype, _ in mine.values()])
    bound += 2.0 ** -dict(spec.params).get("bits", 100)  # values at the edge of a step are packed as its neighbour
    out: list[np.ndarray] = []
    for a, b in zip(_plain(spec, theirs), _plain(spec, mine), strict=True):
        if a.shape != b.shape:
            raise Refused("SHAPE", f"{a.shape} where {b.shape} was computed")
        rows = b.shape[2] if spec.record != "state" else 1
        a, b = (np.moveaxis(x, 2, 0).reshape(rows, -1) if spec.record != "state" else x.reshape(1, -1) for x in (a, b))
        with np.errstate(all="ignore"):  # what is not finite is no distance that any bound allows
            difference, size = np.linalg.norm(a - b, axis=1), np.linalg.norm(b, axis=1)
            out.append(np.where(difference == 0, 0.0, difference / np.maximum(size, 1e-30)))
    return np.max(out, axis=0), bound


def _plain(spec: MemberSpec, arrays: HostArrays) -> Iterator[np.ndarray]:
    """The values of each tensor as float32; packed rows as what they stand for."""
    bits = dict(spec.params).get("bits")
    for name, (dtype, array) in sorted(arrays.items()):
        if bits is not None and not name.endswith(".packed"):
            continue
        if bits is not None:
            w, s, b = (
                from_host(arrays[name.removesuffix("packed") + part][1], arrays[name.removesuffix("packed") + part][0])
                for part in ("packed", "scales", "biases")
            )
            values = mx.dequantize(w, s, b, group_size=dict(spec.params)["group_size"], bits=bits)
            yield np.array(values.astype(mx.float32))
        elif dtype == "BF16":
            yield (array.astype(np.uint32) << 16).view(np.float32)
        else:
            yield array.astype(np.float64 if array.dtype.kind in "iu" else np.float32)
