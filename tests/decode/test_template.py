"""Histories of real clients through chat templates of four kinds: the right text, or a refusal that says why."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerFast

from mlxkv.decode.preparing import prepare
from mlxkv.decode.request import Request
from mlxkv.errors import RequestError
from tests.tiny import CHAT_TEMPLATE, EOS, VOCAB, tokenizer

#: takes content part by part, and writes nothing of a string
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: one system message, at the start; users and assistants in turns; raises for anything else
STRICT = (
    "{% set ns = namespace(at=0) %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% if not loop.first %}{{ raise_exception('Only one system message, at the start.') }}{% endif %}"
    "[SYS]{{ m.content }}[/SYS]{% elif m.role in ('user', 'assistant') %}"
    "{% if (m.role == 'user') != (ns.at % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant.') }}{% endif %}{% set ns.at = ns.at + 1 %}"
    "[{{ m.role }}]{{ m.content | trim }}{% else %}{{ raise_exception('No ' + m.role + ' here.') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
#: leaves out what it does not know: later system messages, tools, calls and their results
SILENT = (
    "{% if messages[0].role == 'system' %}<<{{ messages[0].content }}>>{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}U:{{ m.content }}\n{% elif m.role == 'assistant' %}A:{{ m.content }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
#: writes tools, calls with arguments as an object, results, and the thought of the last answer
TOOLS = (
    "{% for t in tools or [] %}TOOL:{{ t.function.name }}\n{% endfor %}{% for m in messages %}{{ m.role }}:"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL:{{ c.function.name }}{% for k, v in c.function.arguments|items %}"
    " {{ k }}={{ v | tojson }}{% endfor %}{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
#: the same, with arguments as text
TEXT_ARGUMENTS = TOOLS.replace(
    "{% for k, v in c.function.arguments|items %} {{ k }}={{ v | tojson }}{% endfor %}",
    "{{ '(' + c.function.arguments + ')' }}",
)

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SYSTEM = {"role": "system", "content": "S"}
USER = {"role": "user", "content": "Hi"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "ä"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "Sun"}]}


def rendered(template: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    inner = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), eos_token="<|im_end|>", chat_template=template)
    request = Request(messages=messages, **fields)
    return prepare(request, TokenizerWrapper(inner), {EOS}, VOCAB, None).text


@pytest.mark.parametrize(
    ("template", "messages", "want"),
    [
        (
            CHAT_TEMPLATE,
            [
                {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]},
                USER,
            ],
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            CHAT_TEMPLATE,
            [USER, {"role": "assistant", "content": None}, {"role": "system", "content": "Now."}, USER],
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>system\nNow.<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            PARTS,
            [{"role": "system", "content": "Be kind."}, USER, {"role": "assistant", "content": "Hello"}, USER],
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello"
            "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
        (STRICT, [SYSTEM, USER], "[SYS]S[/SYS][user]Hi[assistant]"),
        (
            STRICT,
            [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, USER],
            "[user]Hi[assistant]No.[user]Hi[assistant]",
        ),
        (STRICT, [USER, {"role": "assistant", "content": None, "refusal": "No."}, USER], None),
        (SILENT, [SYSTEM, USER], "<<S>>U:Hi\nA:"),
        (TOOLS, [USER, CALL, RESULT], 'user:Hi\nassistant:CALL:look at="ä"\ntool:Sun\nassistant:'),
        (TEXT_ARGUMENTS, [USER, CALL, RESULT], 'user:Hi\nassistant:CALL:look({"at": "ä"})\ntool:Sun\nassistant:'),
        (
            TOOLS,
            [USER, {**CALL, "tool_calls": [{**CALL["tool_calls"][0], "function": {"name": "look", "arguments": ""}}]}]
            + [{**RESULT, "content": None}],
            "user:Hi\nassistant:CALL:look\ntool:\nassistant:",
        ),
        (TOOLS, [USER, {"role": "assistant", "content": "Hm", "reasoning": "Why?"}, USER], None),
    ],
)
def test_the_right_text(template: str, messages: list[dict[str, Any]], want: str | None) -> None:
    found = rendered(template, messages)
    assert found == want if want is not None else all(m["content"] in found for m in messages if m["content"])


def test_tools_and_the_reasoning_that_a_template_writes() -> None:
    last = {"role": "assistant", "content": "Hm", "reasoning_content": "Why?"}
    found = rendered(TOOLS, [USER, last], tools=[LOOK])
    assert found == "TOOL:look\nuser:Hi\nassistant:<think>Why?</think>Hm\nassistant:"


@pytest.mark.parametrize(
    ("template", "messages", "tools", "param", "said"),
    [
        (
            STRICT,
            [USER, SYSTEM],
            None,
            "messages",
            "Only one system message, at the start.",
        ),
        (STRICT, [USER, USER], None, "messages", "Roles must alternate user/assistant."),
        (STRICT, [USER, CALL, RESULT], None, "messages", "No tool here."),
        (SILENT, [USER, SYSTEM, USER], None, "messages[1]", "not the first"),
        (SILENT, [USER, CALL], None, "messages[1].tool_calls", "calls of tools"),
        (SILENT, [USER, {"role": "assistant", "content": "A"}, RESULT], None, "messages[2]", "role tool"),
        (SILENT, [USER], [LOOK], "tools", "tools"),
        ("{{ messages[0].nothing.at_all }}", [USER], None, "messages", "nothing"),
        ("{% if %}", [USER], None, "messages", "refuses"),
        ("{{ raise_exception('x' * 9000) }}", [USER], None, "messages", "xxx"),
    ],
)
def test_a_refusal_that_says_why(template: str, messages: Any, tools: Any, param: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        rendered(template, messages, tools=tools)
    assert caught.value.param == param and len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}, "messages[0].content[0].text"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages[0].audio"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}, "messages[0].tool_calls[0]"),
        ({"role": "function", "name": "f", "content": "x"}, "messages[0].role"),
    ],
)
def test_what_no_template_takes(message: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        rendered(CHAT_TEMPLATE, [message])
    assert caught.value.param == param
