"""The boundary policy, as the pure functions it is: what is kept of a chain, what goes, where a ladder stands."""

from __future__ import annotations

import pytest

from mlxkv.cache.policy import LADDER, Policy, State, best_role, ladder, may_write, superseded, thin


def chat(turns: int, step: int = 100, nbytes: int = 10) -> tuple[list[State], int, int]:
    """States of a conversation (system, then a user's message, n-1 and an answer a turn), its n-1, and ``turn``."""
    states = [State(50, "system", nbytes)]
    for i in range(turns):
        at = 50 + i * step
        states += [State(at + 1, "message", nbytes)] if i else []
        states += [State(at + 40, "message", nbytes), State(at + 45, "tip", nbytes), State(at + 99, "answer", nbytes)]
    last = 50 + (turns - 1) * step
    return states, last + 45, last + 1 if turns > 1 else 50


def places(states: list[State], gone: set[int]) -> list[tuple[int, str]]:
    return [(s.position, s.role) for s in states if s.position not in gone]


def test_within_the_budget_nothing_goes():
    states, end, turn = chat(5)
    assert thin(states, 10 * len(states), end, turn) == set()


def test_four_are_kept_whatever_the_budget():
    states, end, turn = chat(8)
    kept = places(states, thin(states, 0, end, turn))
    assert kept == [(50, "system"), (751, "message"), (795, "tip"), (849, "answer")]


def test_a_first_turn_has_no_message_before_it():
    states, end, turn = chat(1)
    assert places(states, thin(states, 0, end, turn)) == [(50, "system"), (95, "tip"), (149, "answer")]


def test_a_message_that_was_taken_as_an_answer_counts_as_the_one_before():
    """Raw ids: the answer's end is where the next message begins."""
    states = [State(10, "answer", 1), State(20, "message", 1), State(22, "tip", 1), State(30, "answer", 1)]
    assert places(states, thin(states, 0, 22, 10)) == [(10, "answer"), (22, "tip"), (30, "answer")]


@pytest.mark.parametrize("room", [8, 12, 20])
def test_older_states_stand_at_doubling_distances(room):
    """Turn after turn, as it happens: no gap is much more than its distance from the end, however long the chat."""
    kept: list[State] = []
    for turns in range(1, 201):
        states, end, turn = chat(turns)
        old = {s.position for s in kept}
        fresh = [s for s in states if s.position in old or s.position > end - 100]
        fresh = [s for s in fresh if s.position not in superseded(fresh, end, turn)]
        gone = thin(fresh, 10 * room, end, turn)
        kept = [s for s in fresh if s.position not in gone]
        assert sum(s.nbytes for s in kept) <= 10 * room
    last = kept[-1].position
    distances = sorted(last - s.position for s in kept)
    wide = {8: 8, 12: 4, 20: 2}[room]
    assert all(b <= wide * a + 200 for a, b in zip(distances, distances[1:], strict=False) if b < last - 50), distances


def test_a_tip_goes_once_the_next_is_there_and_never_a_message():
    states, end, turn = chat(3)
    gone = superseded(states, end, turn)
    assert gone == {95, 195}
    assert superseded([s for s in states if s.position != end], end, turn) == set()  # it is not durable yet


def test_rungs_go_with_the_turn_that_needed_them():
    rungs = [State(4096, "ladder", 1), State(8192, "ladder", 1)]
    first = [State(100, "system", 1), *rungs, State(9000, "tip", 1), State(9100, "answer", 1)]
    assert superseded(first, 9000, 100) == set()  # this prompt may yet be edited
    second = [*first, State(9101, "message", 1), State(9200, "tip", 1)]
    assert superseded(second, 9200, 9101) == {4096, 8192, 9000}


def test_the_ladder_doubles_and_leaves_out_what_a_boundary_serves():
    assert ladder(LADDER, 40_000) == [4096, 8192, 16384, 32768]
    assert ladder(LADDER, 40_000, [8000, 20_000]) == [4096, 16384, 32768]
    assert ladder(LADDER, 4096) == ladder(LADDER, 4300) == ladder(0, 9000) == []
    assert ladder(16, 100, [70]) == [16, 32]


def test_what_a_place_is_that_is_several_things():
    assert best_role("tip", "message") == "message" and best_role("ladder", "tip") == "tip"
    assert best_role("") == "message"  # a record of before there were roles: only the budget removes it


def test_a_chain_may_have_as_many_bytes_of_states_as_of_rows():
    assert Policy().budget(10) == 64 << 20 and Policy().budget(1 << 30) == 1 << 30


def test_the_daily_budget_gives_way_by_worth():
    may = {what: may_write(what, 10, 850, 1000) for what in ("tip", "state", "rows")}
    assert may == {"tip": False, "state": True, "rows": True}
    assert not may_write("state", 10, 895, 1000) and may_write("rows", 10, 990, 1000)
    assert not may_write("rows", 10, 991, 1000) and not may_write("rows", 1, 0, 0)
