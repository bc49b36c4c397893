"""A model of compressed attention whose prompt is cut anywhere, and whose drafts are verified and taken back at any
width up to the limit, has, bit for bit, the logits and the state of one forward over the same tokens; beyond the limit,
with the checks out of the way, it has not."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxkv.cache.ring import with_rings
from mlxkv.cache.state import SequenceState
from tests import tiny
from tests.probe import equal

LENGTH = 130


@cache
def built(ratios: tuple[int, ...]) -> tuple[Any, list[int], np.ndarray, SequenceState]:
    """A model, tokens, and what one forward over them gives and leaves."""
    model, _ = tiny.build("deepseek_v4", compress_ratios=list(ratios), num_hidden_layers=len(ratios))
    tokens = tiny.ids(LENGTH, seed=3)
    state = SequenceState.new(model.make_cache())
    logits = np.array(model(mx.array([tokens]), cache=state.caches)[0])
    state.advance(LENGTH)
    return model, tokens, logits, state


class Run:
    """The same tokens in forwards of any width, of which some are drafts that are wrong from a point on."""

    def __init__(self, ratios: tuple[int, ...], spare: int, checked: bool = True) -> None:
        self.model, self.tokens, self.right, self.whole = built(ratios)
        self.state = SequenceState.new(with_rings(self.model.make_cache(), spare))
        self.checked = checked
        self.differs = 0

    def forward(self, ids: list[int], kept: int) -> None:
        at = self.state.position
        logits = np.array(self.model(mx.array([ids]), cache=self.state.caches)[0])
        self.differs += not equal(logits[:kept], self.right[at : at + kept])
        self.state.advance(len(ids))

    def plain(self, n: int) -> None:
        at = self.state.position
        self.forward(self.tokens[at : at + n], n)

    def verify(self, width: int, kept: int) -> None:
        at = self.state.position
        ids = self.tokens[at : at + width]
        width, kept = len(ids), min(kept, len(ids))
        if self.checked:
            self.state.expect(width)
        else:
            for member in self.state.members or ():
                if member.record != "rows":
                    member.ring.low = 0
        self.forward([*ids[:kept], *((t + 1) % 300 for t in ids[kept:])], kept)
        if not self.checked:
            for member in self.state.members or ():
                if member.record != "rows":
                    member.ring.low = 0
        self.state.commit(kept, width)

    def same_state(self) -> bool:
        """Window, rings (in the form that does not depend on their length) and entries."""
        pairs = zip(self.state.members or (), self.whole.members or (), strict=True)
        return all(_equal(_kept(a, LENGTH), _kept(b, LENGTH)) for a, b in pairs)


def _kept(member: Any, position: int) -> dict[str, mx.array]:
    if member.record == "state":
        return member.arrays()
    window = member.window()
    return member.rows(0 if window is None else position - window, position)


def _equal(a: dict[str, mx.array], b: dict[str, mx.array]) -> bool:
    return a.keys() == b.keys() and all(equal(np.array(a[name]), np.array(b[name])) for name in a)


@pytest.mark.parametrize(
    ("ratios", "spare"), [((0, 4, 8, 4), 0), ((0, 4, 8, 4), 1), ((4, 16), 4), ((4, 8), 9), ((128, 2), 8)]
)
def test_cuts_and_drafts_leave_the_state_of_one_forward(ratios, spare):
    rng = random.Random(f"{ratios} {spare}")
    run, widths = Run(ratios, spare), []
    run.plain(rng.randint(1, 30))
    while run.state.position < LENGTH:
        left = LENGTH - run.state.position
        if spare and rng.random() < 0.8:
            # every width from 1 to the limit, then any
            width = len(widths) + 1 if len(widths) <= spare else rng.randint(1, spare + 1)
            widths.append(width)
            run.verify(width, rng.choice([1, width, rng.randint(1, width)]))
        else:
            run.plain(min(left, rng.choice([1, 2, 5, 40 if spare == 0 else 9])))
    assert not run.differs and run.same_state()
    assert {*range(1, spare + 2)} <= {*widths} or not spare


def test_one_draft_more_than_the_limit_is_wrong():
    """A ring of 16 rows at ratio 4 serves 9 drafts. The checks are what stands between 10 and wrong logits."""

    def differs(width: int) -> int:
        run = Run((4, 4), 9, checked=False)
        for member in run.state.members or ():
            assert member.geometry is None or member.geometry.most_width == 10
        run.plain(14)
        while run.state.position < LENGTH - 2 * width:
            run.verify(width, 1 + run.state.position % 3)
        return run.differs

    assert differs(10) == 0
    assert differs(11) > 0
