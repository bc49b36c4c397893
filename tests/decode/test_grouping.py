"""Rows that decode together: no rectangle is much larger than what its rows need, and changes are rare."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxkv.decode.grouping import BOUND, REST, Divide, Group, Grouping, Resize, Row, Unite, bucket, rounded

GROUPING = Grouping(16)


def group(name: str, *lengths: int, slots: int | None = None, rested: int = 0) -> Group:
    rows = tuple(Row(f"{name}{i}", length) for i, length in enumerate(lengths))
    return Group(name, slots or bucket(len(lengths)), rows, rested)


def test_slots_come_in_few_sizes():
    assert [bucket(n) for n in range(1, 18)] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16, 16, 16, 16, 24]
    assert [rounded(n) for n in (0, 1, 512, 513, 1000)] == [512, 512, 512, 576, 1024]


def test_a_long_row_does_not_cost_long_rows_to_others():
    """65,536 tokens beside three of 1,024 would cost four long rows."""
    long = group("long", 65536)
    assert GROUPING.place(Row("a", 1024), [long]) is None
    short = group("short", 1024)
    assert GROUPING.place(Row("b", 1024), [long, short]) == Resize("short", 2)
    assert GROUPING.waste(4, [65536, 1024, 1024, 1024]) > 3.8


def test_a_free_slot_is_taken_before_the_group_grows():
    assert GROUPING.place(Row("x", 500), [group("g", 500, 500, 500, slots=4)]) == Resize("g", 4)
    assert GROUPING.place(Row("x", 500), [group("g", 500, 500, 500, 500)]) == Resize("g", 6)
    two = [group("full", 500, 500, 500, 500), group("free", 480, 480, 480, slots=4)]
    assert GROUPING.place(Row("x", 500), two) == Resize("free", 4)


def test_a_group_has_no_more_rows_than_it_may():
    assert Grouping(2).place(Row("x", 100), [group("g", 100, 100)]) is None
    assert Grouping(16, together=False).place(Row("x", 100), [group("g", 100)]) is None
    assert Grouping(16, together=False).regroup([group("g", 9, rested=99), group("h", 9, rested=99)]) is None


def test_short_rows_share_a_group():
    """What counts is what is computed: a row of 10 tokens takes 64 columns wherever it stands."""
    assert GROUPING.place(Row("x", 10), [group("g", 60)]) == Resize("g", 2)


def test_a_group_that_rows_left_gets_smaller_only_where_it_must():
    assert GROUPING.regroup([group("g", 900, 900, 900, slots=4)]) is None
    assert GROUPING.regroup([group("g", 900, 900, slots=4)]) == Resize("g", 2)
    assert GROUPING.regroup([group("g", 900, 900, 900, slots=4, rested=REST)]) == Resize("g", 3)


def test_a_group_whose_middle_left_is_divided():
    change = GROUPING.regroup([group("g", 4000, 1000, 900, 3900, 1000)])
    assert change == Divide("g", (("g1", "g4", "g2"), ("g0", "g3")))


def test_groups_that_have_rested_are_united():
    a, b = group("a", 1000, 990, rested=REST), group("b", 1100, rested=REST)
    assert GROUPING.regroup([b, a]) == Unite("a", "b", 3)
    assert GROUPING.regroup([b, group("a", 1000, 990, rested=REST - 1)]) is None
    far = group("b", 1700, rested=REST)  # 1.38: full enough to stay, not to be moved for
    assert 1.25 < GROUPING.waste(3, [1000, 990, 1700]) < BOUND
    assert GROUPING.regroup([a, far]) is None
    assert Grouping(2).regroup([a, b]) is None


def test_a_group_without_rows_is_left_alone():
    assert GROUPING.regroup([Group("g", 4, ())]) is None
    assert GROUPING.place(Row("x", 5), [Group("g", 4, ())]) is None


def test_columns_follow_the_buffers():
    ladder = Grouping(16, columns=lambda n: 1024 if n <= 1024 else 2048)
    assert ladder.place(Row("x", 30), [group("g", 1000)]) == Resize("g", 2)
    assert ladder.place(Row("x", 30), [group("g", 1100, 1100)]) == Resize("g", 3)
    assert ladder.place(Row("x", 30), [group("g", 1100), group("h", 2000, 2000, 2000, 2000)]) == Resize("g", 2)


lengths = st.lists(st.integers(1, 70_000), min_size=1, max_size=40)


@settings(max_examples=100, deadline=None)
@given(lengths, st.integers(1, 16))
def test_any_rows_are_put_in_groups_that_are_full_enough(lengths, most):
    rows = [Row(i, length) for i, length in enumerate(lengths)]
    parts = Grouping(most).parts(rows)
    assert sorted(row.key for part in parts for row in part) == list(range(len(rows)))
    for part in parts:
        assert len(part) <= most
        # 512 tokens and less count alike: there another group's step costs more than columns do
        sizes = [max(8, -(-row.length // 64)) for row in part]
        assert bucket(len(part)) * max(sizes) <= 1.5 * sum(sizes)


@settings(max_examples=100, deadline=None)
@given(st.lists(lengths.map(lambda found: found[:16]), min_size=1, max_size=5), st.data())
def test_regrouping_comes_to_rest_and_loses_nobody(shapes, data):
    groups: dict[object, Group] = {
        i: Group(i, max(bucket(len(found)), data.draw(st.sampled_from((1, 16)))), rows, data.draw(st.integers(0, 50)))
        for i, found in enumerate(shapes)
        for rows in [tuple(Row((i, k), length) for k, length in enumerate(found))]
    }
    everybody = {row for g in groups.values() for row in g.rows}
    for count in range(40):
        change = GROUPING.regroup(list(groups.values()))
        if change is None:
            break
        if isinstance(change, Resize):
            old = groups[change.group]
            assert len(old.rows) <= change.slots < old.slots
            groups[change.group] = Group(old.name, change.slots, old.rows)
        elif isinstance(change, Unite):
            rows = groups[change.group].rows + groups.pop(change.other).rows
            groups[change.group] = Group(change.group, change.slots, rows)
        else:
            rows = {row.key: row for row in groups.pop(change.group).rows}
            for i, part in enumerate(change.parts):
                name = (change.group, count, i)
                groups[name] = Group(name, bucket(len(part)), tuple(rows.pop(key) for key in part))
            assert not rows
    else:
        pytest.fail("it goes on and on")
    assert {row for g in groups.values() for row in g.rows} == everybody
    for g in groups.values():
        assert len(g.rows) <= min(16, g.slots) and GROUPING.waste(g.slots, [r.length for r in g.rows]) <= BOUND
