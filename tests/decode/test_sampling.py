"""Sampling against a NumPy reading of the definitions, and the laws a user relies on."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlxkv
from mlxkv.decode import sampling
from mlxkv.decode.counts import Counts
from mlxkv.decode.request import SamplingParams
from mlxkv.decode.sampling import Sampler, sample
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


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 2.0]),
        "top_p": st.sampled_from([0.5, 1.0]),
        "top_k": st.integers(0, 4),
        "min_p": st.sampled_from([0.0, 0.2]),
        "presence_penalty": st.sampled_from([0.0, 1.0]),
        "frequency_penalty": st.sampled_from([0.0, 1.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.5]),
        "logit_bias": st.dictionaries(st.integers(0, 11), st.floats(-5, 5), max_size=3),
        "logprobs": st.booleans(),
    },
)


@settings(max_examples=30, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=5), st.integers(0, 10**6), st.sampled_from([mx.float32, mx.bfloat16]))
def test_a_row_is_what_its_sampler_gives_alone(params, seed, dtype):
    params = [SamplingParams(seed=i, **p) for i, p in enumerate(params)]
    together, alone = ([Sampler(p, [3, 7], VOCAB) for p in params] for _ in range(2))
    for step in range(4):
        logits = mx.array(rows(len(params), seed + step)).astype(dtype)
        got = sample(together, logits)
        assert got.tokens.dtype == mx.int32 and got.tokens.shape == (len(params),)
        read = got.read()
        for i, sampler in enumerate(alone):
            assert read[i][0] == sampler(logits[i : i + 1]).item()
            assert read[i][1] == sample([sampler], logits[i : i + 1]).read()[0][1]
            sampler.advance(read[i][0])
            together[i].advance(read[i][0])


def test_a_step_may_be_sampled_again_and_a_free_row_has_no_sampler():
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1, frequency_penalty=1.0), [1], VOCAB)
    logits = mx.array(rows(2))
    first, again = (sample([None, sampler], logits).tokens.tolist() for _ in range(2))
    assert first == again and first[0] == logits[0].argmax().item()


@pytest.mark.parametrize("few", [0, 1024])
def test_many_tokens_are_penalised_as_few_are(few, monkeypatch):
    monkeypatch.setattr(sampling, "FEW", few)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5, repetition_context=50)
    prompt, said = tiny.ids(30, 1), tiny.ids(60, 2)
    sampler = Sampler(params, prompt, tiny.VOCAB)
    for token in said:
        sampler.advance(token)
    logits = np.random.default_rng(3).normal(size=tiny.VOCAB).astype(np.float32)
    row = logits.copy()
    for token in set(said[-50:]):
        row[token] = row[token] * np.float32(1.5) if row[token] < 0 else row[token] / np.float32(1.5)
    for token in set(said):
        row[token] -= np.float32(0.25 * said.count(token) + 0.5)
    np.testing.assert_array_equal(np.array(sampler.processed(mx.array(logits)[None], sampler.place))[0], row)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 200), max_size=150), st.lists(st.integers(0, 200), max_size=150), st.integers(1, 90))
def test_counts_are_those_of_the_window(prompt, sampled, window):
    every, recent = Counts(prompt), Counts(prompt, window)
    for token in sampled:
        every.add(token)
        recent.add(token)
    for counts, tokens in ((every, prompt + sampled), (recent, (prompt + sampled)[-window:])):
        found = dict(zip(counts.seen().ids.tolist(), counts.seen().counts.tolist(), strict=True))
        assert found == {t: tokens.count(t) for t in tokens}


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
        ("logprobs", 1), ("top_logprobs", 21), ("top_logprobs", -1), ("top_logprobs", True), ("top_logprobs", 3),
        ("repetition_penalty", 0), ("logit_bias", {-1: 1}), ("logit_bias", {1: 1000}), ("stop", ("",)),
    ],
)  # fmt: skip
def test_bad_values_name_the_field(field, value):
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize("size", [1, 12, 2047, 2048])
def test_noise_that_is_made_together_is_each_keys_own(size):
    sampler = Sampler(SamplingParams(temperature=1.0, seed=3), [1], size)
    keys, weights = sampler.keys(5, 4), mx.random.normal((4, size), key=mx.random.key(size))
    together = sampling.drawn(weights, sampling.gumbel(keys, size))
    assert together.tolist() == [sampling.draw(weights[i : i + 1], keys[i]).item() for i in range(4)]
    assert mx.array_equal(sampling.gumbel(keys, size)[1:2], sampling.gumbel(keys[1:2], size))
