"""Converted checkpoints keep their heads: the same logits where nothing is quantised, and no half-written folder."""

from __future__ import annotations

import json
import os
import shutil

import mlx.core as mx
import numpy as np
import pytest

from mlxkv.errors import ConfigError, ModelError
from mlxkv.models import convert as converting
from mlxkv.models import load, mtp
from mlxkv.models.convert import Quantisation, convert
from tests import headed, heads, tiny


def outputs(folder, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Logits of body and head for the same tokens, rows of the head made from the body's own hidden states."""
    loaded = load(folder)
    assert loaded.head is not None
    both = mtp.WithHead(loaded.model, loaded.head)
    ids = mx.array([tiny.ids(12, seed=3)])
    text = getattr(loaded.model, "language_model", loaded.model)
    hidden = loaded.head.hidden(text, ids, loaded.model.make_cache() if kind.startswith("qwen") else [None] * 2)
    m = both.runner()(ids[:, 1:], hidden[:, :-1], None)
    return np.array(loaded.model(ids)[0]), np.array(both.logits(m)[0])


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "deepseek_v3", "mimo"])
def test_a_round_trip_gives_the_same_logits(kind, tmp_path):
    source = headed.make(tmp_path / "source", kind)
    done = convert(source, tmp_path / "plain")
    assert done.head_kept and done.path == tmp_path / "plain"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plain", "source"]
    for a, b in zip(outputs(source, kind), outputs(done.path, kind), strict=True):
        assert np.array_equal(a, b)
    # once more, from what was converted
    again = convert(done.path, tmp_path / "again")
    assert np.array_equal(outputs(again.path, kind)[1], outputs(source, kind)[1])


@pytest.mark.parametrize("kind", ["qwen3_5_moe_each", "deepseek_v3"])
def test_quantised_heads_are_close(kind, tmp_path):
    source = headed.make(tmp_path / "source", kind)
    wanted = outputs(source, kind)[1]
    how = Quantisation(bits=8, group_size=32)
    quantised = convert(source, tmp_path / "q", quantisation=how)
    names = mtp.find(quantised.path, headed.config(quantised.path)).names
    assert any(name.endswith(".scales") for name in names)
    assert any("switch_mlp" in name and name.endswith(".scales") for name in names)
    close = outputs(quantised.path, kind)[1]
    assert 0 < np.abs(close - wanted).max() < 0.2 * np.abs(wanted).max()
    plain = convert(source, tmp_path / "p", quantisation=how, plain_head=True)
    assert not any(name.endswith(".scales") for name in mtp.find(plain.path, headed.config(plain.path)).names)
    kept, head = load(plain.path).head, load(source).head
    assert kept is not None and head is not None
    embedded, hidden, _ = (mx.array(a)[None] for a in heads.inputs(kind))
    assert mx.array_equal(kept(embedded[:, :7], hidden, None), head(embedded[:, :7], hidden, None)).item()


def test_layers_are_quantised_each_in_its_own_way(tmp_path):
    """Routers in 8 bits beside experts in 4, as mlx-lm's rule for this body is; the tensors themselves say so."""
    source = headed.make(tmp_path / "source", "qwen3_5_moe")
    done = convert(source, tmp_path / "q", quantisation=Quantisation(bits=4, group_size=32))
    opened = mtp.open_head(done.path, headed.config(done.path))[1]
    assert opened is not None
    layer = opened.head.layers[0]
    assert (layer.mlp.gate.bits, layer.mlp.gate.group_size) == (8, 64)
    assert (layer.mlp.switch_mlp.up_proj.bits, layer.mlp.switch_mlp.up_proj.group_size) == (4, 32)
    # unpacked at loading, as the body is
    loaded = load(done.path)
    assert loaded.dequantised and "scales" not in loaded.head.layers[0].mlp.switch_mlp.up_proj


def test_heads_are_not_written_twice(tmp_path):
    """A DeepSeek head brings copies of embedding and output matrix; a converted one is told apart by its bytes."""
    same = convert(headed.make(tmp_path / "a", "deepseek_v3"), tmp_path / "same")
    other = convert(headed.make(tmp_path / "b", "deepseek_v3", own=True), tmp_path / "other")
    copies = []
    for done in (same, other):
        names = mtp.find(done.path, headed.config(done.path)).names
        copies.append(sum("embed_tokens" in n or "shared_head.head" in n for n in names))
    assert copies == [0, 2]


def test_faults_leave_nothing_behind(tmp_path, monkeypatch):
    source = headed.make(tmp_path / "source")
    with pytest.raises(ConfigError, match="exists already"):
        convert(source, source)
    with pytest.raises(ConfigError, match="no folder"):
        convert(source, tmp_path / "none" / "there")
    with pytest.raises(ConfigError, match="5 bits in groups|not possible"):
        convert(source, tmp_path / "out", quantisation=Quantisation(bits=7))
    with pytest.raises(ConfigError, match="Leave the numbers away"):
        convert(source, tmp_path / "out", quantisation=Quantisation(mode="mxfp4", bits=8))
    strange = shutil.copytree(source, tmp_path / "strange")
    (strange / "config.json").write_text(json.dumps(headed.config(source) | {"model_type": "no_such_thing"}))
    with pytest.raises(ModelError, match="no_such_thing"):
        convert(strange, tmp_path / "out")
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(converting.shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(ConfigError, match="are free"):
            convert(source, tmp_path / "out")
    with monkeypatch.context() as patch:  # the disk fills up meanwhile
        patch.setattr("mlx_lm.utils.save", lambda *a, **k: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
        with pytest.raises(ModelError, match="No space left"):
            convert(source, tmp_path / "out")
    quantised = convert(source, tmp_path / "q", quantisation=Quantisation()).path
    with pytest.raises(ConfigError, match="quantised already"):
        convert(quantised, tmp_path / "out", quantisation=Quantisation())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["q", "source", "strange"]


def test_a_head_that_cannot_be_used_is_said_to_be_left_behind(tmp_path):
    moved = tiny.make("qwen3_5", tmp_path / "moved")
    weights = dict(mx.load(str(moved / "model.safetensors")))
    weights["mtp.norm.weight"] = mx.zeros((64,))
    mx.save_safetensors(str(moved / "model.safetensors"), weights)
    done = convert(moved, tmp_path / "out")
    assert not done.head_kept and "converted" in done.head.reason
    assert mtp.find(done.path, headed.config(done.path)).names == ()
