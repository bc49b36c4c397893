"""Grammars: masks against a finite language's own words, forks and ways back, and answers that parse."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import mlxkv
from mlxkv.decode import grammar as grammar_module
from mlxkv.decode.constraint import unpack
from mlxkv.decode.grammar import Grammars
from mlxkv.decode.request import Grammar, Request
from mlxkv.errors import DeadEnd, RequestError
from tests import tiny

PADDED = tiny.VOCAB + 13  # as embeddings are, wider than the tokenizer
SPECIAL = {tiny.VOCAB - 1, tiny.VOCAB - 2, tiny.VOCAB - 3}
A = tiny.tokenizer().token_to_id("a")


def fast() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tiny.tokenizer())


GRAMMARS = Grammars(fast(), PADDED, {tiny.EOS, tiny.EOS - 2})
TEXT = {i: tiny.tokenizer().decode([i], skip_special_tokens=False) for i in range(tiny.VOCAB) if i not in SPECIAL}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 3, "maximum": 99},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}


def check(text: str) -> None:
    """``text`` is JSON of the schema above."""
    said = json.loads(text)
    assert list(said) == ["name", "age", "kind", "tags"]
    assert isinstance(said["name"], str) and len(said["name"]) <= 6
    assert isinstance(said["age"], int) and 3 <= said["age"] <= 99
    assert said["kind"] in ("cat", "dog")
    assert len(said["tags"]) <= 2 and all(isinstance(t, bool) for t in said["tags"])


def expected(words: set[str], so_far: str) -> set[int]:
    """The tokens that a finite language of ``words`` allows after ``so_far``."""
    ids = {i for i, text in TEXT.items() if any(w.startswith(so_far + text) for w in words)}
    return ids | ({tiny.EOS, tiny.EOS - 2} if so_far in words else set())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_masks_are_those_of_the_language_forwards_and_back(data):
    words = data.draw(st.sets(st.text("athein ", min_size=1, max_size=9), min_size=1, max_size=6))
    grammar = Grammar("regex", "|".join(re.escape(w).replace(r"\ ", " ") for w in words))
    lines: list[tuple[object, list[int]]] = [(GRAMMARS.constraint(grammar), [])]
    for _ in range(12):
        constraint, tokens = lines[data.draw(st.integers(0, len(lines) - 1))]
        ended = bool(tokens) and tokens[-1] not in TEXT
        so_far = "".join(TEXT.get(t, "") for t in tokens)
        right = set() if ended else expected(words, so_far)
        allowed = set(unpack(constraint.mask()).tolist())
        rest = [w[len(so_far) :] for w in words if w.startswith(so_far)]
        if os.path.commonprefix(rest):  # of text that must come, only its usual tokens are allowed
            assert allowed <= right and bool(allowed) == bool(right)
        else:
            assert allowed == right
        again = GRAMMARS.constraint(grammar)
        for token in tokens:
            again.advance(token)
        assert set(unpack(again.mask()).tolist()) == allowed
        assert constraint.accepting == (so_far in words)
        assert constraint.done == (so_far in words and not allowed & set(TEXT))
        act = data.draw(st.sampled_from(["on", "on", "on", "back", "fork", "wrong"]))
        if act == "on" and allowed:
            token = data.draw(st.sampled_from(sorted(allowed)))
            constraint.advance(token)
            tokens.append(token)
        elif act == "back":
            n = data.draw(st.integers(0, len(tokens)))
            constraint.rollback(n)
            del tokens[len(tokens) - n :]
        elif act == "fork" and len(lines) < 3:
            lines.append((constraint.fork(), list(tokens)))
        elif act == "wrong":
            token = data.draw(st.sampled_from(sorted({*range(-1, PADDED + 40)} - allowed)))
            with pytest.raises(DeadEnd):
                constraint.advance(token)


def test_going_back_further_than_the_start_is_refused():
    constraint = GRAMMARS.constraint(Grammar("regex", "a*"))
    constraint.advance(A)
    with pytest.raises(ValueError):
        constraint.rollback(2)
    constraint.rollback(1)
    assert A in unpack(constraint.mask())


def test_an_end_token_that_is_text_too_is_never_taken_for_text():
    grammars = Grammars(fast(), tiny.VOCAB, {A})
    constraint = grammars.constraint(Grammar("regex", "ba?"))
    assert A not in unpack(constraint.mask())
    constraint.advance(tiny.tokenizer().token_to_id("b"))
    assert unpack(constraint.mask()).tolist() == [A]
    constraint.advance(A)
    assert constraint.done and not unpack(constraint.mask()).size
    with pytest.raises(RequestError, match="matches nothing"):
        grammars.constraint(Grammar("regex", "a"))


def test_special_tokens_never_stand_for_text():
    constraint = GRAMMARS.constraint(Grammar("regex", r"(?s:.*)<\|im_start\|>"))
    allowed = set(unpack(constraint.mask()).tolist())
    assert not allowed & SPECIAL and not {i for i in allowed if i >= tiny.VOCAB}
    assert A in allowed


@pytest.mark.parametrize(
    ("grammar", "match"),
    [
        ({"regex": "((("}, "unclosed group"),
        ({"lark": "start: nothing"}, "nothing"),
        ({"lark": "start: a\na: a"}, "matches nothing"),
        ({"lark": 'start: %json {"type": "integer", "multiple\\u004ff": 1000003}'}, "too large"),
        ({"lark": "start: %json nothing"}, "cannot be read"),
        ({"json_schema": {"type": "nope"}}, "nope"),
        ({"json_schema": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
        ({"json_schema": {"$ref": "http://example.com/x"}}, "http"),
        ({"json_schema": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}}, "too large"),
        ({"json_schema": {"properties": {f"p{i}": {"pattern": "a?" * 50} for i in range(30)}}}, "operators"),
        ({"regex": r"\w?" * 1100}, "too large"),
        ({"regex": "a" * 20_000}, "too large"),
        ({"regex": "a\ud800"}, "surrogate"),
        ({"lark": 'start: "a\ud800"'}, "surrogate"),
    ],
)
def test_a_grammar_that_does_not_compile_says_why(grammar, match):
    with pytest.raises(RequestError, match=match) as caught:
        GRAMMARS.constraint(Grammar.of(grammar))
    assert caught.value.param == "grammar" and "grammar" in caught.value.message
    assert len(caught.value.message) < 700


@pytest.mark.parametrize("kind", ["rules", "schema"])
def test_a_long_chain_of_rules_does_not_end_the_process(kind):
    n = 1500
    if kind == "rules":
        grammar = {"lark": "start: r0\n" + "".join(f"r{i}:r{i + 1}\n" for i in range(n)) + f'r{n}: "a"'}
    else:
        chain = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}, "type": "array"} for i in range(700)}
        grammar = {"json_schema": {"$ref": "#/$defs/a0", "$defs": {**chain, "a700": {"const": 1}}}}
    allowed = unpack(GRAMMARS.constraint(Grammar.of(grammar)).mask()).tolist()
    assert (allowed == [A]) if kind == "rules" else "[" in {TEXT[i] for i in allowed}


@pytest.mark.parametrize(
    "value",
    [
        {}, "a", {"regex": 5}, {"regex": "a", "lark": "b"}, {"json_object": False}, {"json_schema": "{}"},
        {"gbnf": "a"}, {"json_schema": {"a": object()}}, {"json_schema": {"a": float("nan")}},
    ],
)  # fmt: skip
def test_what_is_no_grammar_is_refused_by_name(value):
    with pytest.raises(RequestError, match="grammar") as caught:
        Request(tokens=[1], grammar=value)
    assert caught.value.param == "grammar"


@pytest.mark.parametrize("arch", ["qwen3_5", "llama"])
def test_answers_keep_to_their_grammar_and_bad_ones_harm_nobody(arch, tiny_model):
    with mlxkv.load(tiny_model(arch), cache=False) as engine:
        with pytest.raises(RequestError, match="does not compile"):
            mlxkv.generate(engine, tiny.ids(20), grammar={"regex": "((("})
        for seed in range(2):
            options = {"temperature": 1.5, "seed": seed, "logit_bias": {A: 5.0}, "frequency_penalty": 0.5}
            said = mlxkv.generate(engine, tiny.ids(20), max_tokens=400, grammar={"json_schema": SCHEMA}, **options)
            assert said.finish_reason == "stop"
            check(said.text)
        one = mlxkv.generate(
            engine, tiny.ids(20), max_tokens=50, grammar={"regex": "(yes|no), (a|b){3}"}, logprobs=True
        )
        assert re.fullmatch("(yes|no), (a|b){3}", one.text) and one.finish_reason == "stop"
        assert one.logprobs is not None and [t.id for t in one.logprobs] == one.token_ids
        assert mlxkv.generate(engine, tiny.ids(20), max_tokens=3).finish_reason == "length"


def test_limits_and_stop_strings_end_an_answer_in_the_middle_of_its_grammar(tiny_model):
    with mlxkv.load(tiny_model("llama"), cache=False) as engine:
        short = mlxkv.generate(engine, tiny.ids(20), max_tokens=4, grammar={"regex": "b{50}"})
        cut = mlxkv.generate(engine, tiny.ids(20), grammar={"regex": "b{9}stopb{9}"}, stop="stop")
    assert short.finish_reason == "length" and set(short.text) == {"b"}
    assert cut.finish_reason == "stop" and cut.text == "b" * 9


def test_one_that_needs_too_many_states_is_refused_also_in_the_middle(monkeypatch):
    """The asker's fault, not the engine's."""
    monkeypatch.setattr(grammar_module, "LEXER_STATES", 600)
    began = Grammars(fast(), PADDED, {tiny.EOS}).constraint(Grammar("regex", "[ab]*a[ab]{40}c"))
    rng, b = np.random.default_rng(1), tiny.tokenizer().token_to_id("b")
    with pytest.raises(RequestError, match="more states than the matcher may have.*simpler") as refused:
        for token in rng.choice([A, b], 2000).tolist():
            began.advance(token)
            began.mask()
    assert refused.value.param == "grammar"


def test_the_demo_model_writes_json_that_parses():
    folder = Path(mlxkv.__file__).parent / "models" / "mlxkv-demo"
    messages = [{"role": "user", "content": "Tell me about a cat, as JSON."}]
    with mlxkv.load(folder, cache=False) as engine:
        said = mlxkv.generate(engine, messages, max_tokens=200, grammar={"json_schema": SCHEMA})
        check(said.text)
        free = mlxkv.generate(engine, messages, max_tokens=200, grammar={"json_object": True}, temperature=0.7, seed=1)
    assert said.finish_reason == "stop"
    assert free.finish_reason == "length" or isinstance(json.loads(free.text), dict)


def test_masks_are_as_wide_as_the_logits():
    narrow = Grammars(fast(), tiny.VOCAB - 2, {tiny.EOS}).constraint(Grammar("regex", "a*"))
    assert len(narrow.mask()) == -(-(tiny.VOCAB - 2) // 32)
    wide = Grammars(fast(), 1000, {999}).constraint(Grammar("regex", "a*"))
    assert len(wide.mask()) == 32 and np.flatnonzero(np.isin(unpack(wide.mask()), [999])).size == 1


def test_a_grammar_that_is_known_does_not_wait_for_one_that_is_compiled(monkeypatch):
    free, begun = threading.Event(), threading.Event()
    known, slow = Grammar("regex", "a{3}"), Grammar("regex", "b{3}")
    GRAMMARS.constraint(known)
    compiled = grammar_module._compile

    def slowly(grammar, vocabulary):
        begun.set()
        assert free.wait(30)
        return compiled(grammar, vocabulary)

    monkeypatch.setattr(grammar_module, "_compile", slowly)
    found = []
    thread = threading.Thread(target=lambda: found.append(GRAMMARS.constraint(slow)), daemon=True)
    thread.start()
    assert begun.wait(30)
    asked = threading.Thread(target=lambda: found.append(GRAMMARS.constraint(known)), daemon=True)
    asked.start()
    asked.join(30)
    assert len(found) == 1 and unpack(found[0].mask()).size
    free.set()
    thread.join(30)
    assert len(found) == 2
