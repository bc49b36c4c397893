"""Parts as Anthropic's events, with the ``anthropic`` library as the judge of both forms."""

from __future__ import annotations

import json

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from mlxkv.decode.request import CacheReport, Completion, Timings, Usage
from mlxkv.serve.anthropic_events import PING, Events, folded
from mlxkv.serve.anthropic_messages import conversation
from mlxkv.serve.parts import Arguments, Begun, Call, Ended, Ping, Reading, Text, Thought

STREAMED = TypeAdapter(RawMessageStreamEvent)


def ended(finish="stop", stop=None, generated=7):
    usage, cache = Usage(10, generated, 4), CacheReport("ram", "different_tokens", 4, 6)
    return Ended(0, finish, Completion("", "stop", [], usage, cache, Timings(0, 0, 0, 0, 0, 0)), stop)


def events(parts, **options):
    made = Events("msg_1", "m", 7, **options)
    return [event for part in [Begun(0, 10, 4), *parts] for event in made.of(part)]


def message(found):
    """What the client library makes of a stream; each event has passed its schema."""
    snapshot, buffers = None, {}
    for event in found:
        if event != PING:
            snapshot = accumulate_event(
                event=STREAMED.validate_python(event), current_snapshot=snapshot, json_bufs=buffers
            )
    assert snapshot is not None
    return snapshot.to_dict()


def blocks(parts, **options):
    return folded(events(parts, **options))["content"]


def test_the_order_of_everything():
    parts = [
        Reading(0, 5, 10),
        Ping(),
        Thought(0, "hm", token_ids=(1, 2)),
        Thought(0, "m", token_ids=(3,)),
        Text(0, "\n\n"),
        Text(0, "So: "),
        Text(0, "yes."),
        Call(0, 0, "toolu_a", "look"),
        Arguments(0, 0, '{"a"'),
        Arguments(0, 0, ": 1}"),
        Text(0, "\n"),
        Call(0, 1, "toolu_b", "wait"),
        ended("tool_calls"),
    ]
    found = events(parts)
    assert [e["type"] for e in found] == [
        "message_start", "ping", "ping",
        "content_block_start", *["content_block_delta"] * 3, "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert [e["index"] for e in found if "index" in e] == [0] * 5 + [1] * 4 + [2] * 4 + [3] * 2
    start = found[0]["message"]
    assert start["usage"] == {
        "input_tokens": 6, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 0,
    }  # fmt: skip
    whole = folded(found)
    assert [b["type"] for b in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["content"][1]["text"] == "\n\nSo: yes."
    assert whole["content"][2] == {"type": "tool_use", "id": "toolu_a", "name": "look", "input": {"a": 1}}
    assert whole["content"][3]["input"] == {}
    assert whole["stop_reason"] == "tool_use" and whole["stop_sequence"] is None
    assert whole["usage"]["output_tokens"] == 7
    assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": 3}


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(["", " ", "\n\n", "a", "b c"]).map(lambda t: Text(0, t)),
            st.sampled_from(["", "\n", "x"]).map(lambda t: Thought(0, t)),
            st.just(Ping()),
            st.sampled_from(["", "{}", '{"k": [1, "é"]}']),
        ),
        max_size=12,
    ),
    st.booleans(),
)
def test_the_client_and_the_whole_message_agree(drawn, hidden):
    parts, calls = [], 0
    for part in drawn:
        if isinstance(part, str):
            parts += [Call(0, calls, f"toolu_{calls}", "f"), *(Arguments(0, calls, c) for c in part)]
            calls += 1
        else:
            parts.append(part)
    found = events([*parts, ended()], hidden=hidden)
    whole = folded(found)
    Message.model_validate(whole)
    theirs = message(found)
    assert {key: theirs[key] for key in ("id", "content", "stop_reason")} == {
        key: whole[key] for key in ("id", "content", "stop_reason")
    }
    said = "".join(p.text for p in parts if isinstance(p, Text))
    kept = "".join(b["text"] for b in whole["content"] if b["type"] == "text")
    assert "".join(kept.split()) == "".join(said.split())  # only white space between blocks may be left out
    assert whole["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("finish", "stop", "generated", "expected"),
    [
        ("stop", None, 3, ("end_turn", None)),
        ("stop", "###", 3, ("stop_sequence", "###")),
        ("length", None, 7, ("max_tokens", None)),
        ("length", None, 6, ("model_context_window_exceeded", None)),
        ("tool_calls", None, 3, ("tool_use", None)),
    ],
)
def test_why_it_ended(finish, stop, generated, expected):
    found = folded(events([Text(0, "x"), ended(finish, stop, generated)]))
    assert (found["stop_reason"], found["stop_sequence"]) == expected


def test_white_space_alone_is_no_block_beside_others_but_an_answer_by_itself():
    assert blocks([Text(0, "\n"), ended()]) == [{"type": "text", "text": "\n"}]
    assert [b["type"] for b in blocks([Text(0, "\n"), Call(0, 0, "a", "f"), Text(0, " "), ended()])] == ["tool_use"]
    assert blocks([ended()]) == []


def test_thinking_that_is_not_shown_comes_back_in_its_signature():
    (hidden, text) = blocks([Thought(0, "secret é"), Text(0, "x"), ended()], hidden=True)
    assert hidden["thinking"] == "" and "secret" not in json.dumps(hidden)
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": [hidden, text]}]
    messages = conversation(None, said).messages
    assert messages[1] == {"role": "assistant", "content": "x", "reasoning_content": "secret é"}
    (shown, _) = blocks([Thought(0, "open"), Text(0, "x"), ended()])
    assert shown["thinking"] == "open" and shown["signature"]
