"""What a server learns of a request before its turn, while the engine is busy with others."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerFast

import mlxkv
from mlxkv.decode import prompt as prompt_module
from mlxkv.decode.preparing import prepare
from mlxkv.decode.prompt import Rendered, build
from mlxkv.decode.request import Grammar, Request, SamplingParams, Started
from mlxkv.errors import PromptTooLong, RequestError, RequestTooLarge
from tests import tiny

HELLO = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def engine(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with mlxkv.load(tiny_model("qwen3_5"), cache_dir=folder, block_size=16, max_rows=1) as engine:
        yield engine


@pytest.fixture
def busy(engine):
    """The engine reads a long prompt meanwhile, and has one place."""
    ticket = engine.submit(Request(tokens=tiny.ids(4000), sampling=SamplingParams(max_tokens=4000), use_cache=False))
    assert isinstance(ticket.next_event(), Started)
    yield engine
    ticket.cancel()
    ticket.result()


def test_a_prompt_is_known_while_the_engine_is_busy(busy):
    made = busy.prepare(Request(messages=HELLO, sampling=SamplingParams(max_tokens=9)))
    assert made.text == "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n"
    assert busy.detokenize(list(made.token_ids)) == made.text
    assert busy.tokenize(made.text) == list(made.token_ids) and made.prompt_tokens == len(made.token_ids)
    assert (made.thinking, made.max_tokens) == (False, 9)
    assert busy.prepare(Request(prompt="hello")).text == "hello"
    assert busy.prepare(Request(tokens=busy.tokenize("hello"))).text == "hello"
    assert busy.status().running + busy.status().prefilling == 1


def test_what_is_wrong_is_told_while_the_engine_is_busy(busy):
    with pytest.raises(PromptTooLong, match=r"5000 tokens.*4096"):
        busy.prepare(Request(tokens=tiny.ids(5000)))
    for bad, match, param in (
        (Request(messages=[{"role": "robot", "content": "a"}]), "robot", "messages[0].role"),
        (Request(tokens=[5, 99999]), "outside the vocabulary", "tokens"),
        (Request(messages=HELLO, sampling=SamplingParams(logit_bias={99999: 1.0})), "logit_bias", "logit_bias"),
        (Request(messages=HELLO, grammar=Grammar("regex", "(")), "does not compile", "grammar"),
        (Request(prompt="a\ud800"), "surrogate", "prompt"),
    ):
        with pytest.raises(RequestError, match=match) as caught:
            busy.prepare(bad)
        assert caught.value.param == param
    for bad in ([-1], [99999], [True], ["a"], [2**70]):
        with pytest.raises(RequestError, match="is not a token id"):
            busy.detokenize(bad)
    with pytest.raises(RequestError, match="surrogate"):
        busy.tokenize("\ud800")


def test_what_no_memory_would_hold_is_refused_before_its_turn(tiny_model):
    with mlxkv.load(tiny_model("llama"), cache=False) as large:
        weights = large.status().memory["weights"]
        large.prepare(Request(tokens=tiny.ids(4000)))
    with mlxkv.load(tiny_model("llama"), cache=False, memory_limit=weights + (1 << 20)) as small:
        with pytest.raises(RequestTooLarge, match=r"needs [0-9,]+ bytes.*limit of [0-9,]+"):
            small.prepare(Request(tokens=tiny.ids(4000), sampling=SamplingParams(max_tokens=90)))
        assert small.prepare(Request(tokens=tiny.ids(4000)), fits=False).prompt_tokens == 4000
        assert small.prepare(Request(tokens=tiny.ids(40), sampling=SamplingParams(max_tokens=9))).prompt_tokens == 40


def test_max_tokens_is_what_the_context_has_left(engine):
    for asked, left in ((None, 96), (50, 50), (5000, 96)):
        made = engine.prepare(Request(tokens=tiny.ids(4000), sampling=SamplingParams(max_tokens=asked)))
        assert made.max_tokens == left


def test_what_was_prepared_is_not_rendered_again(engine, monkeypatch):
    rendered = []
    real = prompt_module._render
    monkeypatch.setattr(prompt_module, "_render", lambda *args: rendered.append(1) or real(*args))
    request = Request(messages=HELLO, sampling=SamplingParams(max_tokens=4))
    plain = engine.submit(request).result()
    made = engine.prepare(request)
    assert len(rendered) == 2
    again = engine.submit(dataclasses.replace(request, prepared=made)).result()
    assert len(rendered) == 2 and again.token_ids == plain.token_ids
    assert again.usage.prompt_tokens == made.prompt_tokens
    # of another request it is of no use
    other = [{"role": "user", "content": "something else"}]
    mine = engine.submit(Request(messages=other, sampling=SamplingParams(max_tokens=4))).result()
    wrong = engine.submit(Request(messages=other, sampling=SamplingParams(max_tokens=4), prepared=made)).result()
    assert wrong.token_ids == mine.token_ids and wrong.usage.prompt_tokens == mine.usage.prompt_tokens


def test_an_answer_that_the_store_knows_stands_as_its_ids_in_what_was_prepared(engine):
    said = engine.submit(
        Request(messages=HELLO, sampling=SamplingParams(max_tokens=12, temperature=1.0, seed=3))
    ).result()
    more = [*HELLO, {"role": "assistant", "content": said.text}, {"role": "user", "content": "and?"}]
    request = Request(messages=more, sampling=SamplingParams(max_tokens=1))
    made = engine.prepare(request)
    done = engine.submit(dataclasses.replace(request, prepared=made)).result()
    assert done.usage.cached_tokens >= said.usage.prompt_tokens + len(said.token_ids) - 1
    plain = engine.submit(dataclasses.replace(request, use_cache=False)).result()
    assert plain.usage.prompt_tokens == made.prompt_tokens


def test_threads_prepare_at_the_same_time(engine):
    messages = [{"role": "user", "content": "words of all kinds " * 300}]
    alone = engine.prepare(Request(messages=messages)).token_ids
    found, errors = [], []

    def work():
        try:
            for _ in range(5):
                found.append(engine.prepare(Request(messages=messages)).token_ids)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and found == [alone] * 20


# an answer that is gone on from

TRIMS = (
    "{% for m in messages %}<|im_start|>{{m.role}}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = (
    "{% for m in messages %}<|im_start|>{{m.role}}\n{% if m.role == 'assistant' %}<think>\n"
    "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def wrapped(template=tiny.CHAT_TEMPLATE, thinks=False):
    inner = PreTrainedTokenizerFast(tokenizer_object=tiny.tokenizer(), chat_template=template)
    if thinks:
        inner.add_tokens(["<think>", "</think>"])
    return TokenizerWrapper(inner)


def made_of(messages, tokenizer, **more):
    return prepare(Request(messages=messages, **more), tokenizer, {tiny.EOS}, 1000, 4096)


@pytest.mark.parametrize("text", ["The answer is", "The answer is ", "\n and ", "x", " "])
@pytest.mark.parametrize("template", [tiny.CHAT_TEMPLATE, TRIMS])
def test_an_answer_goes_on_from_its_last_character(template, text):
    messages = [*HELLO, {"role": "assistant", "content": text}]
    made = made_of(messages, wrapped(template), continue_final=True)
    assert made.text == "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n" + text


def test_an_answer_that_goes_on_begins_behind_the_thought_that_the_template_writes():
    tokenizer = wrapped(THINKS, thinks=True)
    head = "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n"
    for final, rest, thinking in (
        ({"content": "so "}, "<think>\n\n</think>\n\nso ", False),
        ({"content": "so ", "reasoning_content": "hm"}, "<think>\nhm\n</think>\n\nso ", False),
        ({"content": "<think>\nhm"}, "<think>\nhm", True),
        ({"content": "<think>hm</think>so"}, "<think>hm</think>so", False),
    ):
        made = made_of([*HELLO, {"role": "assistant", **final}], tokenizer, continue_final=True)
        assert (made.text, made.thinking) == (head + rest, thinking)


def test_an_answer_cut_by_its_length_goes_on_as_if_it_had_not_been(engine):
    whole = engine.submit(Request(messages=HELLO, sampling=SamplingParams(max_tokens=24))).result()
    first = engine.submit(Request(messages=HELLO, sampling=SamplingParams(max_tokens=10))).result()
    said = {"role": "assistant", "content": first.text, "token_ids": first.token_ids}
    request = Request(messages=[*HELLO, said], continue_final=True, sampling=SamplingParams(max_tokens=14))
    rest = engine.submit(request).result()
    assert first.token_ids + rest.token_ids == whole.token_ids
    assert rest.usage.cached_tokens >= first.usage.prompt_tokens + 9  # nothing is computed again


def test_what_cannot_be_gone_on_from_is_refused():
    for messages in (
        HELLO,
        [*HELLO, {"role": "assistant", "content": ""}],
        [*HELLO, {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
    ):
        with pytest.raises(RequestError, match="the last message") as caught:
            made_of(messages, wrapped(), continue_final=True)
        assert caught.value.param == "messages"
    with pytest.raises(RequestError, match="continue_final"):
        Request(prompt="a", continue_final=True)


# whether the model thinks where the prompt ends


@pytest.mark.parametrize(
    "template, thinking",
    [
        (THINKS, True),
        (THINKS + "{% if add_generation_prompt %}\n</think>\n\n{% endif %}", False),
        (tiny.CHAT_TEMPLATE, False),
    ],
)
@pytest.mark.parametrize("words", ["hello", "what does <think> say?", "</think>", "<think>"])
def test_marks_in_the_words_of_a_user_are_only_words(template, thinking, words):
    assert made_of([{"role": "user", "content": words}], wrapped(template, thinks=True)).thinking == thinking


def test_a_raw_prompt_may_end_within_a_thought():
    def thinking(**given):
        return prepare(Request(**given), wrapped(thinks=True), {tiny.EOS}, 1000, 4096).thinking

    assert thinking(prompt="what?<think>\n") and not thinking(prompt="<think>no</think>")
    ids = wrapped(thinks=True).encode("what?<think>\n", add_special_tokens=False)
    assert thinking(tokens=ids) and not thinking(tokens=ids[:3])
    assert not thinking(prompt="what is <think> for")


def test_a_rendering_of_other_messages_is_not_used():
    tokenizer = wrapped()
    made = made_of(HELLO, tokenizer)
    again = Request(messages=HELLO, prepared=made)
    assert Rendered.of(again, tokenizer) is made.rendered
    for other in (
        Request(messages=[{"role": "user", "content": "b"}], prepared=made),
        Request(messages=HELLO, template_kwargs={"a": 1}, prepared=made),
        Request(messages=HELLO, tools=[{"type": "function"}], prepared=made),
        Request(prompt="hello there", prepared=made),
    ):
        assert Rendered.of(other, tokenizer) is not made.rendered
    assert Rendered.of(again, wrapped()) is not made.rendered
    assert build(again, tokenizer, {tiny.EOS}, lambda ids, text: None).tokens == list(made.token_ids)
