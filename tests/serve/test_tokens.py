"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

import pytest

from tests import tiny

TEXT = "The sé, 海\n"


def test_there_and_back(http):
    found = http.post("/tokenize", json={"model": "llama", "prompt": TEXT, "return_token_strs": True}).json()
    assert found["tokens"] == tiny.tokenizer().encode(TEXT).ids
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) and found["max_model_len"] == 4096
    assert "bytes:\\xc3" in found["token_strs"]
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": TEXT}
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []


def test_a_conversation_is_what_the_chat_api_reads(http, client):
    messages = [{"role": "user", "content": "hi"}]
    found = http.post("/tokenize", json={"messages": messages}).json()
    usage = client.chat.completions.create(model="llama", messages=messages, max_tokens=1).usage
    assert found["count"] == usage.prompt_tokens
    text = http.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    long = http.post("/tokenize", json={"messages": [{"role": "user", "content": "word " * 5000}]}).json()
    assert long["count"] > long["max_model_len"]
    messages.append({"role": "assistant", "content": "So"})
    for more in ({"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False}):
        found = http.post("/tokenize", json={"messages": messages} | more).json()
        assert http.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"] == text + "So"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "a", "messages": []}, "messages"),
        ("tokenize", {"prompt": 5}, "prompt"),
        ("tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("tokenize", {"messages": []}, "messages"),
        ("tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            "tokenize",
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        (
            "tokenize",
            {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False},
            "add_generation_prompt",
        ),
        ("tokenize", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools[0].type"),
        ("tokenize", {"prompt": "a", "promt": "b"}, "promt"),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": [1, 320]}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_refusals_name_their_field(http, path, body, param):
    answer = http.post(f"/{path}", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_an_unknown_model(http):
    for path, body in (("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [1]})):
        assert http.post(f"/{path}", json=body | {"model": "other"}).status_code == 404
