"""How many tokens are drafted: what pays is found within a few cycles, what does not costs next to nothing. All times
are simulated."""

from __future__ import annotations

import random
from statistics import mean, median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxkv.decode.depth import DEEPEST, KEPT, NEEDED, Costs, Depth, deepest
from tests.decode.drafting import Paper, always, best, demo, gpu

NOISE: Any = {"noise": 0.2, "hiccups": 0.03}


def gains(cost, rate, runs=6, *, most=DEEPEST, rows=1, tokens=200, **noise):
    """Of as many fresh engines."""
    return [Paper(cost, always(rate), seed=seed, **noise).run(Depth(most), rows, tokens).gain for seed in range(runs)]


@pytest.mark.parametrize("noise", [{}, NOISE], ids=["calm", "noisy"])
@pytest.mark.parametrize("cost", [demo, gpu])
@pytest.mark.parametrize("rows", [1, 4])
def test_useless_drafts_cost_next_to_nothing(cost, rows, noise):
    """Also in the first 200 tokens of an engine that knows nothing, and less and less afterwards."""
    assert min(gains(cost, 0.0, rows=rows, **noise)) >= 0.97
    assert min(gains(cost, 0.02, 2, rows=rows, **noise)) >= 0.97
    assert min(gains(cost, 0.0, 1, rows=rows, tokens=2000, **noise)) >= 0.99


def test_what_leaving_plain_steps_costs_is_counted_too():
    """Nothing is in flight then: a part of a step that no time of a cycle shows."""
    for cost in (demo, gpu, lambda rows, k, at: 1.45 + 0.3 * k if k else 1.0):
        run = Paper(cost, always(0.0)).run(Depth(8))
        assert 200 / (run.seconds + 0.4 * sum(k > 0 for _, k in run.depths)) >= 0.98


def test_useless_drafts_cost_little_where_a_cycle_costs_much():
    assert min(gains(lambda rows, k, at: 1.5 + k if k else 1.0, 0.0)) >= 0.96
    assert min(gains(lambda rows, k, at: 1.5 + k if k else 1.0, 0.0, 5, tokens=2000)) >= 0.985


@pytest.mark.parametrize("noise", [{}, NOISE], ids=["calm", "noisy"])
@pytest.mark.parametrize("cost", [demo, gpu])
def test_good_drafts_are_at_their_best_depth_soon(cost, noise):
    runs = [Paper(cost, always(0.95), seed=seed, **noise).run(Depth(8), tokens=300) for seed in range(12)]
    assert median(run.reached(6) for run in runs) <= 20
    assert noise or median(run.reached(8) for run in runs) <= 20  # 6 and 8 are nearly as good
    assert mean(run.gain for run in runs) >= 0.85 * best(cost, 0.95)[1]


@pytest.mark.parametrize("noise", [{}, NOISE], ids=["calm", "noisy"])
@pytest.mark.parametrize("rate", [0.6, 0.8])
@pytest.mark.parametrize("cost", [demo, gpu])
def test_what_pays_is_found(cost, rate, noise):
    """Depths that are far from the best one, and parking where it pays, would show here."""
    assert mean(gains(cost, rate, 4, tokens=800, **noise)) >= 0.88 * best(cost, rate)[1]


def test_the_user_fixes_the_depth():
    """Whatever it costs, but not past the end of the answer."""
    for fixed in (1, 3, 8):
        run = Paper(demo, always(0.0)).run(Depth(8, fixed), tokens=50)
        assert [k for _, k in run.depths] == [min(fixed, 50 - at - 1) for at, _ in run.depths]
    assert Depth(2, 5).next([], 7) == 5


def test_no_deeper_than_is_allowed():
    for most in (1, 2, 5, 7):
        run = Paper(gpu, always(0.98)).run(Depth(most), tokens=300)
        assert max(k for _, k in run.depths) == most
    assert {k for _, k in Paper(gpu, always(0.98)).run(Depth(0), tokens=50).depths} == {0}


def test_a_sequence_begins_where_earlier_ones_were():
    depth = Depth(8)
    for seed in range(3):
        Paper(demo, always(0.9), seed=seed).run(depth)
    again = [Paper(demo, always(0.9), seed=seed).run(depth) for seed in range(10, 20)]
    assert all(run.depths[0][1] > 1 for run in again)  # the first step already is a cycle
    assert median(run.reached(6) for run in again) <= 10


def test_kinds_of_sequences_are_told_apart():
    """Greedy drafts that were useless say nothing of sampled ones."""
    depth, made = Depth(8), []
    for kind, rate in (("greedy", 0.0), ("sampled", 0.95), ("greedy", 0.0), ("sampled", 0.95)):
        made.append(Paper(demo, always(rate)).run(depth, histories=[depth.history(kind)]))
    assert made[2].gain >= 0.97 and made[3].reached(6) <= 10


def test_useless_drafts_after_good_ones_are_given_up_soon():
    for seed in range(10):
        depth = Depth(8)
        Paper(demo, always(0.9), seed=seed, **NOISE).run(depth)
        assert Paper(demo, always(0.0), seed=seed, **NOISE).run(depth).gain >= 0.96


def test_good_drafts_after_useless_ones_are_found():
    found = []
    for seed in range(20):
        depth = Depth(8)
        for _ in range(3):
            Paper(demo, always(0.0), seed=seed, **NOISE).run(depth)
        found.append(Paper(demo, always(0.9), seed=seed, **NOISE).run(depth).gain)
    assert median(found) >= 1.4


@pytest.mark.parametrize(("first", "then", "least"), [(0.0, 0.9, 1.05), (0.9, 0.0, 1.15)])
def test_acceptance_may_change_within_a_sequence(first, then, least):
    runs = [
        Paper(demo, lambda place, at: then if at > 500 else first, seed=seed, **NOISE).run(Depth(8), tokens=1000)
        for seed in range(10)
    ]
    assert median(run.gain for run in runs) >= least


@pytest.mark.parametrize("rate", [0.0, 0.8])
@pytest.mark.parametrize(
    "speed", [lambda at: 1 + at / 1000, lambda at: 3.0 if at > 500 else 1.0, lambda at: 1.0 if at > 500 else 3.0]
)
def test_machines_and_contexts_that_grow_slower_or_faster_deceive_nobody(rate, speed):
    runs = [
        Paper(lambda *at: demo(*at) * speed(at[2]), always(rate), seed=seed, **NOISE).run(Depth(8), tokens=1500)
        for seed in range(3)
    ]
    assert mean(run.gain for run in runs) >= (1.4 if rate else 0.985)


def test_drafting_that_no_longer_pays_is_noticed():
    """Cycles become dear while nothing but cycles is made."""
    runs = [
        Paper(lambda rows, k, at: demo(rows, k, at) * (1 if not k or at < 500 else 4), always(0.9), seed=seed)
        for seed in range(5)
    ]
    for paper in runs:
        late = [k for at, k in paper.run(Depth(8), tokens=2000).depths if at > 1500]
        assert late.count(0) >= 0.95 * len(late)


def batch(share):
    """Plain steps of more rows cost a little more each; a cycle costs ``share`` of one more for each draft."""
    return lambda rows, k, at: (1 + 0.2 * (rows - 1)) * (1.1 + share * k if k else 1.0)


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_batches_draft_where_it_pays(rows):
    assert mean(gains(batch(0.2), 0.9, 5, rows=rows, tokens=600, **NOISE)) >= 0.8 * best(batch(0.2), 0.9, rows)[1]
    runs = gains(batch(0.95), 0.8, 5, rows=rows, tokens=600, **NOISE)
    assert min(runs) >= 0.93 and mean(runs) >= 0.97  # they are accepted, and do not pay
    depth = Depth(8)  # alone they do
    assert Paper(lambda rows, k, at: demo(rows, k, at), always(0.8)).run(depth, tokens=600).gain > 1.3
    assert Paper(batch(0.95), always(0.8)).run(depth, rows, tokens=600).gain >= 0.97


def test_rows_of_one_batch_are_summed():
    """One row whose drafts are good carries another up to a point."""
    for rates, pays in (((0.9, 0.9), True), ((0.9, 0.0), True), ((0.3, 0.0), False)):
        depth = Depth(4)
        histories = [depth.history(rate) for rate in rates]
        for history, rate in zip(histories, rates, strict=True):
            for n in range(100):
                history.accepted.add(4, 4 if n % 10 < 10 * rate else 0)
        others = [depth.history(), depth.history()]
        for _ in range(5):
            depth.stepped(others, 1.0)
        for _ in range(3):
            depth.cycled(others, 2, [2, 2], 1.3)
        assert depth.next(histories) == (4 if pays else 1)  # 1: a try


def test_where_drafting_is_far_from_paying_most_sequences_sleep_until_it_pays():
    for cost in (demo, lambda rows, k, at: 3.0 + k if k else 1.0):
        depth, asleep = Depth(8), []
        for turn in range(150):
            history = depth.history()
            asleep.append(depth.sleeps(history))
            if not asleep[-1]:
                rate = 0.0 if turn < 80 else 0.95
                Paper(cost, always(rate), seed=turn).run(depth, tokens=300, histories=[history])
        assert not asleep[0] and sum(asleep[10:80]) > 60
        if cost is demo:  # one tries again in time, and finds out
            assert sum(asleep[80:]) < 35 and not any(asleep[-20:])


def test_nobody_sleeps_where_drafting_pays_or_the_user_wants_it():
    for depth, rate in ((Depth(8), 0.8), (Depth(8, 3), 0.0)):
        for turn in range(20):
            history = depth.history()
            assert not depth.sleeps(history)
            Paper(demo, always(rate), seed=turn).run(depth, histories=[history])


def test_a_drafter_with_nothing_to_say_is_not_asked_each_time():
    depth = Depth(8)
    history, asked = [depth.history()], 0
    for _ in range(200):
        if depth.next(history):
            asked += 1
            depth.nothing(history)
        depth.stepped(history, 1.0)
    assert 8 <= asked <= 30


def test_a_rehearsal_times_every_depth_and_believes_no_draft():
    depth = Depth(5)
    depth.rehearse(True)
    run = Paper(demo, always(0.0)).run(depth, tokens=60)
    made = [k for _, k in run.depths]
    assert made[:14] == [0, 0, 0, 0, 1, 1, 5, 5, 2, 2, 3, 3, 4, 4] and not any(made[14:])
    assert max(k for _, k in Paper(demo, always(0.0)).run(depth, 2, tokens=60).depths) == 5
    depth.rehearse(False)
    good = Paper(demo, always(0.95)).run(depth)
    assert good.depths[0][1] == 1 and good.reached(5) <= 12  # nothing is timed first, and no draft is mistrusted
    assert Paper(demo, always(0.0)).run(depth).gain >= 0.95


@pytest.mark.parametrize("told", [False, True])
def test_a_first_cycle_that_waited_is_no_measure_of_others(told):
    """A kernel is built, or a graph traced, at the first one: what other depths cost is not guessed from that."""
    other = Costs()
    for k, seconds in ((0, 2.0), (1, 3.0), (2, 4.0), (4, 6.0)):
        for _ in range(NEEDED):
            other.add(k, seconds)
    like = other if told else None
    costs = Costs()
    for _ in range(NEEDED):
        costs.add(0, 1.0)
    before = [costs.cycle(k, like) for k in (1, 2, 4)]
    costs.add(3, 20.0)
    after = [costs.cycle(k, like) for k in (1, 2, 4)]
    assert all(b <= 1.5 * a for a, b in zip(before, after, strict=True)), (before, after)
    assert costs.cycle(3, like) <= 1.25 * 3.0
    for _ in range(KEPT):  # it is what it costs
        costs.add(3, 20.0)
    assert costs.cycle(3, like) == 20.0 and costs.cycle(4, like) > 20.0


def test_what_cycles_cost_can_be_told():
    there, here = Depth(8), Depth(8)
    there.rehearse(True)
    Paper(demo, always(0.0)).run(there, 2, tokens=60)
    assert here.seconds(2, 4) == (0.0, 0.0)
    here.learn(there)
    assert here.seconds(2, 4) == there.seconds(2, 4) and here.seconds(2, 4)[1] > here.seconds(2, 4)[0] > 0


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 10**6), st.sampled_from([None, 3]), st.integers(1, 8))
def test_whatever_is_told_depths_are_in_bounds(seed, fixed, most):
    rng = random.Random(seed)
    depth = Depth(most, fixed)
    histories = [depth.history(rng.choice("ab")) for _ in range(5)]
    for _ in range(300):
        rows = histories[: rng.randint(1, 5)]
        left = rng.choice([None, 0, 1, 2, 100])
        k = depth.next(rows, left)
        assert 0 <= k <= min(fixed or most, 100 if left is None else left)
        if rng.random() < 0.1:
            depth.interrupt()
        seconds = rng.choice([0.0, 1e-9, 0.01, 1.0, 50.0])
        if k:
            drafted = [rng.randint(0, k) for _ in rows]
            kept = [rng.randint(1, n + 1) for n in drafted]
            depth.cycled(rows, k, kept, seconds, rng.choice([None, drafted]))
        else:
            depth.stepped(rows, seconds)
        if rng.random() < 0.1:
            depth.nothing(rows)


@pytest.mark.parametrize(
    ("group", "most"), [(0, 8), (1, 7), (2, 7), (4, 7), (5, 5), (6, 4), (8, 3), (16, 1), (32, 1), (64, 1)]
)
def test_metal_caps_the_depth(group, most):
    assert deepest(group) == most
    assert deepest(group, rings=2) == min(most, 2)
