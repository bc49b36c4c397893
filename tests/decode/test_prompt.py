"""Prompts: a sampled answer keeps its ids for as long as the conversation goes on, whatever the tokenizer."""

from __future__ import annotations

import string

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

import mlxkv
from mlxkv.decode.prompt import build
from mlxkv.decode.request import Request
from mlxkv.decode.text import decode
from mlxkv.errors import RequestError
from tests import tiny

LINES = (
    "{% for m in messages %}{{m.role}}:{{m.content}}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
SPACED = (
    "{% for m in messages %}{% if m.role == 'user' %}Q: {{m.content}} A:{% else %} {{m.content}} {% endif %}"
    "{% endfor %}"
)
THINKS = (
    "{% for m in messages %}<|im_start|>{{m.role}}\n{{ m.content.split('</think>')[-1] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def unknown(prompt, text):
    return None


def byte_level(template=tiny.CHAT_TEMPLATE):
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tiny.tokenizer(), chat_template=template))


def spelled(text):
    """One id a byte: not what the tokenizer would make of the text."""
    return [id for byte in text for id in byte_level().encode(byte, add_special_tokens=False)]


def turns(n, ids=True):
    made = []
    for i in range(n):
        said = f"the answer is {i}"
        made += [{"role": "user", "content": f"and {i}?"}, {"role": "assistant", "content": said}]
        if ids:
            made[-1]["token_ids"] = spelled(said)
    return [*made, {"role": "user", "content": "go on"}]


def prompt(messages, tokenizer, find=unknown):
    return build(Request(messages=messages), tokenizer, {tiny.EOS}, find).tokens


def test_an_answer_keeps_its_ids_however_long_the_conversation_grows():
    tokenizer, before = byte_level(), []
    for n in (1, 10, 24, 25, 26, 33, 70):
        now = prompt(turns(n), tokenizer)
        end = len(before) - len(prompt([{"role": "user", "content": "go on"}], tokenizer))
        assert now[: max(0, end)] == before[: max(0, end)]
        before = now
    assert len(now) > len(prompt(turns(70, ids=False), tokenizer))


def test_answers_are_asked_for_with_the_prompt_they_were_given_to():
    tokenizer, asked = byte_level(), {}

    def find(tokens, text):
        asked[text] = decode(tokenizer, tokens)
        return spelled(text) if text.endswith(("3", "7", "8")) else None

    tokens = prompt(turns(12, ids=False), tokenizer, find)
    whole = decode(tokenizer, tokens)
    assert list(asked) == [f"the answer is {i}" for i in range(12)]
    for text, before in asked.items():
        assert whole.startswith(before + text + "<|im_end|>")
    known = [m for m in turns(12) if m.get("token_ids") is None or m["content"][-1] in "378" or m.pop("token_ids")]
    assert tokens == prompt(known, tokenizer)


def test_a_text_that_the_template_changes_is_not_replaced():
    tokenizer = byte_level(THINKS)
    messages = turns(3)
    said = "<think>so</think>four"
    messages[1] = {"role": "assistant", "content": said, "token_ids": spelled(said)}
    tokens = prompt(messages, tokenizer)
    whole = decode(tokenizer, tokens)
    assert "think" not in whole and "assistant\nfour<|im_end|>" in whole
    rest = spelled("the answer is 2")
    assert any(tokens[i : i + len(rest)] == rest for i in range(len(tokens)))


def sentencepiece(template):
    """A tokenizer that puts a space before whatever it is given, and takes one off when it decodes."""
    vocab = {piece: i for i, piece in enumerate(["<unk>", "</s>", *string.printable, "▁", "▁is"])}
    made = Tokenizer(BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made.add_special_tokens([AddedToken("</s>", normalized=False)])
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", chat_template=template))


def test_what_follows_an_answer_gets_no_space_of_its_own():
    tokenizer = sentencepiece(LINES)
    ids = tokenizer.encode("it is", add_special_tokens=False)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "it is", "token_ids": ids}]
    text = decode(tokenizer, prompt([*messages, {"role": "user", "content": "b"}], tokenizer))
    assert text == "user:a\nassistant: it is\nuser:b\nassistant:"  # the sampled space, and no other


def test_ids_are_used_only_where_a_generation_prompt_ends():
    tokenizer = sentencepiece(SPACED)  # writes a space before an answer that the model was not shown
    ids = tokenizer.encode("it is", add_special_tokens=False)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "it is", "token_ids": ids}]
    text = decode(tokenizer, prompt([*messages, {"role": "user", "content": "b"}], tokenizer))
    assert text == "Q: a A: it is Q: b A:"


def test_a_slow_tokenizer_tells_where_messages_end():
    inner = ByT5Tokenizer()
    inner.chat_template = LINES
    messages = [
        {"role": "user", "content": "é" * 2000},
        {"role": "assistant", "content": "ö"},
        {"role": "user", "content": "b"},
    ]
    found = build(Request(messages=messages), TokenizerWrapper(inner), {1}, unknown)
    ends = ["user:", "user:" + "é" * 2000 + "\n", "user:" + "é" * 2000 + "\nassistant:ö\n"]
    assert found.boundaries[:3] == [len(end.encode()) for end in ends]


@pytest.mark.parametrize("tokens", [[False], [0.0], [None], [5, -1], [5, "6"]])
def test_what_is_no_token_id_is_refused(tokens):
    with pytest.raises(RequestError, match="is not a token id"):
        build(Request(tokens=tokens), byte_level(), set(), unknown)


def test_the_template_is_compiled_before_the_first_request(tmp_path):
    compiled = chat_template_utils._compile_jinja_template
    text = "{# only here #}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    folder = tiny.make("llama", tmp_path / "model")
    (folder / "chat_template.jinja").write_text(text)
    before = compiled.cache_info().misses
    with mlxkv.load(folder, cache=False) as engine:
        assert compiled.cache_info().misses == before + 1
        mlxkv.generate(engine, "hello", max_tokens=1)
    assert compiled.cache_info().misses == before + 1


def test_a_template_that_cannot_be_compiled_is_told_to_the_request(tmp_path):
    folder = tiny.make("llama", tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% for %}")
    with mlxkv.load(folder, cache=False) as engine:
        with pytest.raises(RequestError, match="chat template refuses"):
            mlxkv.generate(engine, "hello", max_tokens=1)
        assert mlxkv.generate(engine, [1, 2, 3], max_tokens=1).token_ids
