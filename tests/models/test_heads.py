"""Heads of every layout: which are used, and by what evidence; what the body gives beside them; what a step takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache

import mlxkv
from mlxkv.cache.batch.head_rows import HeadRowsOfAll
from mlxkv.cache.head import HeadCache
from mlxkv.cache.layout import probe as layout_of
from mlxkv.models import load, mtp
from mlxkv.models.convert import convert
from tests import headed, heads, tiny
from tests.models.test_mtp import cold, head_logits
from tests.probe import equal, probe, run, runtime


def rewrite(folder: Path, change, name: str = "model.safetensors") -> Path:
    """The folder, with a file's tensors put through ``change``, which may take some away."""
    weights = dict(mx.load(str(folder / name)))
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(str(folder / name), weights)
    return folder


def beside(folder: Path, name: str, **metadata: str) -> Path:
    """The folder with its head moved into a file of its own."""
    head: dict[str, mx.array] = {}
    rewrite(folder, lambda w: head.update({n: w.pop(n) for n in list(w) if n.startswith("mtp.")}))
    mx.save_safetensors(str(folder / name), head, metadata=metadata)
    return folder


def index(folder: Path) -> None:
    files = {n: f.name for f in folder.glob("*.safetensors") for n in mx.load(str(f))}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def found(folder: Path) -> mtp.Found:
    return mtp.find(folder, headed.config(folder))


@pytest.mark.parametrize("kind", heads.KINDS)
def test_every_layout_is_found_and_its_body_gives_what_it_gives_alone(kind, tmp_path):
    folder = headed.make(tmp_path / "model", kind)
    seen = found(folder)
    assert seen.usable and seen.n_layers == 1 and seen.shifted == kind.startswith("qwen")
    assert seen.most_drafts == (1 if kind == "mimo" else None)
    loaded = load(folder)
    both = mtp.WithHead(loaded.model, loaded.head)

    class Seen:
        def observe(self, tokens, hidden):
            self.hidden = hidden

    ids, last = mx.array([tiny.ids(9)]), Seen()
    logits = both(ids, [*make_prompt_cache(loaded.model), last])
    assert mx.array_equal(logits, loaded.model(ids, make_prompt_cache(loaded.model))).item()
    # what a head takes is after the body's final norm, whose output matrix then gives the logits; MiMo's is before it
    text = getattr(loaded.model, "language_model", loaded.model)
    assert mx.array_equal(text.lm_head(last.hidden), logits).item() == (kind != "mimo")


@pytest.mark.parametrize(("kind", "layers"), [("qwen3_next", 1), ("deepseek_v3", 1), ("mimo", 1), ("qwen3_5", 2)])
def test_heads_are_stored_and_resumed(kind, layers, tmp_path):
    folder = headed.make(tmp_path / "model", kind, layers=layers)
    tokens = tiny.ids(20, seed=4)
    writer = runtime(folder, tmp_path / "cache", prefill_chunk=7)
    run(writer, tokens)
    writer.store.close()
    rt = runtime(folder, tmp_path / "cache", prefill_chunk=7)
    resumed = probe(rt, tokens, keep=False)
    assert resumed.completion.usage.cached_tokens == 19
    assert equal(head_logits(resumed, rt, 9), head_logits(cold(rt, tokens), rt, 9))
    rt.store.close()


@pytest.mark.parametrize(("kind", "layers"), [("qwen3_next", 1), ("deepseek_v3", 1), ("mimo", 1), ("qwen3_5", 2)])
def test_text_is_the_same_with_their_drafts(kind, layers, tmp_path):
    folder = headed.make(tmp_path / "model", kind, layers=layers)
    texts = []
    for draft, depth in (("off", None), ("mtp", 1 if kind == "mimo" else 3)):
        with mlxkv.load(folder, cache=False, draft=draft, draft_depth=depth) as engine:
            texts.append(mlxkv.generate(engine, tiny.ids(9, seed=4), max_tokens=16).token_ids)
            assert engine.info.drafter == (None if draft == "off" else "mtp")
    assert texts[0] == texts[1] and len(texts[0]) == 16


def test_files_beside_the_checkpoint_must_say_how_their_norms_are_stored(tmp_path):
    whole = headed.make(tmp_path / "whole")
    embedded, hidden, _ = (mx.array(a)[None] for a in heads.inputs("qwen3_5"))
    wanted = load(whole).head(embedded[:, :7], hidden, None)
    for name in ("mtp.safetensors", "model-mtp.safetensors"):
        silent = beside(headed.make(tmp_path / f"silent-{name}"), name)
        assert "does not say" in found(silent).reason and load(silent).head is None
        index(silent)  # now the checkpoint's own index vouches for it
        assert found(silent).usable
        assert mx.array_equal(load(silent).head(embedded[:, :7], hidden, None), wanted).item()
        told = beside(headed.make(tmp_path / f"told-{name}"), name, mlxkv_head="1", norms="w-1")
        assert mx.array_equal(load(told).head(embedded[:, :7], hidden, None), wanted).item()
    vague = beside(headed.make(tmp_path / "vague"), "mtp.safetensors", mlxkv_head="1", norms="perhaps")
    assert "does not say" in found(vague).reason


def test_norms_that_are_stored_whole_are_not_moved(tmp_path):
    folder = headed.make(tmp_path / "model")
    wanted = load(folder).head
    beside(folder, "mtp.safetensors", mlxkv_head="1", norms="w")
    head = load(folder).head
    assert mx.array_equal(head.norm.weight + 1, wanted.norm.weight).item()
    assert mx.array_equal(head.fc.weight, wanted.fc.weight).item()


def test_a_converted_body_takes_a_head_whatever_its_file_is_called(tmp_path):
    """mlx-lm reads model-mtp.safetensors too, and a converted Qwen3-Next body does not drop what is in it."""
    done = convert(headed.make(tmp_path / "source", "qwen3_next"), tmp_path / "done").path
    wanted = load(done).head
    (done / "mtp.safetensors").rename(done / "model-mtp.safetensors")
    head = load(done).head
    embedded, hidden, _ = (mx.array(a)[None] for a in heads.inputs("qwen3_next"))
    rows = [h(embedded[:, :7], hidden, None) for h in (head, wanted)]
    assert mx.array_equal(*rows).item()


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("qwen3_5", lambda w: w.pop("mtp.fc.weight"), "fc.weight is missing"),
        ("qwen3_5", lambda w: w.update({"mtp.extra.weight": w["mtp.fc.weight"]}), "extra.weight is not known"),
        ("qwen3_5", lambda w: w.update({"mtp.fc.weight": mx.zeros((64, 64))}), r"the shape \[64, 64\]"),
        ("qwen3_5", lambda w: w.update({"mtp.layers.2.x.weight": mx.zeros((2, 2))}), r"numbered \[0, 2\]"),
        ("qwen3_5", lambda w: [w.pop(n) for n in list(w) if "conv1d" in n], "does not show how its norms"),
        ("qwen3_5_moe_each", lambda w: w.pop("mtp.layers.0.mlp.experts.1.up_proj.weight"), "experts are numbered"),
        ("deepseek_v3", lambda w: w.pop("model.layers.2.eh_proj.weight"), "eh_proj.weight is missing"),
        ("mimo", lambda w: w.update({"model.mtp_layers.1.x.weight": mx.zeros((2, 2))}), "more than one layer"),
    ],
)
def test_what_does_not_fit_is_not_used_and_says_why(kind, change, reason, tmp_path):
    folder = rewrite(headed.make(tmp_path / "model", kind), change)
    seen = found(folder)
    assert seen.names and not seen.usable
    assert re.search(reason, seen.reason)
    if "norms" not in reason:  # the body is whole, so it loads
        assert load(folder).head is None


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("llama", "mtp.layers.0.eh_proj.weight"),
        ("llama", "model.mtp.embed.weight"),
        ("llama", "mtp_linear_proj.0.weight"),
        ("llama", "model.layers.2.eh_proj.weight"),
        ("nemotron_h", "mtp.layers.0.mixer.weight"),
    ],
)
def test_heads_of_other_families_are_named_and_left_out(arch, name, tmp_path):
    folder = rewrite(tiny.make(arch, tmp_path / "model"), lambda w: w.update({name: mx.zeros((4, 4))}))
    seen = found(folder)
    assert seen.names == (name,) and seen.reason.startswith(f"heads of {arch} are not supported: ")
    assert load(folder).head is None  # and the body loads, also where mlx-lm would not drop it


def test_embeddings_of_its_own_are_not_guessed(tmp_path):
    folder = headed.make(tmp_path / "model")
    config = headed.config(folder)
    config["text_config"]["mtp_use_dedicated_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    assert "embeddings of its own" in found(folder).reason


def test_a_damaged_side_file_is_told_and_harms_nothing(tmp_path):
    folder = tiny.make("llama", tmp_path / "model")
    (folder / "mtp.safetensors").write_bytes(b"\0" * 40)
    seen = found(folder)
    assert not seen.usable and "mtp.safetensors" in seen.reason
    assert load(folder).head is None


def test_a_head_beside_the_weights_is_part_of_the_fingerprint(tmp_path):
    folder = convert(headed.make(tmp_path / "source"), tmp_path / "model").path
    before = load(folder).fingerprint
    assert load(folder).fingerprint == before

    weights = dict(mx.load(str(folder / "mtp.safetensors")))
    mx.eval(weights)
    weights["mtp.fc.weight"] = weights["mtp.fc.weight"] * 2
    mx.save_safetensors(str(folder / "mtp.safetensors"), weights, metadata={"mlxkv_head": "1", "norms": "w-1"})
    assert load(folder).fingerprint != before
    (folder / "mtp.safetensors").unlink()
    assert load(folder).fingerprint != before


def test_a_head_shares_what_is_the_bodys(tmp_path):
    shared, own = (load(headed.make(tmp_path / str(o), "deepseek_v3", own=o)).head for o in (False, True))
    assert "embed_tokens" not in shared and "head" not in shared.layers[0].shared_head
    assert "embed_tokens" in own and "head" in own.layers[0].shared_head


@pytest.mark.parametrize("kind", ["qwen3_5", "deepseek_v3"])
def test_drafts_take_turns_with_layers(kind, tmp_path):
    """Every layer makes every row; the draft of number s is that of layer s % 2."""
    head = load(headed.make(tmp_path / "model", kind, layers=2)).head
    assert head.n_layers == 2
    embedded, hidden, _ = (mx.array(a)[None] for a in heads.inputs(kind))

    def draft(step: int) -> mx.array:
        cache = KVCache()
        head(embedded[:, :6], hidden[:, :6], cache)
        m = head(embedded[:, 6:7], hidden[:, 6:7], cache, step)
        assert cache.offset == 7
        return m

    drafts = [np.array(draft(step)) for step in range(3)]
    assert np.array_equal(drafts[0], drafts[2]) and not np.allclose(drafts[0], drafts[1], atol=0.1)
    alone = np.array(head(embedded[:, :7], hidden, None, 1))[:, -1:]
    assert np.allclose(drafts[1], alone, atol=2e-5)


@pytest.mark.parametrize("kind", ["deepseek_v3", "mimo"])
def test_the_first_row_of_each_sequence_is_blind(kind, tmp_path):
    """Row 0 does not depend on its token, in whatever forward it is made; later ones do."""
    head = load(headed.make(tmp_path / "model", kind)).head
    embedded, hidden, _ = (mx.array(a)[None] for a in heads.inputs(kind))
    one, two = (head(e[:, :4], hidden[:, :4], KVCache()) for e in (embedded, mx.roll(embedded, 1, axis=1)))
    assert mx.array_equal(one[:, :1], two[:, :1]).item() and not mx.allclose(one[:, 1], two[:, 1], atol=1e-3).item()
    # a batch of two, the second two rows shorter, padded on the left
    pad = [mx.concatenate([mx.zeros_like(x[:, :2]), x[:, :2]], axis=1) for x in (embedded, hidden)]
    both = [mx.concatenate([x[:, :4], p]) for x, p in zip((embedded, hidden), pad, strict=True)]
    batch = head(*both, BatchKVCache([0, 2]))
    assert mx.allclose(batch[:1], one, atol=2e-5).item()
    assert mx.allclose(batch[1:, 2:], one[:, :2], atol=2e-5).item()


@pytest.mark.parametrize("kind", ["deepseek_v3", "mimo"])
def test_several_sequences_at_once_give_what_each_gives_alone(kind, tmp_path):
    """One at its first row, which is blind, beside one that is three rows on."""
    loaded = load(headed.make(tmp_path / "model", kind))
    head, both = loaded.head, mtp.WithHead(loaded.model, loaded.head)
    layout = layout_of(both, lambda: [*make_prompt_cache(loaded.model), HeadCache(both.runner())])
    rows = HeadRowsOfAll(next(m for m in layout.members if m.kind == "head"), 2, 16)
    embedded, hidden, _ = (mx.array(a)[None] for a in heads.inputs(kind))
    later = KVCache()
    mx.eval(head(embedded[:, :3], hidden[:, :3], later), later.keys, later.values)
    rows.join(1, later)
    joint = rows.run(head, *(mx.concatenate([x[:, :2], x[:, 3:5]]) for x in (embedded, hidden)))
    assert mx.array_equal(joint[:1], head(embedded[:, :2], hidden[:, :2], KVCache())).item()
    assert mx.array_equal(joint[1:], head(embedded[:, 3:5], hidden[:, 3:5], later)).item()
