"""Text: cut-invariant detokenisation and stop strings, and stops in a real stream."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import mlxkv
from mlxkv.decode.text import Detokenizer, StopStrings, decode
from tests import tiny

TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=tiny.tokenizer())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, tiny.VOCAB - 1), max_size=30))
def test_pieces_join_to_the_decoded_text(ids):
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.feed(i) for i in ids]
    assert "".join(pieces) + detokenizer.finish() == decode(TOKENIZER, ids)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40))
def test_complete_characters_only(text):
    detokenizer = Detokenizer(TOKENIZER)
    whole = TOKENIZER(text)["input_ids"]
    pieces = [detokenizer.feed(i) for i in whole]
    expected = decode(TOKENIZER, whole)
    assert "".join(pieces) + detokenizer.finish() == expected
    if "\ufffd" not in expected:
        assert not any("\ufffd" in p for p in pieces)


@settings(max_examples=200, deadline=None)
@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(text, stops, data):
    found = [text.find(s) for s in stops if s in text]
    feeder, out, i = StopStrings(tuple(stops)), "", 0
    while i < len(text) and feeder.hit is None:
        step = data.draw(st.integers(1, 5))
        out += feeder.feed(text[i : i + step])
        i += step
    if feeder.hit is None:
        out += feeder.finish()
    # the first stop string that is complete ends the text: of those that end at one character the longest
    if not found:
        assert (out, feeder.hit) == (text, None)
    else:
        end = min(text.find(s) + len(s) for s in stops if s in text)
        hit = max((s for s in stops if text[:end].endswith(s)), key=len)
        assert (out, feeder.hit) == (text[: end - len(hit)], hit)


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(tiny_model):
    with mlxkv.load(tiny_model("llama"), cache=False) as engine:
        plain = mlxkv.generate(engine, tiny.ids(20), max_tokens=40)
        stop = plain.text[12:15]
        stopped = mlxkv.generate(engine, tiny.ids(20), max_tokens=40, stop=[stop, "never seen"])
        pieces = [d.text for d in mlxkv.stream(engine, tiny.ids(20), max_tokens=40, stop=stop)]
    assert stopped.finish_reason == "stop" and stopped.text == plain.text[: plain.text.find(stop)]
    assert "".join(pieces) == stopped.text
    assert len(stopped.token_ids) < 40
    assert (stopped.stop, stopped.stop_token) == (stop, None) and plain.stop is None


def test_the_end_of_text_token_stops_and_is_not_shown(tiny_model, tmp_path):
    model = tiny_model("llama")
    with mlxkv.load(model, cache=False) as engine:
        token = mlxkv.generate(engine, tiny.ids(20), max_tokens=9).token_ids[8]
        first = mlxkv.generate(engine, tiny.ids(20), max_tokens=9).token_ids.index(token)
    ending = tiny.make("llama", tmp_path / "ending", eos_token_id=token)
    with mlxkv.load(ending, cache=False) as engine:
        done = mlxkv.generate(engine, tiny.ids(20), max_tokens=30)
    assert done.finish_reason == "stop" and done.token_ids[-1] == token and len(done.token_ids) == first + 1
    assert done.text == decode(TOKENIZER, done.token_ids[:-1])
    assert done.usage.completion_tokens == len(done.token_ids)
    assert (done.stop, done.stop_token) == (None, token)
