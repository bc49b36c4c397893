"""Log-probabilities: the model's own, whatever sampling made of them."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import load

import mlxkv
from mlxkv.decode.request import SamplingParams
from mlxkv.decode.sampling import UNLIKELY, Sampler, sample
from mlxkv.errors import RequestError
from tests import tiny


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("n", [0, 1, 5, 20])
def test_they_are_those_of_the_raw_logits(n):
    logits = np.random.default_rng(1).normal(size=(3, 50)).astype(np.float32) * 4
    expected = log_softmax(logits)
    odd = {"temperature": 3.0, "top_k": 2, "logit_bias": {7: 90.0}, "repetition_penalty": 2.0, "seed": 4}
    params = SamplingParams(logprobs=True, top_logprobs=n, **odd)
    samplers = [Sampler(params, [1, 2], 50), Sampler(SamplingParams(), [], 50), Sampler(params, [3], 50)]
    step = sample(samplers, mx.array(logits))
    mx.eval(step.live())
    read = step.read()
    assert read[1][1] is None
    for row in (0, 2):
        token, told = read[row]
        assert told is not None and told.id == token
        assert told.logprob == pytest.approx(expected[row, token], abs=1e-5)
        assert [i for i, _ in told.top] == np.argsort(-expected[row])[:n].tolist()
        assert [v for _, v in told.top] == pytest.approx(np.sort(expected[row])[::-1][:n].tolist(), abs=1e-5)


def test_what_cannot_be_is_a_number_that_json_can_say():
    logits = mx.full((1, 8), -float("inf"))
    logits[0, 3] = 1.0
    told = sample([Sampler(SamplingParams(logprobs=True, top_logprobs=20), [], 8)], logits).read()[0][1]
    assert told is not None and told.logprob == 0.0 and told.top[0] == (3, 0.0) and len(told.top) == 8
    assert {v for _, v in told.top[1:]} == {UNLIKELY}
    json.dumps(told.top, allow_nan=False)


def test_an_answer_carries_one_for_each_token(tiny_model):
    folder, prompt = tiny_model("qwen3_5"), tiny.ids(30)
    with mlxkv.load(folder, cache=False) as engine:
        plain = mlxkv.generate(engine, prompt, max_tokens=8)
        deltas = list(mlxkv.stream(engine, prompt, max_tokens=8, logprobs=True, top_logprobs=3))
        told = mlxkv.generate(engine, prompt, max_tokens=8, logprobs=True, top_logprobs=3)
    assert plain.logprobs is None and plain.token_ids == told.token_ids
    assert told.logprobs is not None and [t.id for t in told.logprobs] == told.token_ids
    assert [t for d in deltas for t in d.logprobs] == told.logprobs
    assert all([t.id for t in d.logprobs] == d.token_ids for d in deltas)
    model = load(str(folder))[0]
    logits = np.array(model(mx.array([prompt + told.token_ids[:-1]]))[0, len(prompt) - 1 :].astype(mx.float32))
    expected = log_softmax(logits)
    assert [t.logprob for t in told.logprobs] == pytest.approx(
        [expected[i, t] for i, t in enumerate(told.token_ids)], abs=1e-3
    )
    assert all(t.top[0] == (t.id, t.logprob) and len(t.top) == 3 for t in told.logprobs)  # greedy
    said = json.loads(json.dumps(told.to_json(), allow_nan=False))["logprobs"]
    assert said[0] == {"id": told.token_ids[0], "logprob": told.logprobs[0].logprob, "top": said[0]["top"]}


def test_top_logprobs_need_logprobs():
    with pytest.raises(RequestError, match="unless logprobs") as caught:
        SamplingParams(top_logprobs=3)
    assert caught.value.param == "top_logprobs"
