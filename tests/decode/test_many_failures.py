"""Many at once when something fails: who was not in the failed step does not notice, and the engine goes on."""

from __future__ import annotations

import threading
import time

import pytest

from mlxkv.decode.request import Grammar, Request
from mlxkv.errors import EngineError, PromptTooLong, RequestError
from tests import tiny
from tests.decode.faulty import MARK, Trap, not_a_number, raising
from tests.decode.many import Alone, Crowd, Planned, ask, drive, load, settled, wrong_with


@pytest.fixture(scope="module")
def alone_of(tiny_model):
    """``alone_of(arch)``: what requests get alone, one engine an architecture."""
    made: dict[str, Alone] = {}

    def get(arch: str) -> Alone:
        if arch not in made:
            made[arch] = Alone(tiny_model(arch))
        return made[arch]

    yield get
    for each in made.values():
        each.close()


@pytest.fixture
def arch():
    return "qwen3_5"


@pytest.fixture
def model(tiny_model, arch):
    return tiny_model(arch)


@pytest.fixture
def alone(alone_of, arch):
    return alone_of(arch)


def prompt(n, seed):
    return [t if t != MARK else MARK + 1 for t in tiny.ids(n, seed)]


def innocent(n, seed, max_tokens=30):
    return ask(prompt(n, seed), max_tokens, logit_bias={MARK: -100.0})


def marked(n, seed):
    """It says nothing but the mark."""
    return ask(prompt(n, seed), 60, logit_bias={MARK: 100.0})


def right(alone, plan, outcomes, *, but):
    """All but these got what they get alone."""
    for number, (planned, outcome) in enumerate(zip(plan, outcomes, strict=True)):
        if number not in but:
            assert wrong_with(planned, outcome, alone(planned.request)) == [], number


#: tokens of a prompt that stands in no rectangle with short rows: those count as 512 columns, and padded to 1,700 they
#: would need more than 1.5 of what they and it are
FAR = 1700


def company(long=300):
    """The marked one, three as short as it, one of ``long`` tokens that decodes before they come, and who comes
    later."""
    short = [Planned(innocent(20 + n, n, 60), (4, 1)) for n in range(3)]
    return [
        Planned(marked(24, 99), (4, 1)),
        *short,
        Planned(innocent(long, 10, 90)),
        Planned(innocent(40, 20), (0, 40)),
    ]


@pytest.mark.parametrize(
    ("arch", "error"),
    [("gemma3_text", ValueError("it failed")), ("qwen3_5", RuntimeError("it failed"))],
)
def test_a_failed_step_fails_its_rows_and_nobody_else(model, alone, tmp_path, error):
    trap, plan = Trap(raising(error), at=30), company(FAR)
    with trap.engine(model, tmp_path, prefill_chunk=64) as engine:
        outcomes = drive(engine, plan)
        failed = {number for number, outcome in enumerate(outcomes) if outcome.error is not None}
        assert all(isinstance(outcomes[number].error, EngineError) for number in failed)
        assert "failed" in str(outcomes[0].error)
        # the long one was in no step with it, nor was who came afterwards
        assert failed <= {0, 1, 2, 3} and 0 in failed and len(failed) <= trap.rows[0]
        assert all(outcomes[number].tokens for number in range(5))  # all had begun
        right(alone, plan, outcomes, but=failed)
        assert engine.health().ok and not settled(engine)
        # nothing wrong was kept of the failed ones, and they can be sent again
        again = [Planned(plan[number].request) for number in failed] + [Planned(innocent(24, 99))]
        right(alone, again, drive(engine, again), but=())
        assert trap.rows[0] > 1  # it was a step of several


def test_a_failed_chunk_fails_its_prompt_and_nobody_else(model, alone, tmp_path):
    trap = Trap(raising(ValueError("not this chunk")), width="more", at=1)
    broken = ask([*prompt(50, 98), MARK, *prompt(9, 97)])
    plan = [Planned(innocent(20 + n, n, 60)) for n in range(4)] + [Planned(broken, (3, 5)), Planned(innocent(60, 9))]
    with trap.engine(model, tmp_path) as engine:
        outcomes = drive(engine, plan)
        assert isinstance(outcomes[4].error, EngineError) and len(trap.rows) == 1
        right(alone, plan, outcomes, but=(4,))
        assert not settled(engine)
        right(alone, [Planned(broken)], drive(engine, [Planned(broken)]), but=())


@pytest.mark.parametrize("arch", ["gemma3_text", "qwen3_5"])
def test_a_row_without_numbers_leaves_the_others_alone(model, alone, tmp_path):
    """Its logits are NaN from its fourth step on; its place in the batch is another's afterwards."""
    trap = Trap(not_a_number, times=10**6)
    plan = company()
    with trap.engine(model, tmp_path) as engine:
        outcomes = drive(engine, plan)
        assert outcomes[0].ended
        right(alone, plan, outcomes, but=(0,))
        assert engine.health().ok and not settled(engine)
        right(alone, [Planned(innocent(24, 99))], drive(engine, [Planned(innocent(24, 99))]), but=())


def test_bad_requests_touch_nobody(model, alone, tmp_path):
    plan = [Planned(innocent(20 + n, n, 40)) for n in range(4)]
    bad = [
        (ask(tiny.ids(5000)), PromptTooLong),
        (ask([5, 99_999]), RequestError),
        (ask([5, 6], logit_bias={99_999: 1.0}), RequestError),
        (Request(prompt="a\ud800b"), RequestError),
        (Request(tokens=[5, 6], grammar=Grammar("regex", "no ( end")), RequestError),
    ]
    plan += [Planned(request, (n % 4, 3 + n)) for n, (request, _) in enumerate(bad)]
    with load(model, tmp_path) as engine:
        outcomes = drive(engine, plan)
        for outcome, (_, error) in zip(outcomes[4:], bad, strict=True):
            assert isinstance(outcome.error, error) and not outcome.tokens
        right(alone, plan[:4], outcomes[:4], but=())
        assert engine.health().ok and not settled(engine)


def test_a_step_that_hangs_shows_until_it_goes_on(model, alone, tmp_path):
    free = threading.Event()

    def hang(logits, marked):
        assert free.wait(60)
        return logits

    trap = Trap(hang)
    with trap.engine(model, tmp_path, watchdog_s=0.5) as engine:
        assert engine.health().ok
        crowd, plan = Crowd(engine), company()
        for number, planned in enumerate(plan):
            crowd.submit(number, planned.request)
        try:
            assert wait_for(lambda: trap.rows and not engine.health().ok)
            assert engine.health().reason
        finally:
            free.set()
        assert wait_for(lambda: (now := engine.health()).ok and now.reason is None)
        right(alone, plan, list(crowd.finish().values()), but=())
        assert not settled(engine)


def wait_for(holds, seconds=30.0):
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True
