"""A model of compressed attention and the store: every boundary is resumed from SSD with the logits of a cold run, and
a longer conversation is written in proportion."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import CacheList, KVCache, save_prompt_cache

from mlxkv.cache.record import Reader
from mlxkv.cache.ring import with_rings
from mlxkv.cache.state import SequenceState
from mlxkv.decode.memory import cycle_bytes, live_bytes
from mlxkv.decode.runtime import Runtime
from tests import tiny
from tests.cache.legacy.prompt_files import imported, refusal
from tests.cache.stores import records
from tests.probe import equal, run, runtime

#: a group of 16 ends in every other block of 8, so that records without entries are common
RATIOS = [4, 16, 0]
LENGTH = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compressed") / "model"
    return tiny.make("deepseek_v4", folder, num_hidden_layers=len(RATIOS), compress_ratios=RATIOS)


def story(ends: list[int], length: int = LENGTH, seed: int = 5) -> list[int]:
    tokens = tiny.ids(length, seed=seed)
    for end in ends:
        tokens[end - 1] = tiny.EOS
    return tokens


def stored(rt: Runtime, tokens: list[int]) -> None:
    run(rt, tokens)
    assert rt.store is not None
    rt.store.writer.write_tips()
    assert rt.store.writer.flush(60)
    rt.store.close()


def test_every_boundary_is_resumed(model, tmp_path):
    """Each remainder of both ratios comes, and chunks end anywhere."""
    ends = list(range(2, LENGTH - 1, 3))
    tokens = story(ends)
    stored(runtime(model, tmp_path / "c", prefill_chunk=7), tokens)
    rt = runtime(model, tmp_path / "c", prefill_chunk=7)
    whole = np.array(rt.model(mx.array(tokens)[None])[0].astype(mx.float32))
    for end in [*ends, LENGTH - 1]:
        logits, completion = run(rt, tokens[: end + 1], keep=False)
        assert (completion.usage.cached_tokens, completion.cache.source) == (end, "ssd")
        assert equal(logits, whole[end]), end
    rt.store.close()


def test_states_are_told_inside_a_forward(model, tmp_path):
    """A prompt is not cut at its boundaries, however long a forward is: rings are asked, or what they read from."""
    ends = [3, 9, 22, 31]
    tokens = story(ends)
    rt = runtime(model, tmp_path / "c", prefill_chunk=LENGTH, split="never")
    assert rt.split.segment(0, [*ends, LENGTH - 1], LENGTH) == (LENGTH - 1, tuple(ends))
    stored(rt, tokens)
    again = runtime(model, tmp_path / "c")
    for end in ends:
        logits, completion = run(again, [*tokens[:end], 7], keep=False)
        assert completion.usage.cached_tokens == end
        assert equal(logits, run(again, [*tokens[:end], 7], use_cache=False)[0])
    again.store.close()


def test_rings_of_other_lengths_are_the_same_state(model, tmp_path):
    """What an engine with spare rows has stored, one without them resumes, and the other way round."""
    tokens = story([11, 24])
    drafting = {"draft": "ngram", "draft_depth": 3}
    for i, (writes, reads) in enumerate([(drafting, {"draft": "off"}), ({"draft": "off"}, drafting)]):
        stored(runtime(model, tmp_path / str(i), **writes), tokens)
        rt = runtime(model, tmp_path / str(i), **reads)
        logits, completion = run(rt, [*tokens[:24], 7], keep=False)
        assert completion.usage.cached_tokens == 24 and completion.cache.source == "ssd"
        assert equal(logits, run(rt, [*tokens[:24], 7], use_cache=False)[0])
        rt.store.close()


def test_a_conversation_is_written_once(model, tmp_path):
    """Turns end inside of groups and blocks: each row and each entry is written once, and resumed bit by bit."""
    tokens = story([], 131)
    ends, sizes = (26, 59, 93, 131), []
    for end in ends:
        rt = runtime(model, tmp_path / "c")
        stored(rt, tokens[:end])
        rows, entries = {"rows": 0, "window": 0}, [0, 0]
        for kind in rows:
            for path in records(tmp_path / "c", kind):
                with Reader.open(path) as reader:
                    rows[kind] += reader.meta.end - reader.meta.row_start
                    for layer in (0, 1) if kind == "rows" else ():
                        entries[layer] += reader.tensors[f"{layer}.2.entries"][1][2]
        assert rows["rows"] == rows["window"] == end
        assert entries == [end // ratio for ratio in RATIOS[:2]]
        sizes.append(sum(p.stat().st_size for kind in rows for p in records(tmp_path / "c", kind)) / end)
    assert max(sizes) <= 1.2 * min(sizes)
    rt = runtime(model, tmp_path / "c")
    logits, completion = run(rt, [*tokens[:130], 7], keep=False)
    assert completion.usage.cached_tokens == 130
    assert equal(logits, run(rt, [*tokens[:130], 7], use_cache=False)[0])
    rt.store.close()


@pytest.mark.parametrize("chunk", [1, 5, 70])
def test_what_is_held_is_charged(model, chunk):
    """Rings, entries, and what a forward longer than a ring leaves until the next one."""
    rt = runtime(model, None)
    state = SequenceState.new(with_rings(rt.make_cache(), 4))
    state.reserve(256)
    for _ in range(3):
        rt.model(mx.zeros((1, chunk), mx.int32), cache=state.caches)
        state.advance(chunk)
    held = {id(a): a for a in state.live()}
    for cache in state.caches:
        for ring in (cache.latents, *(part.pending for part in cache.parts.values())):
            held |= {id(a): a for a in (ring.last.before, ring.last.rows)} if ring.last else {}
    assert sum(a.nbytes for a in held.values()) <= live_bytes(rt.layout, 256, chunk) + cycle_bytes(rt.layout, 4)


def test_state_is_as_long_as_a_window_of_an_entry(model, tmp_path):
    """However long the prompt: linear bytes, and no more for longer rings."""
    rt = runtime(model, None)
    by_kind = {(m.path, m.kind): m for m in rt.layout.members}
    pending = by_kind[(0, 1), "pending"].tensors[0]
    assert pending.shape[:3] == (1, 1, 8)
    entries = by_kind[(1, 2), "entries"].tensors[0]
    assert (entries.per, entries.sized(5, 12)[2], entries.sized(3, 12)[2]) == (16, 1, 0)
    caches = with_rings(rt.make_cache(), 20)
    rt.model(mx.zeros((1, 100), mx.int32), cache=caches)
    for cache in caches:
        for member in cache.members((0,)):
            if member.kind == "pending":
                assert member.arrays()["pending"].shape[2] == member.geometry.window


@pytest.mark.parametrize("make", [KVCache, lambda: CacheList(KVCache(), KVCache())])
def test_files_of_mlx_lm_are_refused(model, tmp_path, make):
    """They never hold this state, whatever their layers are called."""
    caches = [make() for _ in RATIOS]
    for cache in caches:
        for inner in getattr(cache, "caches", [cache]):
            inner.update_and_fetch(mx.zeros((1, 1, 6, 32)), mx.zeros((1, 1, 6, 32)))
    save_prompt_cache(str(tmp_path / "old.safetensors"), caches)
    rt = runtime(model, tmp_path / "c")
    code, detail = refusal(imported(rt, tmp_path / "old.safetensors", tiny.ids(6)))
    assert code == "LAYOUT" and "latents" in detail
    rt.store.close()
