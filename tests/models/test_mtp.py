"""Multi-token-prediction heads: found by evidence, kept beside the body, and part of what the store restores."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxkv.cache.state import PositionError
from mlxkv.models import load, mtp
from mlxkv.models.folder import read_json
from tests import headed, tiny
from tests.probe import BLOCK, equal, probe, run, runtime


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return headed.make(tmp_path_factory.mktemp("headed") / "model")


def head_logits(done, rt, token: int) -> np.ndarray:
    """The head's logits after the last prompt token and ``token``, from the state a generation's prefill ended with."""
    cache = done.state.caches[-1]
    cache.catch_up()
    m = cache.run(mx.array([[token]]), cache.hidden[-1][:, -1:], cache.kv)
    return np.array(rt.model.logits(m)[0, -1])


def cold(rt, tokens):
    """A run that finds nothing: the same text under a salt of its own."""
    from mlxkv.decode.request import Request, SamplingParams
    from tests.probe import Probe

    request = Request(
        tokens=list(tokens), sampling=SamplingParams(max_tokens=1), salt=str(len(tokens)) + str(tokens[-1])
    )
    made = Probe(rt, request, lambda e: None, lambda: False, 0.0)
    made.keep = False
    made.completion = made.run()
    assert made.completion.usage.cached_tokens == 0
    return made


def test_a_head_is_found_and_its_norms_are_told_from_the_file(model, tmp_path):
    config = read_json(model / "config.json")
    found = mtp.find(model, config)
    assert found.usable and found.shifted and len(found.names) == 15
    head = load(model).head
    raw = dict(mx.load(str(model / "model.safetensors")))
    assert mx.allclose(head.norm.weight, raw["mtp.norm.weight"] + 1).item()
    assert mx.allclose(head.pre_fc_norm_hidden.weight, raw["mtp.pre_fc_norm_hidden.weight"] + 1).item()
    assert mx.array_equal(head.fc.weight, raw["mtp.fc.weight"]).item()

    moved = tmp_path / "converted"
    tiny.make("qwen3_5", moved)
    weights = dict(mx.load(str(moved / "model.safetensors")))
    weights["mtp.norm.weight"] = mx.zeros((64,))
    mx.save_safetensors(str(moved / "model.safetensors"), weights)
    assert "converted" in mtp.find(moved, config).reason and load(moved).head is None
    assert mtp.find(tiny.make("llama", tmp_path / "llama"), {"model_type": "llama"}).names == ()


def test_the_body_gives_the_logits_it_gives_without_its_head(model, tmp_path):
    plain = runtime(tiny.make("qwen3_5", tmp_path / "plain"), None)
    with_head = runtime(model, tmp_path / "cache")
    assert "1 head" in with_head.layout.describe()
    a, _ = run(plain, tiny.ids(30, seed=1))
    b, _ = run(with_head, tiny.ids(30, seed=1))
    assert np.allclose(a, b, atol=2e-5)  # norms went through w - 1 and back
    with_head.store.close()


def test_the_head_follows_its_equations(model):
    """Against the equations in NumPy, for one row: an attention over one entry gives back its value."""
    loaded = load(model)
    w = {n: np.array(t) for n, t in mx.load(str(model / "model.safetensors")).items() if n.startswith("mtp.")}
    w = {n.removeprefix("mtp."): t + 1 if t.ndim == 1 else t for n, t in w.items()}

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w[name]

    rng = np.random.default_rng(0)
    e, h = rng.normal(size=(2, 64)).astype(np.float32)
    x = w["fc.weight"] @ np.concatenate([norm(e, "pre_fc_norm_embedding.weight"), norm(h, "pre_fc_norm_hidden.weight")])
    y, attention = norm(x, "layers.0.input_layernorm.weight"), "layers.0.self_attn."
    gate = (w[attention + "q_proj.weight"] @ y).reshape(2, 64)[:, 32:].reshape(-1)
    value = np.tile(w[attention + "v_proj.weight"] @ y, 2)
    x = x + w[attention + "o_proj.weight"] @ (value / (1 + np.exp(-gate)))
    y, mlp = norm(x, "layers.0.post_attention_layernorm.weight"), "layers.0.mlp."
    g = w[mlp + "gate_proj.weight"] @ y
    x = x + w[mlp + "down_proj.weight"] @ (g / (1 + np.exp(-g)) * (w[mlp + "up_proj.weight"] @ y))
    mine = loaded.head(mx.array(e)[None, None], mx.array(h)[None, None], None)
    assert np.allclose(np.array(mine)[0, 0], norm(x, "norm.weight"), atol=2e-4)


@pytest.mark.parametrize("n", [2, 3, BLOCK, BLOCK + 1, 30])
def test_head_logits_after_a_resume_are_the_cold_ones(model, tmp_path, n):
    tokens = tiny.ids(n, seed=4)
    writer = runtime(model, tmp_path, prefill_chunk=7)
    run(writer, tokens)
    writer.store.close()
    rt = runtime(model, tmp_path, prefill_chunk=7)
    resumed = probe(rt, tokens, keep=False)
    assert resumed.completion.usage.cached_tokens == (n - 1 if n > 2 else 0)  # one token gives a head no row yet
    assert equal(head_logits(resumed, rt, 9), head_logits(cold(rt, tokens), rt, 9))
    rt.store.close()


def test_prompts_that_differ_only_in_token_p_share_everything_at_p(model, tmp_path):
    tokens, p = tiny.ids(30, seed=6), 20
    rt = runtime(model, tmp_path)
    run(rt, tokens[: p + 1])
    rt.store.writer.flush()
    for other in (7, 8):
        prompt = [*tokens[:p], other]
        shared = probe(rt, prompt, keep=False)
        assert shared.completion.usage.cached_tokens == p
        assert equal(head_logits(shared, rt, 3), head_logits(cold(rt, prompt), rt, 3))
    rt.store.close()


def test_long_answers_keep_the_head_in_step(model, tmp_path):
    tokens = tiny.ids(10, seed=2)
    rt = runtime(model, tmp_path)
    answer = run(rt, tokens, max_tokens=40)[1].token_ids
    rt.store.writer.flush()
    prompt = [*tokens, *answer, 5]
    resumed = probe(rt, prompt, keep=False)
    assert resumed.completion.usage.cached_tokens == len(prompt) - 2
    assert equal(head_logits(resumed, rt, 3), head_logits(cold(rt, prompt), rt, 3))
    rt.store.close()


def test_members_of_a_head_do_not_rewind(model, tmp_path):
    rt = runtime(model, tmp_path)
    state = probe(rt, tiny.ids(10), keep=False).state
    for member in state.members[-2:]:
        assert member.rewindable() == 0 and member.position == 10
        with pytest.raises(PositionError):
            member.rewind(1)
    rt.store.close()
