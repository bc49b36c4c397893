"""mlx-lm's own plain generation as the oracle: the same tokens, cold and after a restore, for every architecture."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load

import mlxkv
from tests import tiny


@pytest.mark.parametrize("arch", tiny.ARCHS)
def test_greedy_tokens_are_mlx_lms(arch, tiny_model, tmp_path):
    prompt = tiny.ids(70, seed=2)
    model, _ = load(str(tiny_model(arch)))
    theirs = [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=64, prefill_step_size=32)]
    with mlxkv.load(tiny_model(arch), cache_dir=tmp_path, block_size=16, prefill_chunk=32) as engine:
        cold = mlxkv.generate(engine, prompt, max_tokens=64)
        restored = mlxkv.generate(engine, prompt, max_tokens=64)
    assert restored.usage.cached_tokens == 69
    assert cold.token_ids == restored.token_ids == theirs
