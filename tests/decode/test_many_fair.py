"""Many at once: nobody waits for another to be through, and no step is traced between admissions."""

from __future__ import annotations

import pytest

from mlxkv.decode.request import Delta, Progress
from tests import tiny
from tests.decode.equal import overlap
from tests.decode.many import Crowd, Planned, ask, drive, load

#: tokens of the long prompt, and of one chunk at most
LONG, CHUNK = 1500, 64


def events(outcome, kind):
    return [at for event, at in zip(outcome.events, outcome.at, strict=True) if isinstance(event, kind)]


def most(chunks, tokens):
    """The most ``chunks`` between two neighbours of ``tokens``."""
    return max(sum(a < chunk < b for chunk in chunks) for a, b in zip(tokens, tokens[1:], strict=False))


@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
def test_a_long_prompt_holds_up_nobody(tiny_model, arch):
    """Streams that run get tokens between its chunks; a short prompt that comes later is answered before it is read."""
    with load(tiny_model(arch), None, prefill_chunk=CHUNK) as engine:
        crowd = Crowd(engine)
        for number in range(3):
            crowd.submit(number, ask(tiny.ids(20, seed=number), 200))
        crowd.until(lambda: all(crowd.reached(number, 3) for number in range(3)))
        crowd.submit(3, ask(tiny.ids(LONG, seed=9), 4))
        crowd.until(lambda: crowd.seen[3].done > 3 * CHUNK)
        crowd.submit(4, ask(tiny.ids(20, seed=10), 4))
        crowd.submit(5, ask(tiny.ids(30, seed=11), 4))
        seen = crowd.finish()
        chunks = events(seen[3], Progress)
        assert len(chunks) >= LONG // CHUNK and seen[3].done == LONG - 1
        for number in range(3):
            # a chunk lies between two tokens; a newcomer's first step may come between too
            assert most(chunks, events(seen[number], Delta)) <= 3
            assert seen[number].at[-1] > chunks[LONG // CHUNK // 2]  # it did run meanwhile
        for number in (4, 5):
            assert seen[number].at[-1] < seen[3].first_token  # the whole answer
        assert all(len(seen[number].tokens) in (4, 200) for number in range(6))


def test_a_first_token_does_not_wait_for_another_chunk(tiny_model):
    """A short prompt that was read in one turn has its first token in the same, whatever else is being read."""
    with load(tiny_model("llama"), None, prefill_chunk=CHUNK) as engine:
        crowd = Crowd(engine)
        crowd.submit(0, ask(tiny.ids(LONG, seed=9), 4))
        crowd.until(lambda: crowd.seen[0].done > CHUNK)
        crowd.submit(1, ask(tiny.ids(20, seed=10), 4))
        seen = crowd.finish()
        read = next(at for event, at in zip(seen[1].events, seen[1].at, strict=True) if is_read(event))
        assert not any(read < chunk < seen[1].first_token for chunk in events(seen[0], Progress))


def is_read(event):
    return isinstance(event, Progress) and event.done == event.total - 1


def test_two_long_prompts_take_turns(tiny_model):
    """The one that is nearer to its end may have more of them, but none waits for the other to be through."""
    with load(tiny_model("llama"), None, prefill_chunk=32) as engine:
        plan = [Planned(ask(tiny.ids(1000 + 200 * n, seed=n), 4)) for n in range(2)]
        first, second = (events(outcome, Progress) for outcome in drive(engine, plan))
        both = [at for at in first if at > second[0]]
        assert len(both) > 10 and most(second, both) <= 7
        assert most(both, [at for at in second if at < both[-1]]) <= 7


def test_every_row_of_every_group_moves(tiny_model):
    """Rows too different for one rectangle take turns: none gets far while another gets nothing."""
    lengths = (20, 24, 300, 310, 1200)
    with load(tiny_model("llama"), None, prefill_chunk=512) as engine:
        crowd = Crowd(engine)
        for number, n in enumerate(lengths):
            crowd.submit(number, ask(tiny.ids(n, seed=number), 150))
        seen = crowd.finish()
        tokens = {number: events(seen[number], Delta) for number in seen}
        begun, ended = max(at[0] for at in tokens.values()), min(at[-1] for at in tokens.values())
        assert begun < ended  # all of them ran at the same time
        counts = [sum(begun < at < ended for at in each) for each in tokens.values()]
        # groups take turns, so a row of three groups gets a third of the steps at least
        assert max(counts) <= 3 * min(counts) + 3 and min(counts) > 10
        assert overlap(list(seen.values())) == len(lengths)


@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
def test_nothing_is_traced_between_admissions(tiny_model, arch):
    """Not while rows run, nor when some of them leave."""
    with load(tiny_model(arch), None, compile="on") as engine:
        crowd = Crowd(engine)
        for wave in range(2):
            base = 10 * wave
            numbers = range(base, base + 5)
            for number in numbers:
                crowd.submit(number, ask(tiny.ids(20 + 3 * number % 40, seed=number), 30 + 20 * (number - base)))
            crowd.until(lambda: all(crowd.reached(number, 3) for number in numbers))  # noqa: B023 - called at once
            assert not any(crowd.seen[number].ended for number in numbers)
            before = engine.status().traces
            assert before > 0
            crowd.finish()
            assert engine.status().traces == before
