"""The model in an engine, and converted."""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import mlxkv
from mlxkv.models import load
from mlxkv.models.convert import Quantisation, convert
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make("deepseek_v4", tmp_path_factory.mktemp("models") / "v4")


def test_an_engine_says_what_the_model_says(folder):
    model, _ = tiny.build("deepseek_v4")
    ids, want = tiny.ids(40, 6), []
    cache = model.make_cache()
    logits = model(mx.array([ids]), cache)
    for _ in range(24):
        want.append(int(mx.argmax(logits[0, -1])))
        logits = model(mx.array([want[-1:]]), cache)
    with mlxkv.load(folder) as engine:
        assert mlxkv.generate(engine, ids, max_tokens=24).token_ids == want
    assert len(set(want)) > 8


def test_text_of_the_published_kind_of_ratios_is_generated(tmp_path):
    """Their tokenizer comes from a config that transformers knows, and their window is longer than the prompt."""
    made = tiny.make("deepseek_v4", tmp_path / "long", compress_ratios=[0, 4, 128, 4, 0], sliding_window=128)
    with mlxkv.load(made) as engine:
        assert len(mlxkv.generate(engine, "the end of the ", max_tokens=8).token_ids) == 8


def test_converted_it_is_the_same_and_quantised_it_is_close(folder, tmp_path):
    ids = mx.array([tiny.ids(60, 7)])
    want = load(folder).model(ids)
    plain = convert(folder, tmp_path / "plain")
    assert mx.array_equal(load(plain.path).model(ids), want)
    small = load(convert(folder, tmp_path / "q", quantisation=Quantisation(bits=8, group_size=32)).path)
    # of some tokens another expert or entry is the best one
    assert small.dequantised and 0 < mx.median(mx.abs(small.model(ids) - want)) < 0.1
    # what makes entries, and what chooses them, is not quantised
    mine, theirs = (dict(tree_flatten(m.parameters())) for m in (small.model, tiny.build("deepseek_v4")[0]))
    for name in ("compressor.kv_proj", "indexer.compressor.gate_proj", "indexer.weights_proj"):
        name = f"model.layers.1.self_attn.{name}.weight"
        assert mx.array_equal(mine[name], theirs[name])
    assert not mx.array_equal(mine["lm_head.weight"], theirs["lm_head.weight"])
