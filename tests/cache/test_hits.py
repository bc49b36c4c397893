"""Where a request may stand: the tables of reference/state-handoff.md §C.3, and what holds of any groups."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxkv.cache import hits
from mlxkv.cache.connectors import Connectors, Remote
from mlxkv.cache.hits import NOTHING, BrokenPromise, Hit, Offer, Places, Reach, Rows, longest, resolve_hit

BLOCK = 16


@dataclass(frozen=True)
class Windows:
    """Windowed members: ``blocks`` (numbers of blocks of ``unit`` tokens) are there, the last ``needs`` before a place
    are read to stand at it."""

    blocks: frozenset[int]
    needs: int
    unit: int = 1
    whole = False
    recurrent = False

    def deepest(self, limit: int) -> int:
        for end in range(limit // self.unit, 0, -1):
            if all(i in self.blocks for i in range(max(0, end - self.needs), end)):
                return end * self.unit
        return 0


#: rows held, places of states; alone, common hit, shared, the capable path's hit and whether it diverged; then
#: (local, external) of: incapable and nothing more, incapable and filled up to 96, capable and nothing, and filled
TABLE = {
    "states lag": (96, {32, 64}, (96, 64), (64, 96), (96, True), (64, 0), (64, 32), (64, 0), (64, 0)),
    "rows were evicted": (32, {32, 64}, (32, 64), (32, 0), (32, False), (32, 0), (32, 64), (32, 0), (32, 64)),
    "and no state before": (32, {64}, (32, 64), (0, 32), (0, False), (0, 0), (0, 96), (0, 0), (0, 96)),
    "they agree": (64, {64}, (64, 64), (64, 0), (64, False), (64, 0), (64, 32), (64, 0), (64, 32)),
    "no state": (96, set(), (96, 0), (0, 96), (96, True), (0, 0), (0, 96), (0, 0), (0, 0)),
    "no rows": (0, {64}, (0, 64), (0, 0), (0, False), (0, 0), (0, 96), (0, 0), (0, 96)),
}


def filled(upto: int):
    """A connector that has ``upto`` tokens of the prompt, and remembers where it was asked."""
    asked: list[int] = []

    def ask(at: int) -> Offer:
        asked.append(at)
        return Offer(max(0, upto - at))

    return ask, asked


@pytest.mark.parametrize("case", TABLE)
def test_rows_and_states(case):
    rows, places, alone, (hit, shared), (far, diverged), *schedule = TABLE[case]
    groups = [Places(places), Rows(rows, BLOCK)]
    assert tuple(g.deepest(99) for g in reversed(groups)) == alone
    assert hits.common(groups, 99) == Reach(hit, shared)
    assert (longest(groups, 99).hit, longest(groups, 99).diverged) == (far, diverged)
    if diverged:
        assert longest(groups, 99).shared == 0
    got = []
    for capable in (False, True):
        for upto in (0, 96):
            ask, asked = filled(upto)
            found = resolve_hit(groups, 99, capable, ask, block=BLOCK)
            got.append((found.local, found.external))
            assert asked == [far if capable else hit], "once, and from where it may be asked"
            assert found.promised == (found.external > 0)
    assert got == schedule


@pytest.mark.parametrize(
    ("prompt", "rows", "places", "hit", "shared"), [(96, 96, {32, 64}, 64, 80), (97, 96, {32, 64, 96}, 96, 0)]
)
def test_the_last_token_is_always_computed(prompt, rows, places, hit, shared):
    assert hits.common([Rows(rows, BLOCK), Places(places)], prompt - 1) == Reach(hit, shared)


def three_groups() -> None:
    """What a window group holds ends at 112, and is not whole at 96, where the states end."""
    groups = [Rows(128, BLOCK), Windows(frozenset((0, 1, 2, 5, 6)), 2, BLOCK), Places({32, 48, 96})]
    assert [g.deepest(199) for g in groups] == [128, 112, 96]
    for order in (groups, groups[::-1], [groups[1], groups[2], groups[0]]):
        found = resolve_hit(order, 199, False, None)
        assert all(stands(g, found.tokens) for g in groups)
        assert (found.tokens, found.shared) == (48, 128)


def test_a_window_need_not_be_whole_where_another_group_ends():
    three_groups()


@pytest.mark.parametrize("rule", [min, max])
def test_what_each_group_can_alone_does_not_tell_what_all_can(monkeypatch, rule):
    """Mutants: the least, or the most, of what each group holds."""
    monkeypatch.setattr(hits, "common", lambda groups, limit: Reach(rule(g.deepest(limit) for g in groups)))
    with pytest.raises(AssertionError):
        three_groups()


def test_nothing_is_kept_of_it_or_nothing_can_be_used():
    assert resolve_hit([], 99, True, lambda at: NOTHING, block=BLOCK) == Hit(0, asked=0)
    assert hits.common([Rows(96), Places({64})], 0).hit == 0


def test_who_has_not_answered_is_asked_again():
    answers = iter([None, Offer(32)])
    groups = [Rows(64, BLOCK), Places({64})]
    first = resolve_hit(groups, 99, True, lambda at: next(answers), block=BLOCK)
    assert first.pending and (first.tokens, first.promised) == (64, False)
    second = resolve_hit(groups, 99, True, lambda at: next(answers), block=BLOCK)
    assert not second.pending and (second.local, second.external) == (64, 32)


@pytest.mark.parametrize(
    ("external", "expected"), [(0, (36, 0)), (2, (36, 0)), (4, (36, 0)), (5, (32, 5)), (60, (32, 60))]
)
@pytest.mark.parametrize("capable", [False, True])
def test_a_partial_tail_gives_way_only_to_more(external, expected, capable):
    groups = [Rows(36, 4), Places({36}, 4)]
    found = resolve_hit(groups, 99, capable, lambda at: Offer(external), block=BLOCK)
    assert (found.asked, found.local, found.external) == (32, *expected)


def test_of_a_diverged_hit_the_tail_is_worth_nothing():
    """Nothing stands on it: an offer that ends there brings what does."""
    groups = [Rows(36), Places({20})]
    found = resolve_hit(groups, 36, True, lambda at: Offer(4), block=BLOCK)
    assert (found.tokens, found.external, found.promised, found.common) == (36, 4, True, 20)
    found = resolve_hit([Rows(37), Places({35})], 40, True, lambda at: Offer(2), block=BLOCK)
    assert (found.tokens, found.promised) == (35, False), "what is offered ends before the place that is held anyway"


def test_a_state_alone_may_be_brought():
    groups = [Rows(96, BLOCK), Places({32})]
    found = resolve_hit(groups, 99, True, lambda at: Offer(stands=80), block=BLOCK)
    assert (found.tokens, found.external, found.promised, found.common) == (80, 0, True, 32)
    found = resolve_hit(groups, 99, True, lambda at: Offer(stands=32), block=BLOCK)
    assert (found.tokens, found.promised) == (32, False), "it stands there already"


@pytest.mark.parametrize("offer", [Offer(-1), Offer(4), Offer(stands=97), Offer(stands=-3)])
def test_what_cannot_be_is_not_taken(offer):
    with pytest.raises(BrokenPromise):
        resolve_hit([Rows(96, BLOCK), Places({32})], 99, True, lambda at: offer, block=BLOCK)


# who can


class Named(Remote):
    source = "object"

    def __init__(self, capable: bool, offer=NOTHING) -> None:
        self.capable, self.offer, self.asked = capable, offer, 0

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return self.capable

    def ask(self, question):
        self.asked += 1
        if isinstance(self.offer, Exception):
            raise self.offer
        return self.offer

    def load(self, question, offer):
        raise AssertionError


class Silent(Remote):
    source = "object"

    def ask(self, question):
        return NOTHING

    def load(self, question, offer):
        raise AssertionError


def test_who_says_nothing_cannot():
    assert Silent().supports_divergent_local_hybrid_hits is False


@pytest.mark.parametrize(
    ("members", "can"),
    [((True, True), True), ((True, False), False), ((False,), False), ((True,), True), ((), False)],
)
def test_a_group_can_what_all_of_its_members_can(members, can):
    group = Connectors([Named(m) for m in members])
    assert group.supports_divergent_local_hybrid_hits is can
    assert Connectors([group]).supports_divergent_local_hybrid_hits is can, "also as a member"


# whatever is held


UNITS = st.sampled_from([1, 4, 16])
GROUP = st.one_of(
    st.builds(Rows, st.integers(0, 130), UNITS),
    st.builds(Windows, st.frozensets(st.integers(0, 9)), st.integers(1, 4), st.just(16)),
    st.builds(Places, st.frozensets(st.integers(1, 128)), st.sampled_from([1, 16])),
)


def stands(group, place: int) -> bool:
    """Whether a group can stand at a place, said without looking for the deepest."""
    if place == 0:
        return True
    if isinstance(group, Rows):
        return place <= group.held // group.unit * group.unit
    if isinstance(group, Windows):
        end = place // group.unit
        return place % group.unit == 0 and all(i in group.blocks for i in range(max(0, end - group.needs), end))
    return place in group.places and place % group.unit == 0


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.lists(GROUP, max_size=4), st.integers(0, 130), st.booleans(), st.integers(0, 140), st.integers(0, 140))
def test_it_stands_or_is_promised_to(groups, limit, capable, upto, where):
    ask, asked = filled(min(upto, limit))
    if where <= limit:
        plain = ask

        def ask(at: int) -> Offer:
            return plain(at) or Offer(stands=where if where <= at else 0)

    found = resolve_hit(groups, limit, capable, ask, block=BLOCK)
    agreed = hits.common(groups, limit).hit
    every = [p for p in range(limit + 1) if all(stands(g, p) for g in groups)] if groups else [0]
    assert agreed in every
    if all(g.unit == 1 for g in groups if g.whole):  # else it is not looked for between the units of rows
        assert agreed == max(every)
    assert len(asked) == 1 and asked[0] % BLOCK == 0
    assert agreed <= found.tokens <= limit
    assert found.promised or all(stands(g, found.tokens) for g in groups)
    assert all(g.deepest(limit) >= asked[0] for g in groups if g.whole), "never asked beyond the rows that are here"
    if not capable:
        assert not found.diverged and asked[0] <= agreed
