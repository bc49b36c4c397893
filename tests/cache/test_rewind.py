"""Drafts that are verified and taken back in real models: logits and every array are those of single steps."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlxkv.cache import ring
from mlxkv.cache.kinds import members_of
from mlxkv.cache.layout import probe
from mlxkv.cache.member import PositionError
from mlxkv.cache.rewind import check_drafts, why_not
from mlxkv.cache.ring import spare_bytes, with_rings
from mlxkv.cache.state import SequenceState
from mlxkv.decode.memory import live_bytes
from mlxkv.errors import ConfigError
from tests import tiny
from tests.cache.batch.schedules import FAST, apart, first_row
from tests.cache.test_kinds import CACHES

#: the last of them reads another layer's rows
RINGS = ("gemma3_text", "gpt_oss", "afmoe", "olmo3", "cohere2", "iquestloopcoder", "gemma3n")
#: how many of the rows of a cycle are kept, by its number and width
PATTERNS = {
    "all": lambda i, width: width,
    "none": lambda i, width: 1,
    "alternating": lambda i, width: width if i % 2 else 1,
    "random": lambda i, width: random.Random(i).randint(1, width),
}


def tolerance() -> float:
    return 0.0 if ring.in_order() else FAST


class Twins:
    """A sequence that verifies and takes back, and one that only makes single steps, over the same kept tokens."""

    def __init__(self, model, make_cache, plain=None) -> None:
        self.model, self.random = model, random.Random(4)
        self.mine, self.theirs = (SequenceState.new(make()) for make in (make_cache, plain or make_cache))

    def run(self, state: SequenceState, tokens: list[int]) -> mx.array:
        logits = self.model(mx.array([tokens], mx.int32), cache=state.caches)[0]
        state.advance(len(tokens))
        mx.eval(logits, state.live())
        return logits

    def both(self, tokens: list[int]) -> None:
        assert apart(self.run(self.mine, tokens), self.run(self.theirs, tokens)) <= tolerance()

    def cycle(self, width: int, kept: int) -> float:
        """The largest difference of logits of the rows that are kept; states are compared."""
        tokens = tiny.ids(width, self.random.randrange(1 << 30))
        self.mine.expect(width)
        logits = self.run(self.mine, tokens)
        self.mine.commit(kept, width)
        mx.eval(self.mine.live())
        worst = max(apart(logits[i], self.run(self.theirs, tokens[i : i + 1])[0]) for i in range(kept))
        return max(worst, self.differ())

    def differ(self) -> float:
        """All that the store may ask of either state."""
        p, worst = self.theirs.position, 0.0
        assert self.mine.position == p
        for a, b in zip(self.mine.members or (), self.theirs.members or (), strict=True):
            assert (a.kind, a.params(), a.position) == (b.kind, b.params(), p)
            first = first_row(a, b, p)
            mine, theirs = a.rows(first, p), b.rows(first, p)
            worst = max([worst, *(apart(mine[name], theirs[name]) for name in theirs)])
        return worst


def check(twins: Twins, widths, pattern) -> None:
    twins.both(tiny.ids(5, 1))
    twins.both(tiny.ids(1, 2))
    for i, width in enumerate(widths):
        assert twins.cycle(width, PATTERNS[pattern](i, width)) <= tolerance(), (i, width)
        if i == len(widths) // 2:  # a plain step, and a chunk as after company has left
            twins.both(tiny.ids(1, 3))
            twins.both(tiny.ids(4, 4))
    # what is settled and resumed from goes on as the other does
    for state in (twins.mine, twins.theirs):
        state.settle()
    assert twins.differ() <= tolerance()
    twins.both(tiny.ids(1, 5))
    assert twins.cycle(4, 2) <= tolerance()


@pytest.mark.parametrize(
    ("arch", "pattern"), [*((RINGS[0], pattern) for pattern in PATTERNS), *((arch, "random") for arch in RINGS[1:])]
)
def test_models_with_windows(arch, pattern):
    model, _ = tiny.build(arch)
    plain = lambda: make_prompt_cache(model)  # noqa: E731
    make = lambda: with_rings(plain(), 8)  # noqa: E731
    assert probe(model, make).digest == probe(model, plain).digest
    check(Twins(model, make, plain), (9, 5, 2, 9, 7), pattern)


@pytest.mark.parametrize("size", [12, 5])
@pytest.mark.parametrize("pattern", ["none", "random"])
def test_attention_in_chunks_takes_back_any_number(pattern, size):
    """Rows are cut off before a forward only, so that its own can all go; the next one cuts where plain decoding
    would have."""
    model, _ = tiny.build("llama4", attention_chunk_size=size)
    twins = Twins(model, lambda: make_prompt_cache(model))
    assert why_not(twins.mine.members) is None
    check(twins, (9, 2, 6, 13, 4), pattern)
    twins.both(tiny.ids(1, 6))
    for a, b in zip(twins.mine.caches[:3], twins.theirs.caches[:3], strict=True):
        assert a.start_position == b.start_position > 0


@pytest.mark.parametrize("name", CACHES)
def test_every_class_of_rows(name):
    """The first rows of a window too, and more of them than a cycle has."""
    model, _ = tiny.build("llama")
    check(Twins(model, lambda: with_rings(CACHES[name](), 8), CACHES[name]), (9, 4, 9, 6, 3, 9), "random")


@pytest.mark.parametrize("spare", [1, 3])
def test_the_limit_of_a_ring_is_exact(spare):
    """One draft more is refused when an engine is configured; where nobody asks, the texts are others."""
    model, _ = tiny.build("gemma3_text")
    make = lambda: with_rings(make_prompt_cache(model), spare)  # noqa: E731
    members = members_of(make())
    check_drafts(members, spare)
    with pytest.raises(ConfigError) as refused:
        check_drafts(members, spare + 1)
    assert str(refused.value) == (
        f"{spare + 1} drafts were asked for, and the ring of layer 0 (a window of 8 rows, {spare} spare) can take back "
        f"{spare} at most. Give --draft-depth {spare} or less, or --ring-spare {spare + 1} or more."
    )
    within, beyond = (Twins(model, make, lambda: make_prompt_cache(model)) for _ in range(2))
    for twins in (within, beyond):
        twins.both(tiny.ids(20, 1))
        twins.both(tiny.ids(1, 2))
    assert [within.cycle(spare + 1, kept) for kept in (spare + 1, 1, spare + 1)] <= [tolerance()] * 3
    assert beyond.cycle(spare + 2, spare + 2) > 0.01


def test_who_takes_nothing_back_is_named():
    model, _ = tiny.build("gemma3_text")
    members = members_of(make_prompt_cache(model))
    assert why_not(members) == (
        "layer 0 is a window of 8 rows without spare ones, and would have overwritten what comes back"
    )
    with pytest.raises(ConfigError, match="Nothing can be drafted: layer 0 is a window .*Give --draft off"):
        check_drafts(members, 1)
    jamba, _ = tiny.build("jamba")
    others = members_of(make_prompt_cache(jamba))
    assert "is recurrent, and no journal of its inputs is kept" in (why_not(others) or "")

    class Journal:
        def covers(self, cache):
            return True

    assert why_not(others, Journal()) is None
    check_drafts(others, 50, Journal())
    assert why_not(members_of(with_rings(make_prompt_cache(model), 2))) is None
    assert why_not(None) == "its state has no known kinds"
    check_drafts(members_of([KVCache()]), 50)


def test_mlx_lms_own_window_serves_no_draft():
    """Why there are rings: what a rejected draft has overwritten is gone, and this class says so."""
    model, _ = tiny.build("gemma3_text")
    twins = Twins(model, lambda: make_prompt_cache(model))
    twins.both(tiny.ids(20, 1))
    twins.both(tiny.ids(1, 2))
    with pytest.raises(PositionError, match="cannot go back 1 tokens: only 0"):
        twins.cycle(2, 1)


def test_members_must_agree_after_a_commit():
    model, _ = tiny.build("gemma3_text")
    state = SequenceState.new(with_rings(make_prompt_cache(model), 4))
    state.expect(3)
    mx.eval(model(mx.array([[1, 2, 3]]), cache=state.caches))
    state.advance(3)
    for kept in (0, 4):
        with pytest.raises(PositionError, match=f"{kept} of 3 tokens cannot be kept"):
            state.commit(kept, 3)
    assert state.members is not None
    state.members[1].rewind(1)
    with pytest.raises(PositionError, match="Member 1 \\(growing\\) stands at 1, the sequence at 2"):
        state.commit(2, 3)
    with pytest.raises(PositionError, match="unknown kinds"):
        SequenceState([], None).commit(1, 2)


def test_the_ledger_counts_spare_rows():
    """What a sequence holds at most, while a forward waits for its commit, is what is charged for it."""
    model, _ = tiny.build("gemma3_text")
    make = lambda: with_rings(make_prompt_cache(model), 6)  # noqa: E731
    live, state = probe(model, make), SequenceState.new(make())
    state.reserve(64)
    for width in (20, 1, 7):
        state.expect(width if width == 7 else 1)
        mx.eval(model(mx.array([tiny.ids(width)]), cache=state.caches), state.live())
    assert sum(a.nbytes for a in state.live()) == live_bytes(live, 64) + spare_bytes(live, 6)
    assert spare_bytes(live, 0) == 0
