"""What a grammar for calls allows, mlx-lm's parser reads back, in every format; and what it refuses."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from mlxkv.decode.constraint import unpack
from mlxkv.decode.grammar import Grammars
from mlxkv.decode.request import Delta, Grammar
from mlxkv.decode.text import plain
from mlxkv.errors import DeadEnd, RequestError
from mlxkv.serve.parts import Tools
from mlxkv.serve.pipeline.grammars import grammar_for

from .conftest import TOOLS, demo, function, like, said, through

PLACE = {
    "type": "function",
    "function": {
        "name": "find_place",
        "description": "Finds a place. " * 50,
        "parameters": {
            "type": "object",
            "$defs": {"Unit": {"enum": ["km", "mile"], "type": "string"}},
            "properties": {
                "name": {"type": "string", "description": "Its name"},
                "far": {"type": "boolean"},
                "within": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "null"}]},
                "unit": {"$ref": "#/$defs/Unit"},
            },
            "required": ["name", "unit"],
        },
    },
}
NESTED = function("put", rows={"type": "array", "items": {"type": "integer"}}, flag={"type": "boolean"})
CALLABLE = Tools((PLACE, NESTED))
FLAT = Tools((PLACE, function("now")))
PARSERS = {
    "json_tools": CALLABLE,
    "mistral": CALLABLE,
    "kimi_k2": CALLABLE,
    "kimi_k3": CALLABLE,
    "pythonic": CALLABLE,
    "qwen3_coder": CALLABLE,
    "glm47": CALLABLE,
    "laguna": FLAT,
    "longcat": Tools((PLACE, NESTED)),
    "minimax_m2": CALLABLE,
    "minicpm5": CALLABLE,
    "muse_spark": CALLABLE,
    "gemma4": CALLABLE,
    "function_gemma": FLAT,
}


@lru_cache(maxsize=1)
def grammars() -> Grammars:
    return Grammars(demo(), len(demo()), demo().eos_token_ids)


def constraint(grammar: Grammar | None) -> Any:
    assert grammar is not None
    return grammars().constraint(grammar)


def matches(grammar: Grammar | None, text: str) -> bool:
    at = constraint(grammar)
    try:
        for token in encoded(text):
            at.advance(token)
    except DeadEnd:
        return False
    return at.accepting


@lru_cache(maxsize=1)
def closing() -> np.ndarray:
    """Tokens that may end something, and nothing else."""
    texts = {i: plain(demo()).decode([i]) for i in range(len(demo()))}
    return np.array([i for i, text in texts.items() if text and not text.strip(' \n"<>/}|])') or i in (5, 6)])


#: what ends a text that is written as it is
ENDS = ("</parameter>", "</arg_value>", "</longcat_arg_value>", "</param>", '<|"|>', "<escape>")


def walk(grammar: Grammar | None, seed: int, text: str = "") -> str:
    """``text`` and what a model that knows nothing might write behind it; it likes what ends things."""
    at, rng, ids = constraint(grammar), random.Random(seed), []

    def take(tokens: list[int]) -> bool:
        for n, token in enumerate(tokens):
            try:
                at.advance(token)
            except DeadEnd:
                at.rollback(n)
                return False
        ids.extend(tokens)
        return True

    assert grammar is not None and take(encoded(text))
    ends = [end for end in ENDS if json.dumps(end)[1:-1] in grammar.text] or [""]
    while not at.done and len(ids) < 1500:
        if at.accepting and (len(ids) > 300 or rng.random() < 0.5):
            break
        if rng.random() < 0.3 and take(encoded(rng.choice(ends))):
            continue
        allowed = np.setdiff1d(unpack(at.mask()), list(demo().eos_token_ids))
        short = np.intersect1d(allowed, closing())
        take([int(rng.choice(short if len(short) and rng.random() < 0.6 else allowed))])
    assert at.accepting, f"no end: {plain(demo()).decode(ids)[:500]!r}"
    return plain(demo()).decode(ids)


def encoded(text: str) -> list[int]:
    return plain(demo())(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("parser", PARSERS)
def test_what_a_grammar_allows_is_read_back(parser: str) -> None:
    tools = PARSERS[parser]
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in tools.functions}
    tokenizer = like(parser)
    required = Tools(tools.functions, "required")
    grammar = grammar_for(required, None, tokenizer)
    called: set[str] = set()
    for seed in range(6):
        text = walk(grammar, seed)
        parts = said(through([Delta(text, [])], tools=required, tokenizer=tokenizer))
        assert [kind for kind, _ in parts] == ["call", "arguments"] * (len(parts) // 2), text
        for (_, name), (_, arguments) in zip(parts[::2], parts[1::2], strict=True):
            Draft202012Validator(schemas[name]).validate(json.loads(arguments))
            called.add(name)
    assert called == set(schemas)


WEATHER_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm", "days": 2}}\n</tool_call>'
NOW_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ANSWER = Grammar.of({"json_schema": {"type": "object", "properties": {"n": {"const": 1}}, "required": ["n"]}})


def strict(tools: Tools) -> Tools:
    return Tools(tuple({**t, "function": {**t["function"], "strict": True}} for t in tools.functions), tools.choice)


@pytest.mark.parametrize(
    ("tools", "response", "good", "bad"),
    [
        (
            Tools(TOOLS.functions, "required"),
            None,
            [WEATHER_CALL, f"{WEATHER_CALL}\n{NOW_CALL}\n{NOW_CALL}"],
            ["", "Hi", "a" + NOW_CALL, NOW_CALL.replace("now", "no"), WEATHER_CALL.replace("2", '"2"'), '{"n": 1}'],
        ),
        (Tools(TOOLS.functions, ("name", "now")), None, [NOW_CALL], [WEATHER_CALL, f"{NOW_CALL}\n{WEATHER_CALL}"]),
        (Tools(TOOLS.functions, "required", False), None, [WEATHER_CALL], [f"{WEATHER_CALL}\n{NOW_CALL}"]),
        (Tools(TOOLS.functions, "required"), ANSWER, [NOW_CALL], ['{"n": 1}']),
        (TOOLS, ANSWER, [NOW_CALL, '{"n": 1}'], ["Hi", '{"n": 2}', '{"n": 1}' + NOW_CALL]),
        (TOOLS, Grammar("json_object"), [NOW_CALL, '{"m": [2]}'], ["Hi", "[]"]),
        (
            strict(TOOLS),
            None,
            ["", "Hi\n", NOW_CALL, f"I look.\n{WEATHER_CALL}\n{NOW_CALL}"],
            ["<tool_call>Hi", WEATHER_CALL.replace("2", '"2"'), NOW_CALL + "Hi"],
        ),
        (Tools(TOOLS.functions, "none"), ANSWER, ['{"n": 1}'], [NOW_CALL]),
    ],
)
def test_an_answer_is_what_was_asked_for(
    tools: Tools, response: Grammar | None, good: list[str], bad: list[str]
) -> None:
    grammar = grammar_for(tools, response, demo())
    assert [text for text in good if not matches(grammar, text)] == []
    assert [text for text in bad if matches(grammar, text)] == []


def test_no_grammar_where_any_text_will_do() -> None:
    for tools in (None, TOOLS, Tools((), "required"), Tools(TOOLS.functions, "none")):
        assert grammar_for(tools, None, demo()) is None
        assert grammar_for(tools if tools is not TOOLS else None, ANSWER, demo()) is ANSWER


@pytest.mark.parametrize("parser", ["minicpm5", "mistral", "json_tools", "pythonic", "kimi_k2"])
def test_strict_functions_leave_text_free_and_calls_not(parser: str) -> None:
    tools, tokenizer = strict(CALLABLE), like(parser)
    grammar = grammar_for(tools, None, tokenizer)
    assert matches(grammar, "Free <text> with {braces}\n")
    text = walk(grammar, 3, f"I look.{tokenizer.tool_call_start}")
    parts = said(through([Delta(text, [])], tools=tools, tokenizer=tokenizer))
    assert parts[0] == ("text", "I look.") and {kind for kind, _ in parts[1:]} == {"call", "arguments"}, text


def test_a_tool_set_of_an_agent_fits() -> None:
    """Thirty functions with long descriptions; without those they are within the bounds of grammars."""
    many = tuple({**PLACE, "function": {**PLACE["function"], "name": f"find_{i}"}} for i in range(30))
    grammar = grammar_for(Tools(many, "required"), None, demo())
    assert matches(grammar, NOW_CALL.replace("now", "find_29").replace("{}", '{"name": "a", "unit": "km"}'))


@pytest.mark.parametrize(
    ("parser", "tools", "response", "param"),
    [
        (None, Tools(TOOLS.functions, "required"), None, "tools"),
        (None, TOOLS, ANSWER, "tools"),
        ("some_new_one", Tools(TOOLS.functions, "required"), None, "tool_choice"),
        ("some_new_one", strict(TOOLS), None, "tools"),
        ("some_new_one", TOOLS, ANSWER, "grammar"),
        ("json_tools", Tools(TOOLS.functions, ("name", "other")), None, "tool_choice.function.name"),
        ("json_tools", TOOLS, Grammar("regex", "a+"), "tool_choice"),
        ("pythonic", Tools((function("a-b"),), "required"), None, "tool_choice"),
        ("pythonic", Tools((function("f", **{"no name": {"type": "string"}}),), "required"), None, "tool_choice"),
        ("qwen3_coder", Tools((function("f", a={"enum": ["<b>"]}),), "required"), None, "tool_choice"),
        ("glm47", Tools((function("f", a={"type": ["integer", "boolean"]}),), "required"), None, "tool_choice"),
        ("function_gemma", Tools((function("f", a={"type": "array"}),), "required"), None, "tool_choice"),
        ("qwen3_coder", Tools((function("f", a={"$ref": "http://a.example/b"}),), "required"), None, "tool_choice"),
        ("gemma4", Tools((function("f", a={"$ref": "#"}),), "required"), None, "tool_choice"),
    ],
)
def test_what_cannot_be_kept_to_is_refused(
    parser: str | None, tools: Tools, response: Grammar | None, param: str
) -> None:
    tokenizer = like("json_tools" if parser in (None, "some_new_one") else parser)
    if parser is None:
        tokenizer._tool_parser = None
    elif parser == "some_new_one":
        tokenizer._tool_parser = lambda text, tools: {}  # of a module that has no form
    with pytest.raises(RequestError) as caught:
        grammar_for(tools, response, tokenizer)
    assert caught.value.param == param
