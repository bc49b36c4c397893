"""The bytes of tokens, joined, are the bytes of the text, whatever kind of tokenizer it is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlxkv.decode.spelling import Spelling
from mlxkv.decode.text import decode
from tests import tiny


def sentencepiece(decoder):
    pieces = ["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁a", "a", "b", "▁the", "é", "h", "t", "e"]
    made = Tokenizer(models.Unigram([(p, -1.0) for p in pieces], 0, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoder
    made.add_special_tokens([AddedToken("<s>", special=True)])
    return made


REPLACING = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
KINDS = {"bytes": tiny.tokenizer(), "sentencepiece": sentencepiece(REPLACING)}


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(alphabet=st.sampled_from("ab the é漢😀\n,"), max_size=20))
@settings(max_examples=40, deadline=None)
def test_bytes_of_tokens_are_those_of_the_text(kind, text):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=KINDS[kind])
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    spelling = Spelling(tokenizer)
    assert b"".join(spelling(id) for id in ids) == decode(tokenizer, ids).encode()


def test_special_tokens_and_ids_without_text():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=KINDS["bytes"])
    spelling = Spelling(tokenizer)
    assert spelling(tiny.EOS) == b"<|im_end|>" and spelling(tiny.EOS + 1000) == b""


def test_metaspace_and_pieces_of_words():
    made = Tokenizer(models.WordLevel({"▁a": 0, "b": 1}, unk_token="b"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    spelling = Spelling(PreTrainedTokenizerFast(tokenizer_object=made))
    assert [spelling(0), spelling(1)] == [b" a", b"b"]
    made = Tokenizer(models.WordPiece({"a": 0, "##b": 1}, unk_token="a"))
    made.decoder = decoders.WordPiece()
    spelling = Spelling(PreTrainedTokenizerFast(tokenizer_object=made))
    assert spelling(0) == b"a"
