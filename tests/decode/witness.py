"""Rows after each cycle, on the engine's thread: where every member stands; and array by array what single steps with
mlx-lm's own caches give over the same tokens."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from mlxkv.decode.group import Group
from mlxkv.decode.sequence import Sequence
from tests.cache.batch.schedules import Twin, farthest


@dataclass
class Witness:
    """``share`` of the cycles are compared, and all are looked at. ``bound``: how far arrays may be off, relative.
    ``wrong`` must stay empty."""

    rng: random.Random
    bound: float = 0.0
    share: float = 0.25
    cycles: int = 0
    compared: int = 0
    worst: float = 0.0
    wrong: list[str] = field(default_factory=list)
    _twins: dict[Sequence, Twin] = field(default_factory=dict)

    def look(self, group: Group) -> None:
        """Right after a cycle of ``group``: those of its rows that go on."""
        self.cycles += 1
        for slot, row in group.rows.items():
            state: Any = group.executor.row(slot)
            committed = len(row.sequence.tokens)
            stand = {state.position, *(m.position for m in state.members if m.position is not None)}
            if stand != {committed - 1}:
                self.wrong.append(f"members stand at {sorted(stand)} with {committed} tokens committed")
            elif self.rng.random() < self.share:
                self._compare(row.sequence, state)
        for sequence in [each for each in self._twins if each.over]:
            del self._twins[sequence]

    def _compare(self, sequence: Sequence, state: Any) -> None:
        rt, tokens, at = sequence.rt, sequence.tokens, state.position
        if (twin := self._twins.get(sequence)) is None:
            plain: Any = rt.make_cache.func  # type: ignore[attr-defined] - without spare rows for drafts
            n = len(sequence.prompt.tokens)
            twin = Twin.start(rt.model, lambda: plain(0), tokens[:n], max(1, n - 1), True)
            self._twins[sequence] = twin
        while twin.state.position < at:
            twin.feed(tokens[twin.state.position : twin.state.position + 1])
        off = farthest(state, twin.state)
        self.compared, self.worst = self.compared + 1, max(self.worst, off)
        if off > self.bound:
            self.wrong.append(f"arrays at {at}, {len(sequence.sampled)} tokens said, are off by {off:.1e}")


@contextlib.contextmanager
def witnessed(witness: Witness) -> Iterator[None]:
    """Inside, ``witness`` looks at each cycle of every group that there is."""
    real = Group._cycle

    def cycle(group: Group, most: int) -> Any:
        ended = real(group, most)
        if ended is not None:
            witness.look(group)
        return ended

    with mock.patch.object(Group, "_cycle", cycle):
        yield
