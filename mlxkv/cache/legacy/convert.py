"""Convert: a proven prefix becomes drafts on the store's own grid, as a recorder would have cut them.

Rows are cut at block borders and at the places where the prefix can be resumed; each row is written once. A window is
stored for the span that its strips cover: where that begins inside a block, the block's rows are cut there too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..host import private_copy
from ..keys import Identity, KeySpace
from ..layout import Layout
from ..ram import Draft
from ..record import Body, Meta
from ..tensors import finite
from .prefix import HostArrays, Prefix, Stand, Strip, load
from .reasons import Refused

#: a group holds so many bytes, or one entry
GROUP_BYTES = 32 << 20


@dataclass(frozen=True)
class Target:
    """What is converted to: keys, layout and identity of the store that takes it."""

    space: KeySpace
    layout: Layout
    identity: Identity
    software: str

    def drafts(
        self, prefix: Prefix, skip: Callable[[bytes, frozenset[str]], bool] = lambda key, kinds: False
    ) -> Iterator[list[Draft]]:
        """Groups of drafts, in the order in which they hang on each other, but for those of which ``skip(key, kinds)``
        says that these records are not wanted: they are not read. Raises Refused (SHAPE, DTYPE, NOT_FINITE, SHORT)
        where what the prefix gives is not what the layout holds."""
        group: list[Draft] = []
        size = 0
        for meta, stand in self._entries(prefix):
            if skip(meta.key, frozenset(self._kinds(prefix, meta, stand))):
                continue
            draft = self._draft(prefix, meta, stand)
            if group and size + draft.nbytes > GROUP_BYTES:
                yield group
                group, size = [], 0
            group.append(draft)
            size += draft.nbytes
        if group:
            yield group

    def outline(self, prefix: Prefix) -> Iterator[tuple[bytes, dict[str, int]]]:
        """What ``drafts`` would make, without reading a row: (key, record kind -> bytes of its tensors)."""
        for meta, stand in self._entries(prefix):
            rows, kinds = meta.end - meta.row_start, self._kinds(prefix, meta, stand)
            yield meta.key, {kind: sum(t.nbytes(rows) for t in self.layout.tensors(kind)) for kind in kinds}

    def _kinds(self, prefix: Prefix, meta: Meta, stand: Stand | None) -> list[str]:
        """The records of an entry, unless reading shows that something is of no use."""
        kinds = ["rows"]
        if self._has("window") and _strip(prefix.stands, meta.row_start, meta.end) is not None:
            kinds.append("window")
        if stand is not None and self.layout.needs_state:
            kinds.append("state")
        return kinds

    def _entries(self, prefix: Prefix) -> Iterator[tuple[Meta, Stand | None]]:
        """Every entry of a prefix, and where it ends at one, its stand."""
        stands = {s.position: s for s in prefix.stands if 0 < s.position <= len(prefix.tokens)}
        parent, base, written = self.space.root, None, 0
        for end in self._cuts(prefix, stands):
            start = (end - 1) // self.space.block * self.space.block
            meta = self._meta(prefix, stands.get(end), parent, base, start, max(start, written), end)
            yield meta, stands.get(end)
            full = end % self.space.block == 0
            parent, base = (meta.key, None) if full else (parent, meta.key)
            written = end

    def _cuts(self, prefix: Prefix, stands: dict[int, Stand]) -> list[int]:
        last = len(prefix.tokens)
        cuts = set(range(self.space.block, last + 1, self.space.block)) | set(stands)
        if self.layout.growing_only:
            cuts.add(last)  # every place can be stood on
        if self.layout.windows:
            ends = {end for stand in stands.values() for s in stand.strips for end in (s.start, s.end)}
            cuts |= {end for end in ends if 0 < end < last}
        return sorted(cuts)

    def _meta(
        self,
        prefix: Prefix,
        stand: Stand | None,
        parent: bytes,
        base: bytes | None,
        start: int,
        row_start: int,
        end: int,
    ) -> Meta:
        tokens = prefix.tokens[start:end]
        return Meta(
            kind="",
            key=self.space.key(parent, tokens),
            root=self.space.root,
            parent=parent,
            start=start,
            end=end,
            row_start=row_start,
            base=base if row_start > start else None,
            tokens=tuple(tokens),
            block=self.space.block,
            layout=self.layout.digest,
            model=self.identity.name,
            fingerprint=self.identity.fingerprint,
            compute=self.identity.compute_json(),
            software=self.software,
            role="message" if stand is not None and self.layout.needs_state else "",
            store_bits=self.layout.store_bits or 0,
        )

    def _draft(self, prefix: Prefix, meta: Meta, stand: Stand | None) -> Draft:
        a, b = meta.row_start, meta.end
        bodies = {"rows": self._body("rows", prefix.rows(a, b) if self._has("rows") else {}, b - a)}
        if self._has("window") and (window := _windows(prefix.stands, a, b)) is not None:
            bodies["window"] = self._body("window", window, b - a)
        if stand is not None and self.layout.needs_state and (state := load(stand.state)) is not None:
            bodies["state"] = self._body("state", state, 0)
        return Draft(meta, bodies, tuple(k for k in (meta.parent, meta.base) if k is not None))

    def _has(self, kind: str) -> bool:
        return any(True for _ in self.layout.tensors(kind))

    def _body(self, kind: str, arrays: HostArrays, rows: int) -> Body:
        """The body of a record, after names, dtypes, shapes and values were compared with what the model holds."""
        specs = {t.name: t for t in self.layout.held(kind)}
        if set(arrays) != set(specs):
            odd = sorted(set(arrays) ^ set(specs))
            raise Refused("LAYOUT", f"{kind}: {', '.join(odd[:4])} on one side only")
        for name, (dtype, array) in arrays.items():
            if dtype != specs[name].dtype:
                raise Refused("DTYPE", f"{name} is {dtype}, the model keeps {specs[name].dtype}")
            if array.shape != specs[name].sized(rows):
                raise Refused("SHAPE", f"{name} is {array.shape}, the model keeps {specs[name].sized(rows)}")
            if not finite(dtype, array):
                raise Refused("NOT_FINITE", name)
        return Body.of(self._packed(arrays))

    def _packed(self, arrays: HostArrays) -> HostArrays:
        """Rows quantised where the layout stores them so, as a recorder does it."""
        out: HostArrays = {}
        for name, (dtype, array) in arrays.items():
            if name not in self.layout.packings:
                out[name] = dtype, array
                continue
            live = mx.array(array)
            live = live.view(mx.bfloat16) if dtype == "BF16" else live
            parts = self.layout.packings[name].pack(name, live)
            mx.eval(*parts.values())
            for part, packed in parts.items():
                out[part] = private_copy(packed)
                if not finite(*out[part]):
                    raise Refused("NOT_FINITE", f"{name}, once it is quantised")
        return out


def _windows(stands: tuple[Stand, ...], a: int, b: int) -> HostArrays | None:
    """Windowed rows [a, b), from one strip that covers them; None if no strip does."""
    strip = _strip(stands, a, b)
    arrays = load(strip.arrays) if strip is not None else None
    if strip is None or arrays is None:
        return None
    out: HostArrays = {}
    for name, (dtype, array) in arrays.items():
        out[name] = dtype, np.ascontiguousarray(array[:, :, a - strip.start : b - strip.start])
    return out


def _strip(stands: tuple[Stand, ...], a: int, b: int) -> Strip | None:
    return next((s for stand in stands for s in stand.strips if s.start <= a and b <= s.end), None)
