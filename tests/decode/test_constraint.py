"""Constraints: packed masks, and a sampler that keeps to them whatever else it was asked."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxkv.decode.constraint import apply, pack, unpack
from mlxkv.decode.request import SamplingParams
from mlxkv.decode.sampling import Sampler, sample
from mlxkv.errors import DeadEnd


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_a_mask_says_which_tokens_may_come(case):
    size, ids = case
    mask = pack(sorted(ids), size)
    assert mask.dtype == np.uint32 and len(mask) == -(-size // 32)
    assert unpack(mask).tolist() == sorted(ids)
    logits = np.random.default_rng(size).normal(size=(1, size)).astype(np.float32)
    expected = [[v if i in ids else -np.inf for i, v in enumerate(logits[0])]]
    np.testing.assert_array_equal(np.array(apply(mx.array(logits), mask)), expected)


class Cycle:
    """Allows 5, then 6, then 5, ...; the sequence may end after ``length`` tokens and is over then."""

    def __init__(self, length: int, size: int = 40) -> None:
        self.length, self.size, self.at = length, size, 0

    @property
    def accepting(self) -> bool:
        return self.at >= self.length

    done = accepting
    free = False

    def mask(self) -> np.ndarray:
        return pack([] if self.done else [5 + self.at % 2], self.size)

    def advance(self, token: int) -> None:
        if token != 5 + self.at % 2:
            raise DeadEnd("no")
        self.at += 1

    def fork(self) -> Cycle:
        other = Cycle(self.length, self.size)
        other.at = self.at
        return other

    def rollback(self, n: int) -> None:
        self.at -= n


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 2.0, "seed": 1},
        {"temperature": 1.0, "top_p": 0.1, "top_k": 3, "min_p": 0.5},
        # everything that speaks against 5 and 6, and for others
        {"logit_bias": {5: -100, 6: -100, 9: 100}, "presence_penalty": 2.0, "repetition_penalty": 9.0},
    ],
)
def test_a_sampler_never_leaves_its_constraint(params):
    sampler = Sampler(SamplingParams(**params), [5, 6], 40, Cycle(6))
    plain = Sampler(SamplingParams(), [], 40)
    logits = mx.array(np.random.default_rng(0).normal(size=(2, 40)).astype(np.float32) * 9)
    out = []
    while not sampler.done:
        tokens = sample([plain, sampler], logits).tokens.tolist()
        assert tokens[0] == logits[0].argmax().item()
        out.append(tokens[1])
        sampler.advance(tokens[1])
    assert out == [5, 6] * 3


def test_a_constraint_that_cannot_go_on_says_so_of_its_own_sampler():
    sampler = Sampler(SamplingParams(), [], 40, Cycle(6))
    with pytest.raises(DeadEnd):
        sampler.advance(17)
