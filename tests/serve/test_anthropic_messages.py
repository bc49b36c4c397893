"""Anthropic's messages as the list that a chat template takes."""

from __future__ import annotations

import pytest

from mlxkv.errors import RequestError
from mlxkv.messages import normalise
from mlxkv.serve.anthropic_messages import conversation, signature

USER = {"role": "user", "content": "hi"}
CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "found"}


def text(words, **more):
    return {"type": "text", "text": words} | more


def said(*messages, system=None):
    made = conversation(system, list(messages)).messages
    assert normalise(made) == made  # what the engine is given is what it takes
    return made


def refused(messages, system=None):
    with pytest.raises(RequestError) as caught:
        conversation(system, messages)
    assert caught.value.param
    return caught.value.param


def test_a_system_prompt_is_a_text_or_blocks():
    assert said(USER, system="Be brief.")[0] == {"role": "system", "content": "Be brief."}
    blocks = [text("Be brief.", cache_control={"type": "ephemeral", "ttl": "1h"}), text("Be kind.")]
    assert said(USER, system=blocks)[0]["content"] == "Be brief.\nBe kind."
    assert said(USER, system="") == said(USER, system=[]) == said(USER) == [USER]


def test_a_note_to_the_biller_does_not_reach_the_model():
    first, second = (
        said(USER, system=[text(f"x-anthropic-billing-header: cc_version=1; cch={n};"), text("Be brief.")])
        for n in ("a1", "b2")
    )
    assert first == second and first[0]["content"] == "Be brief."
    assert said({"role": "user", "content": "x-anthropic-billing-header: what is it?"})[0]["content"].startswith("x-")


def test_turns_of_one_side_in_a_row_are_one():
    parts = [{"role": "user", "content": "a"}, {"role": "user", "content": [text("b"), text("c")]}]
    answers = [{"role": "assistant", "content": "x "}, {"role": "assistant", "content": [text("y")]}]
    assert said(*parts, *answers, USER) == [
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "content": "x y"},
        USER,
    ]


def test_a_tool_is_called_and_answers():
    thought = {"type": "thinking", "thinking": "I must look.", "signature": signature("I must look.")}
    made = said(
        USER,
        {"role": "assistant", "content": [thought, text("Wait."), CALL, CALL | {"id": "t2", "input": {}}]},
        {
            "role": "user",
            "content": [
                RESULT | {"cache_control": {"type": "ephemeral"}},
                RESULT | {"tool_use_id": "t2", "content": [text("no"), text("way")], "is_error": True},
                text("And now?"),
            ],
        },
    )
    calls = made[1].pop("tool_calls")
    assert made[1] == {"role": "assistant", "content": "Wait.", "reasoning_content": "I must look."}
    assert [(c["id"], c["function"]) for c in calls] == [
        ("t1", {"name": "look", "arguments": {"a": 1}}),
        ("t2", {"name": "look", "arguments": {}}),
    ]
    assert made[2:] == [
        {"role": "tool", "tool_call_id": "t1", "name": "look", "content": "found"},
        {"role": "tool", "tool_call_id": "t2", "name": "look", "content": "Error: no\nway"},
        {"role": "user", "content": "And now?"},
    ]


def test_a_result_without_content_and_an_error_that_says_so_itself():
    def result(**more):
        block = {"type": "tool_result", "tool_use_id": "t1"} | more
        return said(USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [block]})[-1]["content"]

    assert result() == result(content=None) == result(content=[]) == ""
    assert result(is_error=True) == "Error"
    assert result(is_error=True, content="error: no such file") == "error: no such file"
    assert result(is_error=False, content="fine") == "fine"


def test_what_others_thought_in_secret_is_left_out():
    secret = {"type": "redacted_thinking", "data": "Eu8..."}
    foreign = {"type": "thinking", "thinking": "", "signature": "ErUB..."}
    broken = {"type": "thinking", "thinking": "", "signature": "mlxkv-sealed-%%%"}
    made = said(USER, {"role": "assistant", "content": [secret, foreign, broken, text("x")]}, USER)
    assert made[1] == {"role": "assistant", "content": "x"}


def test_the_beginning_of_an_answer():
    assert conversation(None, [USER, {"role": "assistant", "content": "The"}]).continued
    assert not conversation(None, [USER]).continued
    for empty in ("", []):
        found = conversation(None, [USER, {"role": "assistant", "content": empty}])
        assert found.messages == [USER] and not found.continued
    assert refused([USER, {"role": "assistant", "content": [CALL]}]) == "messages[1]"


def test_a_system_message_in_the_middle_stays_there():
    assert [m["role"] for m in said(USER, {"role": "system", "content": [text("x")]}, USER)] == [
        "user",
        "system",
        "user",
    ]


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (None, ""),
        (3, ""),
        ("\ud800", ""),
        ([3], "[0]"),
        ([{}], "[0].type"),
        ([{"type": []}], "[0].type"),
        ([{"type": "image", "source": {}}], "[0].type"),
        ([{"type": "document", "source": {}}], "[0].type"),
        ([CALL], "[0].type"),
        ([text(None)], "[0].text"),
        ([text("x", cache_control={"type": "for ever"})], "[0].cache_control"),
        ([text("x", colour="red")], "[0]"),
        ([text("x", citations=[{}])], "[0].citations"),
        ([RESULT], "[0].tool_use_id"),
        ([RESULT | {"tool_use_id": None}], "[0].tool_use_id"),
    ],
)
def test_a_users_message_that_is_refused_names_the_place(content, param):
    assert refused([USER, {"role": "user", "content": content}]) == f"messages[1].content{param}"


@pytest.mark.parametrize(
    ("block", "param"),
    [
        (CALL | {"input": "{}"}, "[0].input"),
        (CALL | {"name": None}, "[0].name"),
        (CALL | {"id": 1}, "[0].id"),
        (CALL | {"caller": {"type": "code_execution_20250825"}}, "[0].caller"),
        ({"type": "thinking", "signature": "x"}, "[0].thinking"),
        ({"type": "server_tool_use"}, "[0].type"),
    ],
)
def test_an_answer_that_is_refused_names_the_place(block, param):
    assert refused([USER, {"role": "assistant", "content": [block]}, USER]) == f"messages[1].content{param}"


def test_other_refusals():
    assert refused([{"role": "user", "content": ""}]) == "messages"
    assert refused([]) == refused("hi") == refused(None) == "messages"
    assert refused([3]) == "messages[0]"
    assert refused([{"role": "tool", "content": "x"}]) == refused([{"content": "x"}]) == "messages[0].role"
    assert refused([USER | {"name": "me"}]) == "messages[0]"
    assert refused([USER], system=3) == "system"
    assert refused([USER], system=[{"type": "image"}]) == "system[0].type"
    twice = [{"role": "assistant", "content": [CALL, CALL]}, USER]
    assert refused([USER, *twice]) == "messages[1].content[1].id"
    nested = {"role": "user", "content": [RESULT | {"content": [RESULT]}]}
    assert refused([USER, {"role": "assistant", "content": [CALL]}, nested]) == "messages[2].content[0].content[0].type"
    flag = {"role": "user", "content": [RESULT | {"is_error": "yes"}]}
    assert refused([USER, {"role": "assistant", "content": [CALL]}, flag]) == "messages[2].content[0].is_error"
