"""Thoughts, text and calls come apart as they should, and however a text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxkv.decode.request import Delta
from mlxkv.decode.text import decode
from mlxkv.serve.parts import Reasoning, Tools
from mlxkv.serve.pipeline import Pipeline

from .conftest import TOOLS, WEATHER, deltas, demo, joined, said, through

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm", "days": 2}}\n</tool_call>'
ARGUMENTS = '{"city": "Ulm", "days": 2}'


@pytest.mark.parametrize(
    ("text", "inside", "want"),
    [
        ("Hello.\n", False, [("text", "Hello.\n")]),
        ("<think>\nLet me see.\n</think>\n\nYes.", False, [("thought", "Let me see."), ("text", "Yes.")]),
        ("\n <think>a</think>b", False, [("thought", "a"), ("text", "b")]),
        ("Let me\nsee.\n</think>\n\nYes.\n\n", True, [("thought", "Let me\nsee."), ("text", "Yes.\n\n")]),
        ("\n\n</think>\n\nYes.", True, [("text", "Yes.")]),
        ("thinking without an end\n", True, [("thought", "thinking without an end\n")]),
        ("The tag <think> begins it, </think> ends it.", False, None),
        ("</think> begins nothing", False, None),
        ("<thin", False, None),
        ("  <thi>", False, None),
        ("   \n", False, None),
        ("a</thin", True, [("thought", "a</thin")]),
        ("a</think>\n", True, [("thought", "a")]),
        ("a</think><think>b</think> c", True, [("thought", "ab"), ("text", " c")]),
        (CALL, False, None),  # nobody offered tools
    ],
)
def test_thinking_is_told_apart(text: str, inside: bool, want: list[tuple[str, str]] | None) -> None:
    assert said(through(deltas(text), thinking=inside)) == (want or [("text", text)])


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (CALL, [("call", "get_weather"), ("arguments", ARGUMENTS)]),
        (
            f"I look.\n{CALL}\n" + '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>\n',
            [
                ("text", "I look."),
                ("call", "get_weather"),
                ("arguments", ARGUMENTS),
                ("call", "now"),
                ("arguments", "{}"),
            ],
        ),
        (
            f"<think>\nI call.\n</think>\n\n{CALL}\nDone.",
            [("thought", "I call."), ("call", "get_weather"), ("arguments", ARGUMENTS), ("text", "Done.")],
        ),
        (f"<think>\nI call.\n{CALL}", [("thought", "I call."), ("call", "get_weather"), ("arguments", ARGUMENTS)]),
        (
            f"<think>\nI could write\n{CALL}\nor not.\n</think>\nNo.",
            [("thought", f"I could write\n{CALL}\nor not."), ("text", "No.")],
        ),
        (CALL.removesuffix("</tool_call>"), [("call", "get_weather"), ("arguments", ARGUMENTS)]),
        (
            '<tool_call>{"name": "now", "arguments": {"a": "</tool_call>", "b": "ä\\ud83d\\ude00"}}</tool_call>',
            [("call", "now"), ("arguments", '{"a": "</tool_call>", "b": "ä😀"}')],
        ),
    ],
)
def test_calls_are_read(text: str, want: list[tuple[str, str]]) -> None:
    assert said(through(deltas(text), tools=TOOLS)) == want


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>\nnot JSON\n</tool_call>\n",
        '<tool_call>{"name": "now", "arguments": {"a": 1}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": "\\ud83d"}}</tool_call>',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "no name", "arguments": {}}</tool_call>',
        '<tool_call>["now"]</tool_call> and more',
        "<tool_call>[]</tool_call>",
        "<tool_call>" + "[" * 3000 + "</tool_call>",
        'a\n\n<tool_call>{"name": "now", "arguments": {"a": "never closed</tool_call> and more\n',
        "a\n<tool_ca",
        "a\n\n",
        "\n\n",
    ],
)
def test_text_that_is_no_call_is_shown(text: str) -> None:
    assert said(through(deltas(text), tools=TOOLS)) == [("text", text)]


def test_after_a_malformed_call_comes_a_good_one() -> None:
    text = f"<tool_call>oh<tool_call>\n</tool_call>\n{CALL}"
    want = [("text", "<tool_call>oh<tool_call>\n</tool_call>"), ("call", "get_weather"), ("arguments", ARGUMENTS)]
    assert said(through(deltas(text), tools=TOOLS)) == want


def test_a_call_that_was_cut_off_is_no_call() -> None:
    text = CALL.removesuffix("\n</tool_call>")
    assert said(through(deltas(text), "length", tools=TOOLS)) == [("text", text)]
    assert said(through(deltas(text), "stop", "x", tools=TOOLS)) == [("text", text)]
    thought = f"<think>\n{CALL}"
    assert said(through(deltas(thought), "length", tools=TOOLS)) == [("thought", CALL)]


def test_choice_none_and_one_call_only() -> None:
    assert said(through(deltas(CALL), tools=Tools((WEATHER,), "none"))) == [("text", CALL)]
    pipeline = Pipeline(demo(), Tools((WEATHER,), parallel=False), choice=3)
    parts = [part for delta in deltas(f"{CALL}\n{CALL} more") for part in pipeline.feed(delta)]
    assert pipeline.over and pipeline.calls == 1
    parts += pipeline.finish("cancelled")
    assert said(parts) == [("call", "get_weather"), ("arguments", ARGUMENTS)]
    assert {part.choice for part in parts if not isinstance(part, str)} == {3}  # type: ignore[union-attr]
    assert pipeline.finished("cancelled") == "tool_calls"


def test_why_a_choice_ended() -> None:
    for text, reason, want in [(CALL, "stop", "tool_calls"), (CALL, "length", "length"), ("Hi", "stop", "stop")]:
        pipeline = Pipeline(demo(), TOOLS)
        for delta in deltas(text):
            pipeline.feed(delta)
        pipeline.finish(reason)  # type: ignore[arg-type]
        assert pipeline.finished(reason) == want  # type: ignore[arg-type]


def test_not_told_apart_if_nobody_wants_it() -> None:
    text = "<think>\nLet me see.\n</think>\n\nYes."
    assert said(through(deltas(text), reasoning=Reasoning(split=False))) == [("text", text)]


def test_each_token_stays_with_its_text() -> None:
    text = f"<think>\nLet me see 😀.\n</think>\n\nI look 🫠.\n{CALL}\nDone"
    parts = joined(through(deltas(text), tools=TOOLS))
    for kind, shown, ids, logprobs in (part for part in parts if part[0] in ("text", "thought")):
        assert [logprob.id for logprob in logprobs] == list(ids)
        assert decode(demo(), list(ids)).strip("\n") == shown, kind


PIECES = st.sampled_from(
    ["<think>", "</think>", "\n", " ", "a", "é😀", "<tool_call>", "</tool_call>", CALL, "<", "</", "tool_call>", "{"]
    + ['{"name": "now", "arguments": {"a": "', '"}}', "Yes."]
)


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(PIECES, max_size=8).map("".join),
    cuts=st.lists(st.integers(0, 120), max_size=12),
    late=st.integers(0, 4),
    inside=st.booleans(),
    single=st.booleans(),
    reason=st.sampled_from(["stop", "length"]),
)
@example(text=f"\n{CALL}\n", cuts=[1, 12, 13], late=0, inside=True, single=False, reason="stop")
def test_however_a_text_is_cut_the_parts_are_the_same(
    text: str, cuts: list[int], late: int, inside: bool, single: bool, reason: str
) -> None:
    """Cut at any character, with the text up to ``late`` tokens behind its ids, as stop strings hold it back."""
    tools = Tools((WEATHER,), parallel=not single)
    tokens = deltas(text)
    whole = joined(through(tokens, reason, tools=tools, thinking=inside))
    recut: list[Delta] = []
    pieces = [tokens[i].text for i in range(len(tokens))]
    for i in range(len(tokens) + late):
        ids = tokens[i].token_ids if i < len(tokens) else []
        logprobs = tokens[i].logprobs if i < len(tokens) else ()
        recut.append(Delta(pieces[i - late] if i >= late else "", ids, logprobs))
    assert joined(through(recut, reason, tools=tools, thinking=inside)) == whole
    one = Delta(text, [t for d in tokens for t in d.token_ids], tuple(p for d in tokens for p in d.logprobs))
    assert joined(through([one], reason, tools=tools, thinking=inside)) == whole
    ids_first = [Delta("", one.token_ids, one.logprobs)]
    at = 0
    for cut in [*sorted(cuts), len(text)]:
        ids_first.append(Delta(text[at:cut], []))
        at = max(at, min(cut, len(text)))
    assert joined(through(ids_first, reason, tools=tools, thinking=inside)) == whole
    for part in whole:
        if part[0] == "arguments":
            assert isinstance(json.loads(part[2]), dict)


def test_long_answers_are_read_in_one_go() -> None:
    """Thousands of pieces each. Were all that is held looked at again for each of them, or for each marker, this would
    take minutes."""

    def parts(text: str) -> list[tuple[str, str]]:
        return said(through([Delta(text[at : at + 12], []) for at in range(0, len(text), 12)], tools=TOOLS))

    assert [kind for kind, _ in parts(CALL.replace("Ulm", "line</" * 20_000))] == ["call", "arguments"]
    for loop in ("<tool_call>" * 6_000, '<tool_call>{"</tool_call>' * 3_000, "<think>" + "<tool_call>" * 6_000):
        assert "".join(text for _, text in parts(loop)) == loop.removeprefix("<think>")
    with_end = "<tool_call>" * 6_000 + "</tool_call>"
    assert parts(with_end) == [("text", with_end)]
