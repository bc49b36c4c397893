"""Drafts by look-up: what a plain scan of the text would find, whatever was read when."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxkv.decode.drafters import Asked, Round
from mlxkv.decode.drafters.ngram import READ, Index, NGram


def scan(tokens: list[int], k: int, min_n: int, max_n: int) -> list[int]:
    """The same by looking at every place: the longest end that stood before, and there the latest place."""
    for n in range(max_n, min_n - 1, -1):
        for at in range(len(tokens) - 1, n - 1, -1):
            if n <= len(tokens) and tokens[at - n : at] == tokens[-n:]:
                found = tokens[at:]
                return [found[i % len(found)] for i in range(k)]
    return []


@dataclass
class Told:
    """A trial that notes what it was given."""

    tokens: list[list[int]] = field(default_factory=list)
    plain: bool = True
    open: bool = True

    def draft(self, logits: mx.array) -> mx.array:
        raise AssertionError("nothing is sampled from")

    def drafted(self, token: mx.array) -> mx.array:
        raise AssertionError("all drafts are told at once")

    def given(self, tokens: list[int]) -> None:
        self.tokens.append(tokens)


class Words:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = list(tokens)


def asked(*sequences: Words | None, open: bool = True) -> Round:
    rows = {slot: Asked(s, Told(open=open)) for slot, s in enumerate(sequences) if s is not None}
    return Round(rows, len(sequences))


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 8),
    st.lists(st.integers(1, 7)),
)
def test_what_a_scan_finds(tokens, min_n, more, k, steps):
    """At every length, however many tokens are read at a time."""
    index, end = Index(min_n, min_n + more, looks=100), 0
    for step in [*steps, *[1] * len(tokens)]:
        end = min(len(tokens), end + step)
        index.read(tokens[:end])
        assert len(index) == end
        assert index.following(k) == scan(tokens[:end], k, min_n, min_n + more)


def test_the_longest_agreement_wins_then_the_latest():
    index = Index(2, 4)
    index.read([1, 2, 3, 7, 9, 2, 3, 8, 4, 2, 3, 5, 1, 2, 3])
    assert index.following(3) == [7, 9, 2]
    index = Index(2, 2)
    index.read([1, 2, 3, 7, 9, 2, 3, 8, 4, 2, 3, 5, 1, 2, 3])
    assert index.following(3) == [5, 1, 2]
    index = Index(2, 4, looks=2)  # the longest is the third from here
    index.read([1, 2, 3, 7, 9, 2, 3, 8, 4, 2, 3, 5, 1, 2, 3])
    assert index.following(3) == [5, 1, 2]


def test_text_that_repeats_itself_goes_on_so():
    index = Index()
    index.read([5, 6, 7] * 4)
    assert index.following(8) == [5, 6, 7, 5, 6, 7, 5, 6]
    index = Index(1, 8)
    index.read([9, 4, 4])
    assert index.following(3) == [4, 4, 4]


def test_runs_of_nothing_are_refused():
    for wrong in ((0, 3), (3, 2), (2, 3, 0)):
        with pytest.raises(ValueError, match="cannot be looked for"):
            Index(*wrong)


def test_a_long_text_is_not_read_again():
    """A token more costs no more after 100,000 than after 1,000."""
    tokens, index = [n * 7919 % 1000 for n in range(100_000)], Index()
    assert not index.following(4)
    index.read(tokens, 1000)
    assert len(index) == 1000
    index.read(tokens)
    touched = []

    class Watched(list):
        def __getitem__(self, at):
            touched.append(at)
            return super().__getitem__(at)

    index.read(Watched([*tokens, 1]))
    assert touched == [100_000] and len(index) == 100_001


def test_rows_that_have_drafts_and_rows_that_have_none():
    drafter, repeats, new, grows = NGram(), Words([1, 2, 3, 4, 1, 2]), Words([1, 2, 3, 4]), Words([5, 6, 7, 5])
    round = asked(repeats, None, new, grows)
    assert drafter.ready(round.rows, 512)
    found = drafter.propose(round, 3)
    assert found is not None and found.dtype == mx.int32
    assert found.tolist() == [[3, 4, 1], [0] * 3, [0] * 3, [0] * 3]
    assert [row.trial.tokens for row in round.rows.values()] == [[[3, 4, 1]], [[]], [[]]]  # type: ignore[attr-defined]
    drafter.committed(round, {0: 1, 2: 1, 3: 1})
    grows.tokens += [6]
    round = asked(None, new, grows)
    assert drafter.ready(round.rows, 512)
    found = drafter.propose(round, 2)
    assert found is not None and found.tolist() == [[0, 0], [0, 0], [7, 5]]


def test_nothing_to_propose():
    drafter, words = NGram(), Words([1, 2, 3, 4])
    round = asked(words)
    assert drafter.ready(round.rows, 1) and drafter.propose(round, 4) is None
    assert round.rows[0].trial.tokens == []  # type: ignore[attr-defined]
    round = asked(Words([1, 2, 1, 2]), open=False)  # a grammar has all it asked for
    assert drafter.ready(round.rows, 512) and drafter.propose(round, 4) is None


def test_a_long_prompt_is_read_in_pieces():
    drafter, words = NGram(), Words(list(range(100)) * 2)
    round, turns = asked(words), 1
    while not drafter.ready(round.rows, 8):
        turns += 1
    assert turns == -(-200 // (8 * READ))
    found = drafter.propose(round, 2)
    assert found is not None and found.tolist() == [[0, 1]]


def test_a_sequence_that_was_forgotten_leaves_nothing():
    drafter, words = NGram(), Words([1, 2, 1, 2])
    assert drafter.ready(asked(words).rows, 512)
    drafter.forget(words)
    drafter.forget(words)
    words.tokens = [9, 8]
    assert drafter.ready(asked(words).rows, 512) and drafter.propose(asked(words), 2) is None
