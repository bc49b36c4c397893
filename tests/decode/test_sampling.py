"""Sampling against a NumPy reading of the definitions, and the laws a user relies on."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlxkv
from mlxkv.decode.request import SamplingParams
from mlxkv.decode.sampling import Sampler
from mlxkv.errors import RequestError
from tests import tiny

VOCAB = 12


def draws(params: SamplingParams, logits: np.ndarray, prompt=(1, 2)) -> list[int]:
    sampler = Sampler(params, list(prompt), VOCAB)
    out = []
    for row in logits:
        out.append(int(sampler(mx.array(row)[None]).item()))
        sampler.advance(out[-1])
    return out


def rows(n: int, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, VOCAB)).astype(np.float32) * 2


def test_greedy_is_the_argmax():
    logits = rows(20)
    assert draws(SamplingParams(), logits) == logits.argmax(1).tolist()


@pytest.mark.parametrize("params", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}])
def test_filters_at_their_tightest_leave_the_argmax(params):
    logits = rows(20)
    assert draws(SamplingParams(temperature=3.0, **params), logits) == logits.argmax(1).tolist()


def test_frequencies_are_those_of_the_softmax():
    logits = np.tile(rows(1, seed=4), (3000, 1))
    temperature = 1.3
    p = np.exp(logits[0] / temperature)
    p /= p.sum()
    counts = np.bincount(draws(SamplingParams(temperature=temperature, seed=5), logits), minlength=VOCAB)
    # chi-square with 11 degrees of freedom: 31.3 is passed once in a thousand; the seed is fixed
    assert ((counts - 3000 * p) ** 2 / (3000 * p)).sum() < 31.3


@settings(max_examples=30, deadline=None)
@given(
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.floats(0.5, 2),
    st.integers(1, 6),
    st.dictionaries(st.integers(0, 11), st.floats(-5, 5)),
)
def test_penalties_and_bias_follow_their_definitions(presence, frequency, repetition, context, bias):
    params = SamplingParams(
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        repetition_context=context,
        logit_bias=bias,
    )
    prompt, logits, sampled = [3, 3, 7], rows(12, seed=8), []
    got = draws(params, logits, prompt)
    for i, row in enumerate(logits):
        row = row.astype(np.float64)
        for token, b in bias.items():
            row[token] += np.float32(b)
        for token in set((prompt + sampled)[-context:]):
            row[token] = row[token] * repetition if row[token] < 0 else row[token] / repetition
        for token in range(VOCAB):
            row[token] -= frequency * sampled.count(token) + presence * (token in sampled)
        best = np.sort(row)[::-1]
        if best[0] - best[1] > 1e-4:  # near ties may fall either way in float32
            assert got[i] == row.argmax()
        sampled.append(got[i])


def test_a_seed_gives_the_same_text_whatever_was_cached(tiny_model, tmp_path):
    with mlxkv.load(tiny_model("qwen3_5"), cache_dir=tmp_path, block_size=16) as engine:
        options = {"temperature": 1.0, "top_p": 0.9, "seed": 42, "max_tokens": 20}
        cold = mlxkv.generate(engine, tiny.ids(50), use_cache=False, **options)
        stored = mlxkv.generate(engine, tiny.ids(50), **options)
        restored = mlxkv.generate(engine, tiny.ids(50), **options)
        other = mlxkv.generate(engine, tiny.ids(50), **{**options, "seed": 43})
        free = [mlxkv.generate(engine, tiny.ids(50), **{**options, "seed": None}).token_ids for _ in range(2)]
    assert restored.usage.cached_tokens == 49
    assert cold.token_ids == stored.token_ids == restored.token_ids != other.token_ids
    assert free[0] != free[1]


def test_a_top_p_of_zero_takes_the_likeliest_token(tiny_model):
    with mlxkv.load(tiny_model("llama"), cache=False) as engine:
        greedy = mlxkv.generate(engine, tiny.ids(20), max_tokens=8)
        narrow = mlxkv.generate(engine, tiny.ids(20), max_tokens=8, temperature=1.0, top_p=0.0, seed=1)
    assert narrow.token_ids == greedy.token_ids


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("temperature", float("nan")), ("temperature", "hot"), ("top_p", 1.5), ("top_k", -1),
        ("min_p", 2), ("max_tokens", 0), ("max_tokens", True), ("seed", 2**64), ("presence_penalty", 3),
        ("repetition_penalty", 0), ("logit_bias", {-1: 1}), ("logit_bias", {1: 1000}), ("stop", ("",)),
    ],
)  # fmt: skip
def test_bad_values_name_the_field(field, value):
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
