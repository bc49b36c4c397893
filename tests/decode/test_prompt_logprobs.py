"""Log-probabilities of the prompt's own tokens: those of one forward over all of it, however it is read."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import load

import mlxkv
from mlxkv.decode import prompt_logprobs
from mlxkv.decode.request import Request, SamplingParams
from mlxkv.errors import RequestError
from tests import tiny
from tests.decode.test_logprobs import log_softmax


def asked(prompt, n, **more):
    return Request(tokens=prompt, prompt_logprobs=n, sampling=SamplingParams(max_tokens=3), **more)


@pytest.mark.parametrize(("arch", "chunk_bytes"), [("qwen3_5", 128 << 20), ("gemma3_text", 4 * tiny.VOCAB * 7)])
def test_each_token_has_one_but_the_first(tiny_model, tmp_path, monkeypatch, arch, chunk_bytes):
    monkeypatch.setattr("mlxkv.decode.prefill.CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(prompt_logprobs, "SLICE_BYTES", 4 * tiny.VOCAB * 5)
    folder, prompt = tiny_model(arch), tiny.ids(70)
    with mlxkv.load(folder, cache_dir=tmp_path, block_size=16, prefill_chunk=32) as engine:
        plain = engine.submit(Request(tokens=prompt, sampling=SamplingParams(max_tokens=3))).result()
        done = engine.submit(asked(prompt, 2)).result()
        again = engine.submit(asked(prompt, 0)).result()
        short = engine.submit(asked(prompt[:1], 2)).result()
    assert plain.prompt_logprobs is None and done.token_ids == plain.token_ids
    assert (done.usage.cached_tokens, done.cache.miss_reason) == (0, "off")  # the store knows it, and is not asked
    told = done.prompt_logprobs
    assert told is not None and told[0] is None and [t.id for t in told[1:]] == prompt[1:]
    logits = np.array(load(str(folder))[0](mx.array([prompt[:-1]]))[0].astype(mx.float32))
    expected = log_softmax(logits)
    assert [t.logprob for t in told[1:]] == pytest.approx(expected[np.arange(69), prompt[1:]].tolist(), abs=1e-3)
    likeliest = np.argsort(-expected)[:, :2]
    assert [[i for i, _ in t.top] for t in told[1:]] == likeliest.tolist()
    assert [t.logprob for t in again.prompt_logprobs[1:]] == [t.logprob for t in told[1:]]
    assert all(t.top == () for t in again.prompt_logprobs[1:]) and short.prompt_logprobs == [None]


@pytest.mark.parametrize("bad", [-1, 21, True, 1.0, "2"])
def test_what_is_no_number_of_them_is_refused(bad):
    with pytest.raises(RequestError, match="prompt_logprobs") as caught:
        asked([1, 2], bad)
    assert caught.value.param == "prompt_logprobs"
