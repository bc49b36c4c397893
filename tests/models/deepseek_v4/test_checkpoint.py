"""Checkpoints and configurations as others write them make the same model, and what it is not is refused."""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxkv.errors import ModelError
from mlxkv.models import load
from mlxkv.models.deepseek_v4 import Model, ModelArgs
from tests import tiny
from tests.models.deepseek_v4 import checkpoints

_DTYPE = {mx.float32: "F32", mx.int64: "I64", mx.int32: "I32"}


def plainly(weights):
    return {name: (_DTYPE[array.dtype], array) for name, array in weights.items()}


@pytest.mark.parametrize("form", ["own", "published", "hugging_face"])
def test_the_same_weights_by_other_names(form, tmp_path):
    weights, config = checkpoints.own()
    stored = weights if form == "own" else getattr(checkpoints, form)(weights)
    assert form == "own" or set(stored) != set(weights)
    loaded = load(checkpoints.write(tmp_path / form, plainly(stored), config))
    got = dict(tree_flatten(loaded.model.parameters()))
    assert got.keys() == weights.keys()
    assert all(mx.array_equal(got[name], weights[name]) for name in weights)
    assert loaded.dtype == "float32" and loaded.vocab_size == tiny.VOCAB


def test_packed_weights_are_unpacked_to_their_very_numbers(tmp_path):
    weights, config = checkpoints.own(num_hidden_layers=2, moe_intermediate_size=64)
    files, plain = checkpoints.packed(checkpoints.published(weights))
    assert {dtype for dtype, _ in files.values()} == {"F32", "I64", "I8", "F8_E4M3", "F8_E8M0"}
    config["quantization_config"] = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    loaded = load(checkpoints.write(tmp_path / "packed", files, config))
    want = Model(ModelArgs.from_dict(config)).sanitize(plain)
    got = dict(tree_flatten(loaded.model.parameters()))
    assert got.keys() == want.keys() and loaded.dequantised
    assert all(mx.array_equal(got[name], want[name]) for name in want)


def test_a_missing_expert_is_named(tmp_path):
    weights, config = checkpoints.own()
    stored = checkpoints.published(weights)
    del stored["layers.2.ffn.experts.1.w2.weight"]
    with pytest.raises(ModelError, match=r"layers\.2\..*down_proj has 3 experts, and config.json says 4"):
        load(checkpoints.write(tmp_path / "missing", plainly(stored), config))


def args(**fields):
    return ModelArgs.from_dict(tiny.config("deepseek_v4") | fields)


def test_fields_of_each_kind_of_config():
    base = args()
    assert base.ratios == (0, 4, 8, 4) and base.num_hash_layers == 1 and base.yarn["factor"] == 16
    # one more ratio is the prediction head's, and one that is missing is of a layer with its window only
    assert args(compress_ratios=[0, 4, 8, 4, 0]).ratios == base.ratios
    assert args(compress_ratios=[0, 4]).ratios == (0, 4, 0, 0)
    # mlx-lm's fields for layers that share entries, where each has its own
    assert args(kv_source_layer_ids=[1, 2, 3], index_source_layer_ids=[1, 3]).ratios == base.ratios
    config = tiny.config("deepseek_v4")
    for name in ("compress_ratios", "num_hash_layers", "rope_scaling", "qk_rope_head_dim"):
        del config[name]
    kinds = ["sliding", "compressed_sparse", "heavily_compressed", "compressed_sparse"]
    theirs = ModelArgs.from_dict(
        config
        | {
            "layer_types": [f"{kind}_attention" for kind in kinds],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
            "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
            "partial_rotary_factor": 0.5,
            "rope_parameters": {
                "main": {"rope_type": "default", "rope_theta": 5000.0},
                "compress": {"rope_theta": 70000.0, **base.yarn, "rope_type": "yarn"},
            },
        }
    )
    for name in ("ratios", "num_hash_layers", "qk_rope_head_dim"):
        assert getattr(theirs, name) == getattr(base, name)
    assert theirs.yarn["factor"] == 16 and (theirs.rope_theta, theirs.compress_rope_theta) == (5000.0, 70000.0)
    # without layers, DeepSeek-V4's own
    assert ModelArgs.from_dict({"compress_ratios": [128, 4]}).ratios == (128, 4) + (0,) * 41


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kv_source_layer_ids": [1]}, r"kv_source_layer_ids is \[1\]"),
        ({"index_source_layer_ids": [1]}, "index_source_layer_ids"),
        ({"candidate_source_layer_id": 1}, "candidate_source_layer_id is 1"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"scoring_func": "tanh"}, "scoring_func is 'tanh'"),
        ({"compress_ratios": [0, 1, 8, 4]}, "compress_ratios is 1"),
        ({"layer_types": ["full_attention"], "compress_ratios": []}, "compress_ratios is -1"),
        ({"mlp_layer_types": ["moe", "hash_moe"]}, "mlp_layer_types"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"sliding_window": 1}, "sliding_window"),
        ({"o_groups": 3}, "o_groups is 3"),
        ({"index_topk": 0}, "index_topk"),
        ({"qk_rope_head_dim": 33}, "qk_rope_head_dim is 33"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling is 'linear'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    ],
)
def test_what_it_is_not_is_refused_by_the_fields_name(fields, named):
    with pytest.raises(ModelError, match=named):
        args(**fields)
