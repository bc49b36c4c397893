"""Items as messages, and the responses that a conversation goes on from."""

from __future__ import annotations

import random

import pytest

from mlxkv.errors import RequestError
from mlxkv.messages import normalise
from mlxkv.serve.responses_input import checked, messages
from mlxkv.serve.responses_output import seal
from mlxkv.serve.responses_store import Kept, Responses


def nothing(id):
    return None


def made(items, instructions=None, before=()):
    found = messages(before, checked(items, nothing), instructions)
    normalise(found)  # what a template takes
    return found


def thought(**fields):
    return {"type": "reasoning", "id": "rs_1", "summary": [], **fields}


def call(id, name="f"):
    return {"type": "function_call", "call_id": id, "name": name, "arguments": "{}"}


def output(id, text="42"):
    return {"type": "function_call_output", "call_id": id, "output": text}


def said(text):
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def tool(id, name="f"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}


USER = {"role": "user", "content": "hi"}


def test_the_pieces_of_an_answer_are_one_message():
    items = [
        USER,
        thought(content=[{"type": "reasoning_text", "text": "hm"}]),
        said("Let me look."),
        call("a"),
        call("b", "g"),
    ]
    assert made([*items, output("a"), output("b", [{"type": "input_text", "text": "x"}]), said("So."), USER]) == [
        USER,
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "Let me look.",
            "tool_calls": [tool("a"), tool("b", "g")],
        },
        {"role": "tool", "tool_call_id": "a", "name": "f", "content": "42"},
        {"role": "tool", "tool_call_id": "b", "name": "g", "content": "x"},
        {"role": "assistant", "content": "So."},
        USER,
    ]


def test_two_answers_stay_two():
    assert made([USER, said("one"), said("two")]) == [
        USER,
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
    ]
    assert [m["role"] for m in made([USER, call("a"), output("a"), call("b"), output("b")])] == [
        "user",
        *("assistant", "tool") * 2,
    ]


@pytest.mark.parametrize(
    "item",
    [
        thought(content=[{"type": "reasoning_text", "text": "hm"}]),
        thought(summary=[{"type": "summary_text", "text": "hm"}]),
        thought(encrypted_content=seal("hm")),
        thought(content=[{"type": "reasoning_text", "text": "hm"}], encrypted_content="another server's"),
    ],
)
def test_reasoning_comes_back_in_each_of_its_forms(item):
    assert made([USER, item, said("x")])[1] == {"role": "assistant", "reasoning_content": "hm", "content": "x"}


def test_instructions_and_leading_system_messages_are_one():
    developer = {"role": "developer", "content": "B"}
    assert made([developer, USER, developer], "A") == [{"role": "system", "content": "A\n\nB"}, USER, developer]
    assert made("hi") == [USER]
    assert made([USER], "") == [USER]


def test_nulls_say_nothing():
    item = {"type": None, "role": "user", "content": "hi", "phase": None, "caller": None, "id": None}
    assert made([item]) == [USER]


def test_a_call_may_stand_in_the_conversation_before():
    assert [m["role"] for m in made([output("a")], before=checked([USER, call("a")], nothing))] == [
        "user",
        "assistant",
        "tool",
    ]
    with pytest.raises(RequestError) as caught:
        made([output("b")], before=checked([USER, call("a")], nothing))
    assert caught.value.param == "input[0].call_id"


# the store


def kept(id, parent=None, size=0):
    item = {"id": f"msg_{id}", "type": "message", "role": "assistant", "content": "x" * size}
    return Kept({"id": id, "output": [item]}, [{"type": "message", "role": "user", "content": id}], parent)


def test_a_chain_counts_once_and_is_read_in_order():
    store = Responses()
    first = kept("a")
    second = kept("b", first)
    for one in (first, second):
        store.add(one)
    assert store.bytes == first.bytes + second.bytes
    assert [item.get("content") for item in second.items()] == ["a", "", "b", ""]
    assert store.remove("a") and not store.remove("a") and store.get("a") is None and store.item("msg_a") is None
    assert store.bytes == first.bytes + second.bytes  # the second still needs it
    assert store.remove("b") and store.bytes == 0


def test_who_was_used_longest_ago_is_forgotten_first():
    store = Responses(count=3)
    for id in "abc":
        store.add(kept(id))
    store.get("a")
    store.add(kept("d"))
    assert store.get("b") is None and all(store.get(id) for id in "acd")
    parent = store.get("a")
    store.add(kept("e", parent))
    for id in "fgh":
        store.add(kept(id))
    assert store.get("e") is None and len(store) == 3


def test_what_is_too_large_is_not_kept():
    store = Responses(bytes=1000)
    store.add(kept("a"))
    store.add(kept("b", size=2000))
    assert len(store) == 0 and store.bytes == 0


def test_a_parent_that_was_forgotten_meanwhile_counts_again():
    store = Responses()
    parent = kept("a")
    store.add(parent)
    store.remove("a")
    assert store.bytes == 0
    child = kept("b", parent)
    store.add(child)
    assert store.bytes == parent.bytes + child.bytes and [k.response["id"] for k in child.chain()] == ["a", "b"]
    store.remove("b")
    assert store.bytes == 0


def test_the_books_are_right_after_any_history():
    rng = random.Random(5)
    store = Responses(count=8, bytes=3000)
    alive = []
    for i in range(600):
        if alive and rng.random() < 0.2:
            store.remove(rng.choice(alive).response["id"])
            continue
        parent = rng.choice(alive) if alive and rng.random() < 0.7 else None
        one = kept(f"r{i}", parent, rng.randrange(400))
        store.add(one)
        alive = [*alive[-12:], one]
        found = [k for k in alive if store._kept.get(k.response["id"]) is k]
        needed = {id(link): link for k in store._kept.values() for link in k.chain()}
        assert store.bytes == sum(link.bytes for link in needed.values()) <= 3000
        assert len(store) <= 8 and set(store._items) == {f"msg_{id}" for id in store._kept}
        assert all(store.get(k.response["id"]) is k for k in found)
