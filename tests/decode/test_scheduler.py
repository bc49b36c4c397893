"""Nobody starves and nobody waits for long: the scheduler's decisions, asked as the loop asks them, on a clock that
only counts."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxkv.decode.grouping import BOUND
from mlxkv.decode.scheduler import OVERTAKEN, PASSES, Admission, Rounds, Turns
from tests.decode.clockwork import Asked, Clockwork, Machine

#: like the demo model and SmolLM2-135M on a CPU, and a model of 4 billion parameters on a GPU
MACHINES = {
    "demo": (Machine(0.002, 0.0005, 1e-8, 0.01, 1e-7), 0.5, 4096),
    "smollm2": (Machine(0.02, 0.002, 1e-7, 0.04, 1e-6), 0.5, 1024),
    "gpu": (Machine(0.012, 0.0004, 4e-9, 0.014, 1e-8, chunk=2048), 0.25, 16384),
    "gpu, 4k": (Machine(0.012, 0.0004, 4e-9, 0.014, 1e-8, chunk=2048), 0.25, 4096),
}


def percentile(found: list[float], part: float) -> float:
    return sorted(found)[ceil(part * len(found)) - 1]


def beside_four(
    name: str, prompt: int, *, warm: bool, every: int = 0, together: bool = True
) -> tuple[Clockwork, Asked]:
    """A prompt that comes while four answers run, read to its end."""
    machine, gap, _ = MACHINES[name]
    house = Clockwork(machine, gap=gap, together=together)
    if warm:
        house.run([Asked(key=99, prompt=prompt, answer=2)])
    house.coming = [Asked(key=i, prompt=100, answer=10_000) for i in range(4)]
    while len(house.running) < 4:
        house.one_turn()
    for _ in range(5):
        house.one_turn()
    asked = Asked(key=5, prompt=prompt, answer=1, arrival=house.now, every=every)
    house.coming = [asked]
    while not asked.tokens:
        house.one_turn()
    return house, asked


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("name", MACHINES)
def test_a_long_prompt_keeps_the_gap_and_its_speed(name, warm):
    machine, gap, prompt = MACHINES[name]
    house, asked = beside_four(name, prompt, warm=warm)
    gaps = [g for r in house.running.values() for g in r.gaps if r.tokens[-1] >= asked.arrival]
    assert percentile(gaps[-4 * len(asked.chunks) :], 0.99) <= 1.25 * gap
    assert machine.alone(prompt) / asked.reading >= 0.8


@pytest.mark.parametrize("name", MACHINES)
def test_rows_that_take_turns_keep_the_gap_too(name):
    """Each row has a group of its own: four steps and one chunk lie between two tokens of a row."""
    machine, gap, prompt = MACHINES[name]
    house, asked = beside_four(name, prompt, warm=True, together=False)
    assert len(house.groups) == 4
    gaps = [g for r in house.running.values() for g in r.gaps[-len(asked.chunks) :]]
    assert percentile(gaps, 0.99) <= 1.25 * gap
    assert machine.alone(prompt) / asked.reading >= 0.8


def test_boundaries_stay_where_they_are():
    """Whatever the load, each multiple of 300 is the end of a chunk; between them chunks are rungs."""
    for name in MACHINES:
        house, asked = beside_four(name, 1000, warm=False, every=300)
        position, ends = 0, set()
        for _, n, rung, _ in asked.chunks:
            position += n
            ends.add(position)
            assert rung in house.ladder.rungs and (n == rung or (n < rung and position in {300, 600, 900, 1000}))
        assert {300, 600, 900, 1000} <= ends


def test_a_short_prompt_that_comes_during_a_long_one_is_next():
    house, _ = beside_four("demo", 64, warm=True)
    house.coming = [Asked(key=10, prompt=20_000, answer=1, arrival=house.now)]
    for _ in range(4):
        house.one_turn()
    short = Asked(key=11, prompt=40, answer=1, arrival=house.now)
    house.coming = [short]
    house.one_turn()
    assert short.tokens and house.prefilling.keys() == {10}


def test_with_nobody_decoding_a_short_prompt_does_not_wait_for_a_long_one():
    house = Clockwork(MACHINES["smollm2"][0])
    long = Asked(key=0, prompt=20_000, answer=1)
    short = Asked(key=1, prompt=64, answer=1, arrival=0.1)
    house.run([long, short])
    assert {n for _, n, _, _ in long.chunks[2:-1]} == {512}
    assert short.chunks[0][0] <= short.came and short.tokens[0] < long.chunks[0][3] + 0.5


def test_prompts_of_equal_length_are_all_read():
    house = Clockwork(MACHINES["smollm2"][0], rows=8)
    requests = [Asked(key=i, prompt=3000, answer=20) for i in range(8)]
    house.run(requests)
    assert house.admitted == list(range(8))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=60), st.integers(2, 6))
def test_every_prompt_has_its_chunks_whatever_comes(arrivals, most):
    """At most ``most`` prompts are read at a time, a chunk is one token; others come meanwhile, short ones too."""
    turns, left, waits, queue = Turns(), {}, {}, list(enumerate(arrivals))
    longest = 0
    while left or queue:
        while queue and len(left) < most:
            key, (length, pause) = queue[0]
            if left and pause > 0:
                queue[0] = (key, (length, pause - 1))
                break
            queue.pop(0)
            left[key], waits[key] = length, 0
        key = turns.next(left)
        for other in left:
            waits[other] = 0 if other == key else waits[other] + 1
            longest = max(longest, waits[other])
        left[key] -= 1
        if not left[key]:
            del left[key]
    assert longest < (2 * PASSES + 1) * most


def test_an_endless_train_of_short_prompts_does_not_stop_a_long_one():
    turns, served = Turns(), 0
    left: dict[int | str, int] = {"long": 10}
    for i in range(200):
        left[i] = 1  # always a new one that is shorter
        key = turns.next(left)
        left[key] -= 1
        served += key == "long"
        if not left[key]:
            del left[key]
        if "long" not in left:
            break
    assert served == 10 and i < 10 * (2 * PASSES + 1) * 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(2, 30), max_size=4), min_size=1, max_size=40))
def test_newcomers_with_chunks_at_once_do_not_stop_the_others(arrivals):
    """All who come have a chunk besides the turn's: each prompt still has its turns, as often as without that."""
    turns, left, waits, longest, most, key = Turns(), {}, {}, 0, 1, 0
    for coming in [*arrivals, *[[]] * 200]:
        new = list(range(key, key + len(coming)))
        key += len(coming)
        left |= dict(zip(new, coming, strict=True))
        if not left:
            continue
        most = max(most, len(left))
        chosen = {turns.next(left), *new}
        for each in new:
            turns.besides(each)
        for each in list(left):
            waits[each] = 0 if each in chosen else waits.get(each, 0) + 1
            longest = max(longest, waits[each])
            if each in chosen:
                left[each] -= 1
                if not left[each]:
                    del left[each]
    assert longest < (2 * PASSES + 1) * most


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(100, 130), min_size=1, max_size=5), st.integers(1, 40))
def test_a_short_newcomer_is_served_within_a_turn(others, count):
    turns = Turns()
    left: dict[int | str, int] = dict(enumerate(others))
    for i in range(count):
        left[turns.next(left)] -= 1
        if i % 7 == 0:
            left["new"] = 1
            assert turns.next(left) == "new"
            del left["new"]


@pytest.mark.parametrize("count", range(1, 9))
def test_a_newcomer_goes_before_one_that_was_passed_often(count):
    """Of two long prompts the longer one has every fourth turn; that does not hold up who has just come."""
    turns = Turns()
    left = {"long": 50, "longer": 90}
    for _ in range(count):
        left[turns.next(left)] -= 1
    assert turns.next(left | {"new": 1}) == "new"


def test_who_came_first_is_admitted_first():
    admission = Admission()
    assert admission.next([1, 2, 3], lambda key: True) == 1
    assert admission.next([2, 3], lambda key: False) is None
    assert admission.next([], lambda key: True) is None


def test_a_large_request_is_passed_for_a_bounded_time_only():
    admission, waiting, passed = Admission(), ["large", *range(100)], []
    while (key := admission.next(waiting, lambda key: key != "large")) is not None:
        passed.append(key)
        waiting.remove(key)
    assert passed == list(range(OVERTAKEN))
    assert admission.next(waiting, lambda key: True) == "large"
    waiting.remove("large")
    assert admission.next(["huge", *waiting], lambda key: key != "huge") == OVERTAKEN  # counted anew


def test_the_count_goes_with_the_one_who_waits():
    """The first one was cancelled: the next in its place has been passed by nobody."""
    admission = Admission()
    for i in range(OVERTAKEN):
        assert admission.next(["a", "b", i], lambda key: isinstance(key, int)) == i
    assert admission.next(["a", "b", 50], lambda key: isinstance(key, int)) is None
    assert admission.next(["b", 50], lambda key: isinstance(key, int)) == 50


def test_groups_take_turns():
    rounds = Rounds()
    assert [(s.group, s.first) for s in (rounds.next("ab") for _ in range(4))] == [
        ("a", True),
        ("b", False),
        ("a", True),
        ("b", False),
    ]
    assert rounds.next("abc").group == "c"  # a new one need not wait for its first token
    assert {rounds.next("abc").group for _ in range(2)} == {"a", "b"}
    assert rounds.next("c").group == "c"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_get_tokens_at_the_same_rate_in_all_groups(data):
    """Between two steps of a group each other one makes at most one, and one chunk is read, or two where the groups
    changed meanwhile."""
    rounds, groups, since = Rounds(), [0, 1], {}
    chunks = 0
    for name in range(2, 60):
        event = data.draw(st.integers(0, 5))
        changed = event <= 1
        if event == 0:
            groups.append(name)
        elif event == 1 and len(groups) > 1:
            groups.remove(data.draw(st.sampled_from(groups)))
        step = rounds.next(groups)
        chunks += step.first
        for group in groups:
            steps, begun, quiet = since.get(group, ([], chunks, True))
            since[group] = ([*steps, step.group], begun, quiet and not changed)
        steps, begun, quiet = since[step.group]
        assert len(steps) == len(set(steps))
        if quiet and len(steps) >= len(groups):
            assert chunks - begun <= 1
        since[step.group] = ([], chunks, True)


requests = st.lists(
    st.tuples(
        st.one_of(st.integers(1, 200), st.integers(1, 6000)),
        st.integers(1, 60),
        st.floats(0, 8),
        st.sampled_from((0, 64, 300)),
        st.integers(1, 10),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=25, deadline=None)
@given(requests, st.sampled_from(sorted(MACHINES)), st.integers(1, 8), st.booleans(), st.integers(0, 2**32))
def test_any_load_is_worked_off(requests, name, rows, together, seed):
    """Everybody is answered; groups never cost more than they may; nobody in the house is left out."""
    machine, gap, _ = MACHINES[name]
    house = Clockwork(machine, gap=gap, rows=rows, room=20, together=together, seed=seed)
    asked = [
        Asked(key=i, prompt=p, answer=n, arrival=t, every=every, room=room)
        for i, (p, n, t, every, room) in enumerate(requests)
    ]
    house.run(asked)
    for request in asked:
        assert len(request.tokens) == request.answer
        assert sum(n for _, n, _, _ in request.chunks) == request.prompt
        between = zip(request.chunks, request.chunks[1:], strict=False)
        assert all(b[0] - a[0] <= (2 * PASSES + 1) * rows * rows for a, b in between)
        for (steps, chunks), (later, more) in zip(request.steps[1:], request.steps[2:], strict=False):
            assert later - steps <= 2 * rows and more - chunks <= 2
    assert all(waste <= BOUND for waste in house.waste)
    order = {key: i for i, key in enumerate(house.admitted)}
    came = sorted(asked, key=lambda r: r.arrival)
    for i, request in enumerate(came):
        assert sum(order[later.key] < order[request.key] for later in came[i + 1 :]) <= OVERTAKEN * (i + 1)


def test_groups_are_changed_rarely():
    """Sixteen rows of many lengths that come and go: few copies for many steps."""
    house = Clockwork(MACHINES["gpu"][0], gap=0.25, seed=3)
    asked = [Asked(key=i, prompt=50 + 997 * i % 3000, answer=100 + 31 * i % 200, arrival=i * 0.4) for i in range(60)]
    house.run(asked)
    assert len(house.changes) <= 2 * len(asked) and house.steps > 10 * len(house.changes)
    assert sum(house.waste) / len(house.waste) < 1.3
