"""What is known of one prompt in the object store, as entries that a planner can plan with.

What the question says to be here already stands in for the local blocks, so that the planner's rules are the only ones:
a plan over ``Found`` names what has to be downloaded. Nothing is asked from here; ``tier`` does that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ..connectors import Question
from ..index import Entry
from ..keys import pack
from ..layout import MemberSpec
from ..planner import Plan
from ..tensors import ROW_KINDS
from ..verdicts import Verdict
from .names import Names, file_name

#: (kind, cut) -> bytes of the objects of one entry
Objects = Mapping[tuple[str, int], int]
#: what every entry has, whatever members there are: rows hang on those before them
CHAIN = MemberSpec((), "growing", "rows", (), None, 0, ())


@dataclass(frozen=True)
class Item:
    """A record that is to be downloaded: its entry, kind, where it is, and how many bytes it has."""

    entry: Entry
    kind: str
    path: str
    size: int
    #: what verdicts know its entry by
    name: str


class Found:
    """``known`` says what objects an entry has that was looked for, by ``name``; None: none, or it was not found."""

    def __init__(self, question: Question, names: Names, known: Callable[[str], Objects | None]) -> None:
        self.question, self.space = question, question.space
        self._names, self._known = names, known
        self._packed = pack(question.tokens)
        self._kinds = frozenset(question.layout.row_kinds)
        # where every member can stand, the windows that reach back from there are here
        self._windows_here = question.common >= question.asked
        self._parents = [self.space.root]
        self._keys: dict[tuple[int, int], bytes] = {}
        self._places: dict[bytes, tuple[int, int]] = {}  # key -> (block, tokens)
        self._named: dict[tuple[int, int], str] = {}

    @property
    def block(self) -> int:
        return self.space.block

    @property
    def most(self) -> int:
        """Where an entry that is of use ends at most: where it can be stood on a part of it, the last token's may be
        in it."""
        return len(self.question.tokens) if self.question.layout.growing_only else self.question.limit

    def parent(self, depth: int) -> bytes:
        """What block ``depth`` hangs on."""
        while len(self._parents) <= depth:
            d = len(self._parents) - 1
            self._parents.append(self.key(d, self.block))
        return self._parents[depth]

    def key(self, depth: int, n: int) -> bytes:
        """Of the entry with the first ``n`` tokens of block ``depth``."""
        if (depth, n) not in self._keys:
            key = self.space.key_packed(self.parent(depth), self._span(depth, n))
            self._keys[depth, n] = key
            self._places[key] = depth, n
        return self._keys[depth, n]

    def _span(self, depth: int, n: int) -> bytes:
        at = 4 * self.block * depth
        return self._packed[at : at + 4 * n]

    def name(self, depth: int, n: int) -> str:
        """``PLACE/ID`` of an entry."""
        if (depth, n) not in self._named:
            place = self._names.place(self.space.root, self.parent(depth), self._span(depth, n))
            self._named[depth, n] = f"{place}/{self._names.id(self.key(depth, n))}"
        return self._named[depth, n]

    def leaves(self, depth: int) -> Iterator[tuple[int, int]]:
        """The leaves of a block that may be of use."""
        return ((depth, n) for n in range(1, min(self.block - 1, self.most - depth * self.block) + 1))

    def verdict(self, depth: int) -> Verdict:
        """Whether the rows of a full block that was looked for are there."""
        entry = self._entry(depth, self.block)
        return Verdict.HIT if entry is not None and "rows" in entry.kinds else Verdict.MISS

    # what a planner asks

    def entry(self, key: bytes) -> Entry | None:
        place = self._places.get(key)
        return self._entry(*place) if place is not None else None

    def children(self, parent: bytes, tokens: bytes) -> list[Entry]:
        depth = next((d for d, key in enumerate(self._parents) if key == parent), None)
        if depth is None:
            return []
        most = min(self.block, self.most - depth * self.block)
        entries = (self._entry(depth, n) for n in range(most, 0, -1) if (depth, n) in self._named)
        return [e for e in entries if e is not None]

    def _entry(self, depth: int, n: int) -> Entry | None:
        here = (depth + 1) * self.block <= self.question.asked
        objects: Objects = {}
        if (depth, n) in self._named:  # else it was not looked for
            objects = self._known(self._named[depth, n]) or {}
        start, key = depth * self.block, self.key(depth, n)
        state = frozenset(("state",) if ("state", 0) in objects else ())
        if here:
            if n == self.block:
                kinds = state | {k for k in self._kinds if self._windows_here or k == "rows" or (k, 0) in objects}
                cut, base = 0, None
            elif state:
                cut, base, kinds = n, self.key(depth, self.block), state  # its rows are those of the block
            else:
                return None
        else:
            if (best := self._cut(objects)) is None:
                return None
            cut = best
            kinds = frozenset(k for k in ROW_KINDS if (k, cut) in objects) | state
            base = self.key(depth, cut) if cut else None
        parent = self.parent(depth)
        return Entry(
            key, self.space.root, parent, start, start + n, start + cut, base, self._span(depth, n), frozenset(kinds)
        )

    def _cut(self, objects: Objects) -> int | None:
        """Of several cuts of an entry's rows, one with its windows, if there is one, and then the earliest."""
        cuts = sorted({cut for kind, cut in objects if kind == "rows"})
        return min(cuts, key=lambda c: (not all((k, c) in objects for k in self._kinds), c), default=None)

    # what a plan takes

    def items(self, plan: Plan) -> list[Item]:
        """What has to be downloaded for a plan, in the order of the tokens; the state last."""
        spans = self.windows(plan.position)
        out: list[Item] = []
        for piece in plan.pieces:
            beyond = piece.end > self.question.asked
            kinds = ["rows"] if beyond else []
            if any(piece.start < b and a < piece.end for a, b in spans) and (beyond or not self._windows_here):
                kinds = ["rows", "window"]  # one cut holds for both: rows that are here may have another
            out += [item for kind in kinds if (item := self._item(piece.entry, kind)) is not None]
        if plan.state is not None and (item := self._item(plan.state, "state")) is not None:
            out.append(item)
        return out

    def windows(self, position: int) -> set[tuple[int, int]]:
        """The spans that windowed members read to stand at a place."""
        return {span for m in self.question.layout.members if m.record == "window" for span in m.needs(position)}

    def reached_back(self, position: int) -> set[int]:
        """The blocks before ``asked`` of which windows have to be downloaded to stand at a place."""
        if self._windows_here:
            return set()
        spans = self.windows(position)
        return {d for a, b in spans for d in range(a // self.block, -(-min(b, self.question.asked) // self.block))}

    def _item(self, entry: Entry, kind: str) -> Item | None:
        name = self._named.get(self._places.get(entry.key, (-1, -1)))
        cut = 0 if kind == "state" else entry.row_start - entry.start
        size = (self._known(name) or {}).get((kind, cut)) if name is not None else None
        if name is None or size is None:
            return None
        place, _, entry_id = name.rpartition("/")
        return Item(entry, kind, f"{place}/{file_name(entry_id, kind, cut)}", size, name)
