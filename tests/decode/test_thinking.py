"""Thinking within a budget, and grammars that begin behind it."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlxkv
from mlxkv.decode.constraint import AHEAD, pack, unpack
from mlxkv.decode.thinking import Marks, Thoughts
from mlxkv.errors import DeadEnd
from tests import tiny
from tests.decode import thinker

# a vocabulary of 12 ids: 1 2 begin a thought, 3 4 3 5 end it, 9 is an end token, 6 and 7 are all that the grammar says
SIZE, EOS = 12, {9}
MARKS = Marks("<", ">", (1, 2), (3, 4, 3, 5))
SHORT = Marks("<", ">", (1,), (3,))


class Sixes:
    """A grammar: 6, then 7, then the end."""

    free = False

    def __init__(self, at: int = 0) -> None:
        self.at = at

    @property
    def accepting(self) -> bool:
        return self.at >= 2

    @property
    def done(self) -> bool:
        return self.at == 2

    def mask(self) -> np.ndarray:
        return pack([[6], [7], [9], []][self.at], SIZE)

    def advance(self, token: int) -> None:
        assert token in unpack(self.mask())
        self.at += 1

    def fork(self) -> Sixes:
        return Sixes(self.at)

    def rollback(self, n: int) -> None:
        assert 0 <= n <= self.at
        self.at -= n


def allowed(thoughts: Thoughts) -> set[int]:
    return {t for t in unpack(thoughts.mask()).tolist() if t < SIZE}


def expected(tokens, marks, thinking, budget, grammar):
    """What may come after ``tokens``, told from the whole of them. None: this way was not allowed."""
    everything, spent, inside, said, recent = set(range(SIZE)), 0, thinking, None, []
    for token in [*tokens, None]:
        mark = marks.end_ids if inside else marks.start_ids
        n = max(n for n in range(len(mark)) if not n or recent[-n:] == list(mark[:n]))
        over = budget is not None and spent >= budget
        if said is not None:
            may = [{6}, {7}, {9}, set()][said]
        elif inside:
            may = {mark[n]} if over else everything - (EOS if grammar else set())
        elif grammar and n:
            may = {mark[n]}
        elif grammar:
            may = {6} if over else {6, mark[0]}
        else:
            may = everything - ({mark[-1]} if over and n == len(mark) - 1 else set())
        if token is None:
            return may, inside, said
        if token not in may:
            return None
        recent.append(token)
        if said is not None:
            said += 1
        elif n == len(mark) - 1 and token == mark[-1]:
            inside, recent = not inside, []
            if grammar and not inside:
                said = 0
        elif inside:
            spent += 1
        elif grammar and token == 6:
            said = 1


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_masks_are_what_the_tokens_say_forwards_and_back(data):
    marks = data.draw(st.sampled_from([MARKS, SHORT]))
    thinking, grammar = data.draw(st.booleans()), data.draw(st.booleans())
    budget = data.draw(st.sampled_from([None, 0, 1, 3]))
    made = Thoughts(marks, thinking, budget, Sixes() if grammar else None, SIZE, EOS)
    lines: list[tuple[Thoughts, list[int]]] = [(made, [])]
    for _ in range(20):
        thoughts, tokens = lines[data.draw(st.integers(0, len(lines) - 1))]
        found = expected(tokens, marks, thinking, budget, grammar)
        assert found is not None
        may, inside, said = found
        assert allowed(thoughts) == may
        assert thoughts.done == (said == 2)
        if thoughts.free:
            assert may == set(range(SIZE))
        if inside or said is not None:
            assert thoughts.accepting == (not grammar or (said or 0) >= 2)
        act = data.draw(st.sampled_from(["on", "on", "mark", "mark", "back", "fork", "wrong"]))
        if act in ("on", "mark") and may:
            likely = may & {*marks.start_ids, *marks.end_ids, 6, 7} if act == "mark" else may
            token = data.draw(st.sampled_from(sorted(likely or may)))
            thoughts.advance(token)
            tokens.append(token)
        elif act == "back":
            n = data.draw(st.integers(0, len(tokens)))
            thoughts.rollback(n)
            del tokens[len(tokens) - n :]
        elif act == "fork" and len(lines) < 3:
            lines.append((thoughts.fork(), list(tokens)))
        elif act == "wrong" and set(range(SIZE)) - may:
            with pytest.raises(DeadEnd):
                thoughts.advance(data.draw(st.sampled_from(sorted(set(range(SIZE)) - may))))


@settings(max_examples=50, deadline=None)
@given(st.booleans(), st.lists(st.integers(0, SIZE - 1), min_size=20, max_size=60), st.sampled_from([None, 18, 30]))
def test_what_is_free_stays_so_for_as_many_tokens_as_a_cycle_has(thinking, tokens, budget):
    thoughts, until = Thoughts(SHORT, thinking, budget, None, SIZE, EOS), 0
    for at, token in enumerate(tokens):
        if thoughts.free:
            until = at + AHEAD
        may = allowed(thoughts)
        assert at >= until or may == set(range(SIZE))
        thoughts.advance(token if token in may else sorted(may)[0])
    assert until


def test_going_back_further_than_the_start_is_refused():
    thoughts = Thoughts(SHORT, True, 5, None, SIZE, EOS)
    thoughts.advance(8)
    with pytest.raises(ValueError):
        thoughts.rollback(2)


# with a model

HELLO = [{"role": "user", "content": "the cat sat on the mat, and the cat sat on the"}]
ANSWER = re.compile(r"(yes|no), [0-9]{3}")
#: what a model of no sense is not to say by itself
NO_MARKS = {thinker.START: -100.0, thinker.END: -100.0, tiny.EOS: -100.0}


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory):
    engines = {}

    def get(template=thinker.TEMPLATE, drafts=False):
        """drafts: of the model itself, 3 at a time."""
        if (template, drafts) not in engines:
            folder = thinker.make("llama", tmp_path_factory.mktemp("thinks"), template)
            options = {"draft": "model", "draft_model": folder, "draft_depth": 3} if drafts else {"draft": "off"}
            engines[template, drafts] = mlxkv.load(folder, cache=False, **options)
        return engines[template, drafts]

    yield get
    for engine in engines.values():
        engine.close()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "seed": 7}])
@pytest.mark.parametrize("budget", [0, 1, 30])
def test_a_thought_ends_when_its_budget_is_spent(engine_of, budget, sampling):
    sampling = {"max_tokens": 48, "logit_bias": NO_MARKS, **sampling}
    plain = mlxkv.generate(engine_of(), HELLO, **sampling)
    assert thinker.END not in plain.token_ids
    for drafts in (False, True):
        done = mlxkv.generate(engine_of(drafts=drafts), HELLO, reasoning_budget=budget, **sampling)
        assert done.token_ids[:budget] == plain.token_ids[:budget]
        assert done.token_ids.index(thinker.END) == budget and len(done.token_ids) == 48
        if not drafts:
            alone = done
        assert done.token_ids == alone.token_ids
    assert done.drafts.accepted > 9  # across the end of the thought


def test_a_thought_that_ends_by_itself_is_left_alone(engine_of):
    bias = {thinker.START: -100.0, thinker.END: 100.0}
    done = mlxkv.generate(engine_of(), HELLO, max_tokens=4, logit_bias=bias, reasoning_budget=30)
    assert done.token_ids[0] == thinker.END


@pytest.mark.parametrize("budget", [0, 12])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_grammar_holds_behind_the_thought(engine_of, drafts, budget):
    done = mlxkv.generate(
        engine_of(drafts=drafts),
        HELLO,
        max_tokens=100,
        logit_bias=NO_MARKS,
        reasoning_budget=budget,
        grammar={"regex": ANSWER.pattern},
    )
    thought, mark, answer = done.text.partition("</think>")
    assert mark and bool(thought) == bool(budget) and ANSWER.fullmatch(answer)
    assert done.finish_reason == "stop"


def test_where_thinking_is_off_a_grammar_holds_from_the_first_character(engine_of):
    options = {"max_tokens": 30, "grammar": {"regex": ANSWER.pattern}}
    for template in (thinker.TEMPLATE, thinker.BARE):
        done = mlxkv.generate(engine_of(template), HELLO, template_kwargs={"enable_thinking": False}, **options)
        assert ANSWER.fullmatch(done.text)
    thinks = {thinker.START: 100.0}
    raw = mlxkv.generate(engine_of(thinker.BARE), [5, 6, 7], logit_bias=thinks, **options)
    assert ANSWER.fullmatch(raw.text)
    plain = mlxkv.generate(engine_of(thinker.PLAIN), HELLO, logit_bias=thinks, **options)
    assert ANSWER.fullmatch(plain.text)


def test_a_model_may_think_before_a_grammar_where_the_template_says_nothing(engine_of):
    engine, options = engine_of(thinker.BARE), {"max_tokens": 60, "grammar": {"regex": ANSWER.pattern}}
    bias = {thinker.START: 100.0, thinker.END: -100.0}
    done = mlxkv.generate(engine, HELLO, logit_bias=bias, reasoning_budget=7, **options)
    assert done.token_ids[0] == thinker.START and done.token_ids[8] == thinker.END
    assert ANSWER.fullmatch(done.text.partition("</think>")[2])
    never = mlxkv.generate(engine, HELLO, logit_bias=bias, reasoning_budget=0, **options)
    assert ANSWER.fullmatch(never.text)


def test_thoughts_that_the_model_begins_are_counted_together(engine_of):
    bias = {thinker.START: 100.0, thinker.END: -100.0}
    done = mlxkv.generate(engine_of(thinker.BARE), HELLO, max_tokens=30, logit_bias=bias, reasoning_budget=5)
    assert done.token_ids[0] == thinker.START and done.token_ids[6] == thinker.END
    assert thinker.START not in done.token_ids[7:]  # nothing is left for another
    none = mlxkv.generate(engine_of(thinker.BARE), HELLO, max_tokens=30, logit_bias=bias, reasoning_budget=0)
    assert thinker.START not in none.token_ids


def test_a_model_that_does_not_think_needs_no_budget(tiny_model):
    with mlxkv.load(tiny_model("llama"), cache=False) as engine:
        plain = mlxkv.generate(engine, HELLO, max_tokens=5)
        assert mlxkv.generate(engine, HELLO, max_tokens=5, reasoning_budget=0).token_ids == plain.token_ids
