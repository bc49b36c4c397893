"""The old form of log-probabilities: where each token's text stands."""

from __future__ import annotations

from mlxkv.decode.request import TokenLogprob
from mlxkv.serve.completions_logprobs import Lists, joined, of_prompt, spelled

TOKENS = [b"<s>", b" the", b" s", b"\xc3", b"\xa9", b"a", b"\xe6", b"\xb5\xb7", b"\xf0\x9f"]


def spell(id):
    return TOKENS[id]


def told(*ids):
    return [(id, TokenLogprob(id, -1.0)) for id in ids]


def offsets(*pieces, at=0):
    """The offsets of tokens that came as (ids, text) pieces."""
    lists = Lists(spell, at)
    made, end = [], at
    for ids, text in pieces:
        end += len(text)
        made.append(lists.add(told(*ids), text, end))
    found = joined(made)
    assert found is not None and len(found["tokens"]) == len(found["text_offset"])
    return found["text_offset"]


def test_pieces_of_a_character_stand_where_it_does():
    whole = [0, 4, 6, 6, 7, 8, 8]
    ids = [1, 2, 3, 4, 5, 6, 7]
    assert offsets((ids, " the séa海")) == whole
    one_by_one = [([1], " the"), ([2], " s"), ([3], ""), ([4], "é"), ([5], "a"), ([6], ""), ([7], "海")]
    assert offsets(*one_by_one) == whole
    assert offsets(*one_by_one, at=5) == [5 + place for place in whole]


def test_a_character_that_never_ends_is_one_all_the_same():
    assert offsets(([3, 5, 3, 5], "\ufffda\ufffda")) == [0, 1, 2, 3]
    assert offsets(([3], ""), ([5], "\ufffda")) == [0, 1]
    assert offsets(([4, 4, 5], "\ufffd\ufffda")) == [0, 1, 2]


def test_a_space_that_the_tokenizer_leaves_out():
    assert offsets(([1, 2], "the s")) == [0, 3]
    assert offsets(([1], "the"), ([2], " s")) == [0, 3]


def test_a_prompt_has_no_numbers_for_its_first_token():
    found = of_prompt([0, 1, 2], [None, TokenLogprob(1, -1.0, ((2, -0.5), (1, -1.0))), TokenLogprob(2, -3.0)], spell, 6)
    assert found == {
        "tokens": ["<s>", " the", " s"],
        "token_logprobs": [None, -1.0, -3.0],
        "top_logprobs": [None, {" s": -0.5, " the": -1.0}, {" s": -3.0}],
        "text_offset": [0, 0, 4],
    }


def test_bytes_that_are_no_text_are_spelled_out():
    assert [spelled(raw) for raw in TOKENS[-2:]] == ["bytes:\\xb5\\xb7", "bytes:\\xf0\\x9f"]
