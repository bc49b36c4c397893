"""The ``openai`` client against a real server, streaming and not."""

from __future__ import annotations

import json
import threading

import httpx
import pytest
from openai import BadRequestError, NotFoundError

from tests.serve.conftest import running

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me about the sea."}]


def events(text):
    """The data of a stream of server-sent events; each is one line and ends with an empty one."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def test_a_completion(client):
    found = client.chat.completions.create(model="llama", messages=MESSAGES, max_tokens=8)
    assert found.object == "chat.completion" and found.id.startswith("chatcmpl-") and found.model == "llama"
    (choice,) = found.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length"
    assert found.usage.completion_tokens == 8
    assert found.usage.total_tokens == found.usage.prompt_tokens + 8
    again = client.chat.completions.create(model="llama", messages=MESSAGES, max_tokens=8)
    assert again.choices[0].message.content == choice.message.content
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    assert again.model_extra["mlxkv"]["cache"]["source"] == "ram"
    assert again.model_extra["mlxkv"]["timings"]["ttft_s"] > 0
    assert again.model_extra["mlxkv"]["drafts"].keys() == {"drafted", "accepted"}


def test_a_stream_says_the_same(client):
    options = {"model": "llama", "messages": MESSAGES, "max_tokens": 40, "stop": ["zzzz"]}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 40
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-2].model_extra["mlxkv"]["cache"]["source"] == "ram"


def test_the_stream_on_the_wire(http):
    body = {"model": "llama", "messages": MESSAGES, "max_tokens": 3, "stream": True}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    found = events(answer.text)
    assert found[-1] == "[DONE]"
    chunks = [json.loads(data) for data in found[:-1]]
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in chunks)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)


def test_the_answer_sent_back_goes_on_from_its_end(client):
    first = client.chat.completions.create(model="llama", messages=MESSAGES, max_tokens=12)
    more = [*MESSAGES, first.choices[0].message.model_dump(), {"role": "user", "content": "And the land?"}]
    second = client.chat.completions.create(model="llama", messages=more, max_tokens=4)
    expected = first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert second.usage.prompt_tokens_details.cached_tokens >= expected


def test_sampling_fields_are_honoured(client):
    def text(max_tokens=16, **options):
        found = client.chat.completions.create(model="llama", messages=MESSAGES, max_tokens=max_tokens, **options)
        return found.choices[0].message.content

    greedy = text()
    assert text(temperature=0) == greedy
    assert text(temperature=2, seed=1) == text(temperature=2, seed=1) != text(temperature=2, seed=2)
    assert text(temperature=2, seed=1, extra_body={"top_k": 1}) == greedy
    assert text(logit_bias={"10": 100}) != greedy
    long = text(200)
    assert text(200, presence_penalty=2) != long != text(200, frequency_penalty=2)
    assert text(200, extra_body={"repetition_penalty": 5}) != long
    assert len(client.chat.completions.create(model="llama", messages=MESSAGES, max_completion_tokens=2).choices) == 1
    stop = greedy[3:5]
    assert text(stop=stop) == greedy[: greedy.index(stop)]


def test_what_asks_for_nothing_is_taken(client):
    found = client.chat.completions.create(
        model="llama",
        messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        max_tokens=2,
        n=1,
        logprobs=False,
        response_format={"type": "text"},
        tool_choice="none",
        user="me",
        metadata={"a": "b"},
        store=False,
        parallel_tool_calls=True,
    )
    assert found.usage.completion_tokens == 2


def test_tool_calls_in_the_history(client):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    assert client.chat.completions.create(model="llama", messages=messages, max_tokens=2).usage.completion_tokens == 2


def test_a_salt_shares_nothing(client):
    def cached(salt):
        found = client.chat.completions.create(
            model="llama",
            messages=[{"role": "user", "content": "salted"}],
            max_tokens=2,
            extra_body={"cache_salt": salt},
        )
        return found.usage.prompt_tokens_details.cached_tokens

    assert cached("a") == 0
    assert cached("a") > 0
    assert cached("b") == 0


def test_the_servers_own_salt_is_for_requests_that_name_none(server):
    """Given its own as an empty text, a request names none."""
    with running(server.engine, cache_salt="house") as salted, httpx.Client(timeout=30) as http:

        def ask(url, **more):
            body = {"model": "llama", "messages": [{"role": "user", "content": "whose is it?"}], "max_tokens": 2} | more
            found = http.post(f"{url}/v1/chat/completions", json=body).json()
            return found["usage"]["prompt_tokens_details"]["cached_tokens"] == found["usage"]["prompt_tokens"] - 1

        assert not ask(salted.url)
        assert ask(salted.url) and ask(salted.url, cache_salt="") and ask(server.url, cache_salt="house")
        assert not ask(server.url) and not ask(salted.url, cache_salt="mine")
        assert ask(server.url, cache_salt="mine")


def test_models_and_health(client, http):
    assert [model.id for model in client.models.list()] == ["llama"]
    assert client.models.retrieve("llama").object == "model"
    with pytest.raises(NotFoundError) as caught:
        client.models.retrieve("gpt-4o")
    assert caught.value.code == "model_not_found"
    found = http.get("/health")
    assert found.status_code == 200 and found.json()["status"] == "ok"


def test_many_at_once_are_all_answered(client):
    texts = {}

    def ask(i):
        said = client.chat.completions.create(
            model="llama", messages=[{"role": "user", "content": f"number {i % 4}"}], max_tokens=6, stream=i % 2 == 0
        )
        if i % 2 == 0:
            texts[i] = "".join(chunk.choices[0].delta.content or "" for chunk in said)
        else:
            texts[i] = said.choices[0].message.content

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(texts) == 12
    assert all(texts[i] == texts[i % 4] for i in texts)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["prefill", "decoding", "queue"])
def test_a_client_that_leaves_frees_the_engine(server, stream, phase):
    text = "word " * 700 if phase == "prefill" else "hi"
    body = {"model": "llama", "messages": [{"role": "user", "content": text}], "stream": stream, "max_tokens": 3500}
    if phase == "prefill":
        body["max_tokens"] = 1500
    with httpx.Client(base_url=server.url, timeout=30) as http:
        seen = threading.Event()
        first = threading.Thread(target=leave, args=(http, body, 0.6 if phase == "queue" else 0.3, seen))
        first.start()
        assert server.busy()
        if phase == "queue":
            leave(http, body, 0.1)
        seen.set()
        first.join()
        assert server.idle(3)


def leave(http, body, after, seen=None):
    """Send, read for ``after`` seconds at most, and hang up; what streams is left once ``seen`` is set."""
    try:
        with http.stream("POST", "/v1/chat/completions", json=body, timeout=httpx.Timeout(after, connect=5)) as answer:
            if body["stream"]:
                chunks = answer.iter_raw()  # to be held: an iterator that is dropped closes its connection
                next(chunks)
                if seen is not None:
                    seen.wait(10)
    except httpx.TimeoutException:
        pass


def test_errors_of_the_client_library(client):
    with pytest.raises(NotFoundError):
        client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    for stream in (True, False):
        with pytest.raises(BadRequestError) as caught:
            client.chat.completions.create(
                model="llama", messages=[{"role": "user", "content": "word " * 5000}], stream=stream
            )
        assert caught.value.code == "context_length_exceeded" and "4096" in caught.value.message
