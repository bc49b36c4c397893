"""``store_bits``: rows stored quantised come back the same from everywhere, and never meet rows stored another way."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, QuantizedKVCache

from mlxkv.cache import record
from mlxkv.cache.layout import probe as layout_of
from mlxkv.cache.record import Reader
from mlxkv.decode.engine import Engine
from mlxkv.errors import ConfigError
from tests import headed, tiny
from tests.cache.equality import LENGTH, story, tail
from tests.cache.stores import prompt, recached, records, reopened
from tests.probe import BLOCK, equal, kept_in_memory, probe, run, runtime

RAM = 1 << 30
#: rows alone; attention beside gated delta rule, windows, Mamba-2; rows of latents beside rows of an index
MODELS = ("llama", "qwen3_5", "gemma3_text", "falcon_h1", "deepseek_v32")


def row_bytes(folder: Path) -> int:
    """What the tensors of all ``rows`` records weigh."""
    total = 0
    for path in records(folder, "rows"):
        with Reader.open(path) as reader:
            total += sum(b - a for _, _, a, b in reader.tensors.values())
    return total


def quantise(rt):
    """What a restore gives in place of rows that stayed in memory, made with MLX alone."""

    def rewrite(state):
        for member in state.members:
            if not member.packable:
                continue
            rows = {}
            for name, array in member.rows(0, state.position).items():
                width = array.shape[-1]
                bits = {"group_size": 64 if width % 64 == 0 else 32, "bits": rt.layout.store_bits}
                exact = width == 0 or width % 32
                rows[name] = array if exact else mx.dequantize(*mx.quantize(array, **bits), **bits)
            mx.eval(list(rows.values()))
            member.resume(rows, state.position)

    return rewrite


@pytest.mark.parametrize(("arch", "bits"), [*((arch, 8) for arch in MODELS), ("llama", 4), ("qwen3_5", 4)])
def test_a_restore_is_the_state_in_memory_quantised(tiny_model, tmp_path, arch, bits):
    """At every kept boundary, in the same bits from RAM, from disk, and from a store opened anew."""
    rt = runtime(tiny_model(arch), tmp_path, prefill_chunk=12, store_bits=bits, ram_budget=RAM)
    assert f"growing (stored in {bits} bits)" in rt.layout.describe()
    tokens, ends = story()
    run(rt, tokens)
    edges = [] if rt.layout.growing_only else [*ends, LENGTH - 1]
    lengths = (1, BLOCK + 1, 2, BLOCK, BLOCK - 1)
    asked = [tokens[:p] + tail(p, length, tokens) for p, length in zip([*ends, LENGTH - 1], lengths, strict=True)]
    found = []
    for ids in asked:
        logits, done = run(rt, ids, keep=False)
        assert done.cache.source == "ram"
        found.append((logits, done.usage.cached_tokens))
    rt.store.close()
    rt = reopened(rt, tmp_path)
    moved = 0.0
    for ids, (logits, cached) in zip(asked, found, strict=True):
        again, done = run(rt, ids, keep=False)
        assert np.array_equal(again, logits)
        assert (done.usage.cached_tokens, done.cache.source) == (cached, "ssd")
        assert cached in (edges or (*ends, LENGTH - 1))
        kept = kept_in_memory(rt, tokens, ids, [e for e in edges if e <= cached], cached, quantise(rt))
        assert np.array_equal(logits, kept)
        cold, _ = run(rt, ids, use_cache=False)
        moved = max(moved, float(np.abs(logits - cold).max() / np.abs(cold).max()))
    assert 0 < moved < (0.02 if bits == 8 else 0.5)
    assert not rt.store.faults
    rt.store.close()


CHILD = """
import sys
from pathlib import Path
from tests.probe import run, runtime
rt = runtime(Path(sys.argv[1]), Path(sys.argv[2]), store_bits=8)
logits, done = run(rt, eval(sys.argv[3]), keep=False)
print(done.usage.cached_tokens, done.cache.source, logits.tobytes().hex())
rt.store.close()
"""


def test_another_process_restores_the_same_bits(tiny_model, tmp_path):
    tokens = prompt()
    rt = runtime(tiny_model("qwen3_5"), tmp_path, store_bits=8, ram_budget=RAM)
    run(rt, tokens)
    logits, _ = run(rt, tokens, keep=False)
    rt.store.close()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tiny_model("qwen3_5")), str(tmp_path), str(tokens)],
        env=os.environ | {"MLXKV_NUMERICS": "exact"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == [str(len(tokens) - 1), "ssd", logits.tobytes().hex()], done.stderr


def in_dtype(rt, folder, dtype):
    """The same model computed in another dtype, as a GPU would."""
    rt.store.close()
    rt.model.set_dtype(dtype)
    rt = recached(rt, folder, rt.make_cache)
    rt.store.close()
    return rt


@pytest.mark.parametrize(
    ("arch", "changes", "dtype", "eight", "four"),
    [
        ("llama", {}, mx.float32, (32 + 8) / 128, (16 + 8) / 128),
        ("llama", {"head_dim": 64}, mx.float32, (64 + 8) / 256, (32 + 8) / 256),
        ("llama", {"head_dim": 64}, mx.bfloat16, (64 + 4) / 128, (32 + 4) / 128),
        ("llama", {"head_dim": 96}, mx.float16, (96 + 12) / 192, (48 + 12) / 192),
        ("qwen3_5", {}, mx.float32, (32 + 8) / 128, (16 + 8) / 128),
    ],
)
def test_rows_weigh_what_is_said(tmp_path, arch, changes, dtype, eight, four):
    model = tiny.make(arch, tmp_path / "m", **changes)
    weights, states = {}, set()
    for bits in (None, 8, 4):
        folder = tmp_path / str(bits)
        rt = in_dtype(runtime(model, tmp_path / "plain"), folder, dtype)
        rt = dataclasses.replace(rt, store=reopened(rt, folder, store_bits=bits).store)
        run(rt, story()[0])
        rt.store.close()
        weights[bits] = row_bytes(folder)
        states.add(sum(path.stat().st_size for path in records(folder, "state")) // 1024)
        assert sum(t.nbytes(LENGTH) for t in rt.store.layout.tensors("rows")) == weights[bits]
    assert weights[8] == eight * weights[None] and weights[4] == four * weights[None]
    assert len(states) == 1  # a state is stored as it is


def test_other_bits_never_meet(tiny_model, tmp_path):
    tokens = prompt()
    seen = {}
    for bits in (None, 8, 4):
        rt = runtime(tiny_model("qwen3_5"), tmp_path, store_bits=bits)
        cold, done = run(rt, tokens)
        assert done.usage.cached_tokens == 0
        assert done.cache.miss_reason == ("empty" if bits is None else "other_layout")
        rt.store.close()
        seen[bits] = cold
    assert np.array_equal(seen[None], seen[8]) and np.array_equal(seen[None], seen[4])  # nothing was restored yet
    for bits in (None, 8, 4):
        rt = runtime(tiny_model("qwen3_5"), tmp_path, store_bits=bits)
        logits, done = run(rt, tokens, keep=False)
        assert (done.usage.cached_tokens, done.cache.miss_reason) == (len(tokens) - 1, None)
        assert equal(logits, cold) == (bits is None)
        rt.store.close()


def test_rows_are_quantised_once_however_many_branches_go_on_from_them(tiny_model, tmp_path):
    """Each branch leaves the one before it inside a block; the rows that all share come back the same from the last."""
    rt = runtime(tiny_model("llama"), tmp_path, store_bits=4)
    shared, first = tiny.ids(12, seed=1), None
    for branch in range(4):
        ids = [*shared, *tiny.ids(2 + branch, seed=50 + branch)]  # the longest is the one that the next goes on from
        _, done = run(rt, ids)
        assert rt.store.writer.flush(10)
        assert done.usage.cached_tokens == (len(shared) if branch else 0)
        restored = probe(rt, ids, keep=False)
        assert restored.completion.usage.cached_tokens == len(ids) - 1
        rows = [np.array(a) for m in restored.state.members for a in m.rows(0, len(shared)).values()]
        first = first or rows
        assert all(np.array_equal(a, b) for a, b in zip(first, rows, strict=True))
    # a conversation that goes on: all but the last token comes back, as before
    long = [*ids, *tiny.ids(20, seed=9)]
    run(rt, long)
    assert rt.store.writer.flush(10)
    assert run(rt, long, keep=False)[1].usage.cached_tokens == len(long) - 1
    assert not rt.store.faults and not rt.store.writer.counters.faults
    rt.store.close()


def test_a_model_in_which_nothing_can_be_quantised_says_so(tmp_path):
    """And keeps what it kept without: its entries are the same."""
    narrow = tiny.make("llama", tmp_path / "m", head_dim=16)
    tokens = prompt()
    for bits in (None, 8):
        with Engine(narrow, cache_dir=tmp_path / "c", block_size=BLOCK, store_bits=bits) as engine:
            said = any("store_bits" in note for note in engine.info.notes)
            assert said == (bits is not None) and engine.info.layout == "2 growing"
    rt = runtime(narrow, tmp_path / "c")
    cold, _ = run(rt, tokens)
    rt.store.close()
    rt = runtime(narrow, tmp_path / "c", store_bits=8)
    logits, done = run(rt, tokens, keep=False)
    assert done.usage.cached_tokens == len(tokens) - 1 and equal(logits, cold)
    rt.store.close()


def test_what_is_quantised_already_stays_as_it_is(tiny_model, tmp_path):
    rt = runtime(tiny_model("llama"), tmp_path / "plain", prefill_chunk=12)
    rt.store.close()
    own = layout_of(rt.model, lambda: [QuantizedKVCache(32, 8) for _ in range(2)])
    assert own.packed(8).digest == own.digest and own.packed(8).store_bits is None
    mixed = recached(rt, tmp_path / "mixed", lambda: [ConcatenateKVCache(), QuantizedKVCache(32, 4)])
    mixed.store.close()
    mixed = reopened(mixed, tmp_path / "mixed", store_bits=8)
    names = [t.name for t in mixed.store.layout.tensors("rows")]
    parts = ("packed", "scales", "biases")
    assert names == [f"{layer}.{name}.{part}" for layer in (0, 1) for name in ("keys", "values") for part in parts]
    assert [t.shape[-1] for t in mixed.store.layout.tensors("rows") if "packed" in t.name] == [8, 8, 4, 4]
    tokens = prompt()
    run(mixed, tokens)
    assert mixed.store.writer.flush(10)
    assert run(mixed, tokens, keep=False)[1].usage.cached_tokens == len(tokens) - 1
    mixed.store.close()


def test_the_rows_of_a_head_stay_as_they_are(tmp_path):
    rt = runtime(headed.make(tmp_path / "m"), tmp_path / "c", store_bits=8)
    names = [t.name for t in rt.store.layout.tensors("rows")]
    head = [name for name in names if name.startswith("4.")]
    assert head == ["4.0.keys", "4.0.values"] and "1.keys.packed" in names
    tokens = prompt()
    run(rt, tokens)
    done = probe(rt, tokens, keep=False)
    assert done.completion.usage.cached_tokens == len(tokens) - 1 and not rt.store.faults
    rt.store.close()


def test_a_scale_that_is_not_finite_is_refused(tiny_model, tmp_path):
    """A record that is whole by its checksums: quarantined, and the answer is the cold one."""
    rt = runtime(tiny_model("llama"), tmp_path, store_bits=8)
    tokens = prompt()
    cold, _ = run(rt, tokens)
    rt.store.close()
    path = max(records(tmp_path, "rows"), key=lambda p: p.stat().st_size)
    with Reader.open(path) as reader:
        meta = reader.meta
        held = {name: (reader.tensors[name][0], reader.read(name)) for name in reader.tensors}
    held["1.values.scales"][1][0, 0, 2, 0] = np.nan
    path.unlink()
    record.write(path, meta, record.Body.of(held))
    rt = reopened(rt, tmp_path)
    logits, done = run(rt, tokens, keep=False)
    assert done.cache.miss_reason == "corrupt" and done.usage.cached_tokens == meta.row_start
    assert [p.name.endswith(path.name) for p in (tmp_path / "quarantine").iterdir()] == [True]
    assert equal(logits, cold) or meta.row_start
    rt.store.close()


class Wide:
    """Float16 rows whose largest and smallest values lie further apart than the dtype reaches."""

    def __call__(self, ids, cache):
        rows = mx.where(mx.arange(64) % 2, 60000.0, -60000.0).astype(mx.float16)
        rows = mx.broadcast_to(rows, (1, 1, ids.shape[1], 64))
        keys, _ = cache[0].update_and_fetch(rows, rows)
        return mx.broadcast_to(keys[0, 0, -1, 0].astype(mx.float32), (1, ids.shape[1], tiny.VOCAB))


@pytest.mark.parametrize("bits", [None, 8])
def test_what_would_not_come_back_finite_is_not_stored(tiny_model, tmp_path, caplog, bits):
    rt = runtime(tiny_model("llama"), tmp_path / "plain")
    rt.store.close()
    rt = recached(rt, tmp_path / "c", lambda: [KVCache()], Wide())
    rt.store.close()
    rt = dataclasses.replace(rt, store=reopened(rt, tmp_path / "c", store_bits=bits).store)
    run(rt, prompt())
    rt.store.close()
    assert bool(records(tmp_path / "c")) == (bits is None)
    assert ("once it is quantised" in caplog.text) == (bits is not None)


@pytest.mark.parametrize("bad", [0, 2, 16, -8, True, 8.0, "8"])
def test_other_numbers_are_refused(tiny_model, tmp_path, bad):
    with pytest.raises(ConfigError, match="store_bits is .* It must be 4 or 8"):
        Engine(tiny_model("llama"), cache_dir=tmp_path / "c", store_bits=bad)
    assert not (tmp_path / "c").exists()


def test_a_store_of_ones_own_takes_it_too(tiny_model, tmp_path):
    rt = runtime(tiny_model("llama"), tmp_path / "plain")
    rt.store.close()
    for bits in (4, 8):
        store = reopened(rt, tmp_path / "c", store_bits=bits).store
        assert store.layout.store_bits == bits and store.identity.layout == store.layout.digest != rt.layout.digest
        store.close()
    with pytest.raises(ConfigError, match="store_bits is 3"):
        reopened(rt, tmp_path / "d", store_bits=3)


def test_a_record_says_how_it_is_stored(tiny_model, tmp_path):
    """Whoever reads the file with another library can bring the rows back."""
    rt = runtime(tiny_model("llama"), tmp_path, store_bits=8)
    run(rt, prompt())
    rt.store.close()
    head = records(tmp_path, "rows")[0].read_bytes()
    metadata = json.loads(head[8 : 8 + int.from_bytes(head[:8], "little")])["__metadata__"]
    assert metadata["store_bits"] == "8"
