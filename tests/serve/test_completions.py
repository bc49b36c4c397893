"""``/v1/completions`` with the ``openai`` client: prompts of every form, echo, old log-probabilities, streams."""

from __future__ import annotations

import contextlib
import json
import time

import httpx
import pytest
from openai import BadRequestError

from tests import tiny

PROMPT = "The sea is"


def ask(client, prompt=PROMPT, **options):
    return client.completions.create(model="llama", prompt=prompt, **({"max_tokens": 6} | options))


def streamed(client, prompt=PROMPT, **options):
    """The chunks of a stream, and each choice as they make it."""
    chunks = list(ask(client, prompt, stream=True, **options))
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    made = {}
    for chunk in chunks:
        for piece in chunk.choices:
            choice = made.setdefault(piece.index, {"text": "", "logprobs": None, "finish": []})
            assert not choice["finish"]
            choice["text"] += piece.text
            choice["finish"] += [piece.finish_reason] if piece.finish_reason else []
            if piece.logprobs is not None:
                new, old = piece.logprobs.model_dump(), choice["logprobs"]
                choice["logprobs"] = new if old is None else {k: old[k] + new[k] for k in new}
    return chunks, [made[i] for i in sorted(made)]


def said(choices):
    return [
        {"text": c.text, "logprobs": c.logprobs and c.logprobs.model_dump(), "finish": [c.finish_reason]}
        for c in choices
    ]


def test_a_text_goes_on_as_its_ids_do(client, http):
    found = ask(client)
    assert found.object == "text_completion" and found.id.startswith("cmpl-") and found.model == "llama"
    assert found.usage.completion_tokens == 6 and found.choices[0].finish_reason == "length"
    ids = tiny.tokenizer().encode(PROMPT).ids
    assert found.usage.prompt_tokens == len(ids)
    again = ask(client, ids)
    assert again.choices[0].text == found.choices[0].text
    assert again.usage.prompt_tokens_details.cached_tokens == len(ids) - 1
    assert again.model_extra["mlxkv"]["cache"]["source"] == "ram"
    assert len(ask(client, max_tokens=None).choices[0].text) > 0
    assert ask(client, max_tokens=None).usage.completion_tokens == 16


@pytest.mark.parametrize(
    "options",
    [{}, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 1}, {"n": 2, "temperature": 1.0, "seed": 3}],
)
def test_a_stream_says_the_same(client, options):
    whole = ask(client, [PROMPT, "Land"], stop=["q"], max_tokens=12, **options)
    chunks, made = streamed(
        client, [PROMPT, "Land"], stop=["q"], max_tokens=12, stream_options={"include_usage": True}, **options
    )
    assert made == said(whole.choices)
    assert chunks[-1].choices == [] and all(chunk.usage is None for chunk in chunks[:-1])
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(chunks[-1].usage, name) == getattr(whole.usage, name)


def test_many_prompts_are_answered_in_their_order(client):
    texts = [f"number {i} " * (1 + i % 3) for i in range(20)]
    alone = [ask(client, text, max_tokens=3) for text in texts[:4]]
    found = ask(client, texts, max_tokens=3)
    assert [choice.index for choice in found.choices] == list(range(20))
    assert [choice.text for choice in found.choices[:4]] == [one.choices[0].text for one in alone]
    assert found.usage.prompt_tokens == sum(len(tiny.tokenizer().encode(text).ids) for text in texts)
    assert found.usage.completion_tokens == 60
    both = ask(client, [[5, 6], [7, 8, 9]], n=2, seed=4, temperature=1.0)
    assert both.usage.prompt_tokens == 5 and both.usage.completion_tokens == 24
    single = ask(client, [7, 8, 9], n=2, seed=4, temperature=1.0)
    assert [c.text for c in single.choices] == [c.text for c in both.choices[2:]]


def test_log_probabilities_stand_by_their_tokens(client):
    found = ask(client, logprobs=3, max_tokens=30).choices[0]
    told = found.logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == 30
    assert told.text_offset[0] == 0 and told.text_offset == sorted(told.text_offset)
    for token, logprob, top, at in zip(
        *(told.model_dump()[k] for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")), strict=True
    ):
        assert top[token] == logprob == max(top.values()) and 3 <= len(top) <= 4
        if not token.startswith("bytes:"):
            assert found.text.startswith(token, at)
    bare = ask(client, logprobs=0, max_tokens=2).choices[0].logprobs
    assert [list(top) for top in bare.top_logprobs] == [[token] for token in bare.tokens]


def test_echo(client):
    plain = ask(client).choices[0].text
    assert ask(client, echo=True).choices[0].text == PROMPT + plain
    ids = [40, 41, 42]
    found = ask(client, [ids, ids[:1]], echo=True)
    assert found.choices[0].text.startswith("IJK") and found.choices[1].text.startswith("I")
    only = ask(client, ids, echo=True, max_tokens=0)
    assert only.choices[0].text == "IJK" and only.usage.completion_tokens == 0


def test_echo_tells_the_log_probabilities_of_the_prompt(client):
    """Each is what the model says of that token where it comes next, which a bias forces."""
    ids = tiny.tokenizer().encode(PROMPT + " é").ids
    found = ask(client, PROMPT + " é", echo=True, logprobs=2, max_tokens=3).choices[0]
    told = found.logprobs
    assert found.text.startswith(PROMPT + " é") and len(told.tokens) == len(ids) + 3
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
    for k in (1, 2, len(ids) - 1):
        (forced,) = ask(client, ids[:k], max_tokens=1, logprobs=0, logit_bias={ids[k]: 100}).choices
        assert forced.logprobs.tokens == [told.tokens[k]]
        assert forced.logprobs.token_logprobs[0] == pytest.approx(told.token_logprobs[k], abs=1e-4)
    plain = ask(client, PROMPT + " é", logprobs=2, max_tokens=3).choices[0].logprobs
    assert told.tokens[len(ids) :] == plain.tokens
    assert told.text_offset[len(ids) :] == [len(PROMPT) + 2 + at for at in plain.text_offset]
    assert told.text_offset[len(ids) - 2 : len(ids)] == [len(PROMPT) + 1] * 2  # two bytes of one character
    assert ask(client, ids, echo=True, logprobs=2, max_tokens=3).choices[0].logprobs == told
    only = ask(client, [ids, ids[:1]], echo=True, logprobs=2, max_tokens=0).choices
    assert only[0].logprobs.token_logprobs == pytest.approx(told.token_logprobs[: len(ids)])
    assert only[1].logprobs.token_logprobs == [None]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1, -1]]}, "prompt[0]"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": ["a", "word " * 5000]}, "prompt[1]"),
        ({"prompt": ["a", "\ud800"]}, "prompt[1]"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"guided_regex": "["}, "guided_regex"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": ["a"] * 300}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"echo": "yes"}, "echo"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"temperature": 200}, "temperature"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
    ],
)
def test_refusals_name_their_field(http, change, param):
    body = {"model": "llama", "prompt": PROMPT, "max_tokens": 1} | change
    body = {name: value for name, value in body.items() if value is not None}
    answer = http.post("/v1/completions", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400 and len(answer.content) < 4096
    assert answer.json()["error"]["param"] == param, answer.text


def test_what_asks_for_nothing_is_taken(client):
    found = ask(client, suffix="", best_of=1, n=1, echo=False, logprobs=None, user="me", logit_bias={}, stop=None)
    assert found.choices[0].logprobs is None


def test_a_grammar_holds(client):
    found = ask(client, max_tokens=20, extra_body={"guided_regex": "[0-9]{4}"})
    assert len(found.choices[0].text) == 4 and found.choices[0].text.isdigit()
    assert found.choices[0].finish_reason == "stop"


def test_a_refused_stream_has_a_status(client):
    with pytest.raises(BadRequestError) as caught:
        ask(client, ["fine", "word " * 5000], stream=True)
    assert caught.value.code == "context_length_exceeded" and "4096" in caught.value.message


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_engine_of_all_its_prompts(server, http, stream):
    body = {"model": "llama", "prompt": [f"story {i}" for i in range(20)], "max_tokens": 3000, "stream": stream}
    with (
        contextlib.suppress(httpx.TimeoutException),
        http.stream("POST", "/v1/completions", json=body, timeout=httpx.Timeout(0.5, connect=5)) as answer,
    ):
        next(answer.iter_raw())
    assert server.idle(3)
    time.sleep(0.3)  # those that had not begun do not begin now
    assert server.idle(0.1)


@pytest.mark.parametrize("stream", [True, False])
def test_a_time_out_ends_all_prompts(server, http, stream):
    body = {"model": "llama", "prompt": [f"story {i}" for i in range(20)], "max_tokens": 3000, "timeout": 0.4}
    answer = http.post("/v1/completions", json=body | {"stream": stream})
    if stream:
        *_, error, done = [block.removeprefix("data: ") for block in answer.text.split("\n\n") if block]
        assert done == "[DONE]"
    else:
        assert 400 <= answer.status_code < 600
        error = answer.text
    assert json.loads(error)["error"]["code"] == "request_timeout"
    assert server.idle(3)
