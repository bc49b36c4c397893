"""The events and the object of a response, made of scripted parts; judged by the types of the ``openai`` library."""

from __future__ import annotations

import random

import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from mlxkv.decode.request import CacheReport, Completion, Timings, TokenLogprob, Usage
from mlxkv.errors import EngineError, QueueFull, RequestError
from mlxkv.serve.parts import Arguments, Begun, Call, Ended, Ping, Reading, Text, Thought
from mlxkv.serve.responses_output import Output, new_id, seal, unseal

EVENTS = TypeAdapter(ResponseStreamEvent)


def head():
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": 1,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": "m",
        "parallel_tool_calls": True,
        "temperature": 0.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
    }


def ended(finish="stop"):
    made = Completion(
        text="",
        finish_reason="stop" if finish != "length" else "length",
        token_ids=[1, 2, 3],
        usage=Usage(10, 3, 4),
        cache=CacheReport("ram", None, None, 9),
        timings=Timings(0, 0, 0, 0, 0, 0),
    )
    return Ended(0, finish, made)


def events_of(parts, **options):
    """The events of these parts, checked: types, numbers, order, and that the library's own reader agrees."""
    output = Output(head(), **options)
    events = output.begin()
    for part in parts:
        events += output.feed(part)
    assert output.done
    check(events, output.response)
    return events, output.response


def check(events, response):
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    reader = ResponseStreamState(input_tools=[], text_format=omit)
    for event in events:
        reader.handle_event(EVENTS.validate_python(event, strict=True))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{response['status']}" and events[-1]["response"] == response
    Response.model_validate(response, strict=True)
    for i, item in enumerate(response["output"]):
        mine = [event for event in events if event.get("output_index") == i]
        assert mine[0]["type"] == "response.output_item.added" and mine[0]["item"]["status"] == "in_progress"
        assert {event["item_id"] for event in mine if "item_id" in event} == {item["id"]}
        deltas = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        said = item["arguments"] if item["type"] == "function_call" else texts(item)
        assert deltas == said
        if response["status"] != "failed":
            assert mine[-1]["type"] == "response.output_item.done" and mine[-1]["item"] == item
    return reader


def texts(item):
    return "".join(part["text"] for part in item.get("content") or item.get("summary") or [])


def names(events):
    return [event["type"].removeprefix("response.") for event in events]


def test_reasoning_text_and_calls_in_order():
    parts = [
        Begun(0, 10, 4),
        Reading(0, 4, 10),
        Thought(0, "so", (), (5,)),
        Thought(0, " it is", (), (6, 7)),
        Text(0, "Yes"),
        Text(0, "."),
        Call(0, 0, "call_a", "f"),
        Arguments(0, 0, '{"a":'),
        Arguments(0, 0, "1}"),
        Call(0, 1, "call_b", "g"),
        Arguments(0, 1, "{}"),
        ended("tool_calls"),
    ]
    events, response = events_of(parts)
    item = ["output_item.added", "output_item.done"]
    call = [item[0], "function_call_arguments.delta", "function_call_arguments.done", item[1]]
    assert names(events) == [
        "created",
        "in_progress",
        item[0],
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        item[1],
        item[0],
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        item[1],
        *call[:2],
        *call[1:],
        *call,
        "completed",
    ]
    assert [i["type"] for i in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert [i["call_id"] for i in response["output"][2:]] == ["call_a", "call_b"]
    assert response["status"] == "completed" and response["completed_at"] and response["incomplete_details"] is None
    assert response["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 6},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 13,
    }


def test_a_summary_takes_the_place_of_content_and_may_be_sealed():
    events, response = events_of([Thought(0, "hm"), Text(0, "x"), ended()], summary=True, sealed=True)
    item = response["output"][0]
    assert item["summary"] == [{"type": "summary_text", "text": "hm"}] and "content" not in item
    assert unseal(item["encrypted_content"]) == "hm"
    assert names(events)[3:7] == [
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
    ]


@pytest.mark.parametrize("sealed", ["gAAAA", "mlxkv1:!", "mlxkv1:/w==", ""])
def test_what_others_sealed_is_told_apart(sealed):
    assert unseal(sealed) is None
    assert unseal(seal("höl")) == "höl"


@pytest.mark.parametrize(
    ("parts", "kinds"),
    [
        ([Text(0, "\n\n"), Call(0, 0, "c", "f"), Text(0, "\n"), Call(0, 1, "d", "f")], ["function_call"] * 2),
        ([Thought(0, "\n"), Text(0, "\n"), Text(0, "\nso")], ["message"]),
        ([Text(0, "a"), Call(0, 0, "c", "f"), Text(0, "\n"), Text(0, "b")], ["message", "function_call", "message"]),
        ([Text(0, " \n")], ["message"]),
        ([], ["message"]),
        ([Thought(0, "a"), Text(0, " ")], ["reasoning", "message"]),
    ],
)
def test_white_space_alone_begins_no_item_beside_others(parts, kinds):
    calls = any(isinstance(part, Call) for part in parts)
    _, response = events_of([*parts, ended("tool_calls" if calls else "stop")])
    assert [item["type"] for item in response["output"]] == kinds
    messages = [item for item in response["output"] if item["type"] == "message"]
    if not calls:
        assert texts(messages[0]) == "".join(part.text for part in parts if isinstance(part, Text))


def test_cut_by_the_limit():
    _, response = events_of([Text(0, "so far"), ended("length")])
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete" and response["completed_at"] is None
    _, response = events_of([Thought(0, "so far"), ended("length")])
    assert [item["type"] for item in response["output"]] == ["reasoning"]


def test_logprobs_stay_with_the_text_they_belong_to():
    def objects(some):
        return [{"token": str(t.id), "bytes": [t.id], "logprob": t.logprob, "top_logprobs": []} for t in some]

    def said(text, *ids):
        return Text(0, text, tuple(TokenLogprob(i, -1.0) for i in ids))

    parts = [said("", 1), said("\n", 2), said("a", 3), said("", 4), said("b", 5, 6), ended()]
    events, response = events_of(parts, logprobs=objects)
    (part,) = response["output"][0]["content"]
    assert part["text"] == "\nab" and [p["token"] for p in part["logprobs"]] == list("123456")
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [[p["token"] for p in d["logprobs"]] for d in deltas] == [["1", "2", "3"], ["4"], ["5", "6"]]
    first = next(event for event in events if event["type"] == "response.content_part.added")
    assert first["part"]["logprobs"] == [] and first["part"]["text"] == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineError("broke"), "server_error"),
        (ValueError("x"), "server_error"),
        (QueueFull("full"), "rate_limit_exceeded"),
        (RequestError("bad"), "invalid_prompt"),
    ],
)
def test_an_answer_that_fails_ends_with_one_event(error, code):
    output = Output(head())
    events = [*output.begin(), *output.feed(Text(0, "half")), *output.feed(Ping()), *output.fail(error, "It broke.")]
    check(events, output.response)
    assert events[-1]["response"]["error"] == {"code": code, "message": "It broke."}
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"


def test_the_whole_is_the_same_however_the_parts_are_cut():
    def plain(response):
        return [{k: v for k, v in item.items() if k != "id"} for item in response["output"]]

    text, thought, arguments = "\n Said and done.\n", "Hm,\n well.", '{"a": [1, 2]}'
    rng = random.Random(3)
    seen = []
    for _ in range(20):
        parts = [
            *(Thought(0, piece) for piece in cut(thought, rng)),
            *(Text(0, piece) for piece in cut(text, rng)),
            Call(0, 0, "c", "f"),
            *(Arguments(0, 0, piece) for piece in cut(arguments, rng)),
            ended("tool_calls"),
        ]
        seen.append(plain(events_of(parts)[1]))
    assert all(found == seen[0] for found in seen)


def cut(text, rng):
    places = [0, *sorted(rng.sample(range(1, len(text)), rng.randrange(len(text)))), len(text)]
    return [text[a:b] for a, b in zip(places, places[1:], strict=False)]
