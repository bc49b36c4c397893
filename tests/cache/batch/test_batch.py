"""Rows of a batch: whatever joins, leaves and moves beside them, each is what it would be alone."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlxkv.cache.batch import Batch, BatchError, NoBatchForm, NotYet
from mlxkv.cache.batch import head as head_module
from mlxkv.cache.layout import probe
from mlxkv.decode.runtime import open_runtime  # noqa: F401 - prepares numerics before a model is built
from tests import headed, tiny
from tests.cache.batch.schedules import Schedule, Twin, holds, tolerance
from tests.cache.test_kinds import CACHES, Remembering
from tests.probe import runtime


@pytest.mark.parametrize("arch", tiny.ARCHS)
def test_each_row_is_as_it_is_alone(arch):
    schedule = holds(arch, seed=1, moves=18)
    assert {"step", "join", "leave", "take", "resize"} <= set(schedule.moves)


@pytest.mark.parametrize("arch", ["recurrent_gemma", "baichuan_m1", "longcat_flash_ngram", "gemma3n"])
def test_windows_alone_lists_of_caches_slots_that_fill_and_shared_rows(arch):
    holds(arch, seed=3, moves=12)


@pytest.mark.parametrize("name", CACHES)
def test_every_cache_class_of_a_llama(name):
    model, _ = tiny.build("llama")
    schedule = Schedule(model, CACHES[name], seed=2)
    assert schedule.run(18) <= tolerance(), schedule.moves


def test_nested_lists_and_empty_slots():
    llama, _ = tiny.build("llama", sliding_window=12, layer_types=["sliding_attention", "full_attention"])
    schedule = Schedule(Remembering(llama), Remembering.make_cache, seed=4)
    assert schedule.run(18) <= tolerance(), schedule.moves


class Narrow:
    """One layer of attention without positions over ring rows, of which it asks for the last 7 of 12."""

    def __init__(self) -> None:
        self.table = mx.random.normal((tiny.VOCAB, 32), key=mx.random.key(0))

    def __call__(self, tokens, cache):
        x = self.table[tokens][:, None]
        mask = cache[0].make_mask(tokens.shape[1], window_size=7)
        keys, values = cache[0].update_and_fetch(x, x)
        out = scaled_dot_product_attention(x, keys, values, cache[0], 0.2, mask)
        return out[:, 0] @ self.table.T


@pytest.mark.parametrize("keep", [0, 3])
def test_a_window_shorter_than_its_ring(keep):
    schedule = Schedule(Narrow(), lambda: [RotatingKVCache(12, keep=keep)], seed=5)
    assert schedule.run(40) <= tolerance(), schedule.moves
    assert max(t.state.position for t in schedule.twins.values()) > 12


@pytest.mark.parametrize("arch", ["gemma3_text", "qwen3_5"])
def test_nothing_of_an_earlier_row_is_seen_not_even_nan(arch):
    model, _ = tiny.build(arch)
    schedule = Schedule(model, lambda: make_prompt_cache(model), seed=6)
    schedule.join()
    batch = schedule.batch
    (slot,) = schedule.twins
    other = 1 - slot
    poison = [mx.array(a) for a in batch.arrays()]
    for a in poison:
        a[other] = float("nan")
    batch.bind(poison)
    schedule.step()  # a free slot full of NaN stands beside the row
    schedule.join()
    for _ in range(3):
        schedule.step()
    assert all(mx.isfinite(a).all().item() for a in batch.arrays())
    assert schedule.run(0) <= tolerance()


def test_a_slot_that_fills_later_joins_later():
    model, _ = tiny.build("longcat_flash_ngram")  # it remembers three ids

    def make():
        return make_prompt_cache(model)

    batch = Batch(make, probe(model, make), 1, 16)
    twin = Twin.start(model, make, [5, 6], 2, False)
    with pytest.raises(NotYet):
        batch.join(0, twin.copy(make))
    assert batch.rows == [] and batch.positions == [0]
    twin.feed([7])
    batch.join(0, twin.copy(make))
    assert batch.positions == [3]


def test_what_does_not_fit_is_refused_and_changes_nothing():
    model, _ = tiny.build("llama")

    def make():
        return make_prompt_cache(model)

    batch = Batch(make, probe(model, make), 2, 12)
    twin = Twin.start(model, make, tiny.ids(11), 11, False)
    batch.join(0, twin.copy(make))
    before = [mx.array(a) for a in batch.arrays()]
    with pytest.raises(BatchError, match="not free"):
        batch.join(0, twin.copy(make))
    with pytest.raises(BatchError, match="12 columns"):
        batch.join(1, Twin.start(model, make, tiny.ids(12), 12, False).state)
    with pytest.raises(BatchError, match="other shapes"):
        batch.join(1, Twin.start(*_wider(), tiny.ids(4), 4, False).state)
    with pytest.raises(BatchError, match="holds no row"):
        batch.leave(1)
    with pytest.raises(BatchError, match="do not fit"):
        batch.resize(1, 11, {0: 0})
    with pytest.raises(BatchError, match="cannot be kept"):
        batch.resize(3, 32, {0: 0, 1: 2})
    assert all(mx.array_equal(a, b).item() for a, b in zip(before, batch.arrays(), strict=True))
    batch.advance()
    with pytest.raises(BatchError, match="fill all 12 columns"):
        batch.where()
    assert batch.positions == [12, 0]


def _wider():
    model, _ = tiny.build("llama", head_dim=64)
    return model, lambda: make_prompt_cache(model)


def test_a_class_without_a_form_is_named_with_its_place():
    model, _ = tiny.build("llama4")

    def make():
        return make_prompt_cache(model)

    with pytest.raises(NoBatchForm, match="Layer 0 keeps its state in ChunkedKVCache"):
        Batch(make, probe(model, make), 2, 16)


def test_joining_and_resizing_hold_one_layer_twice_not_all():
    model, _ = tiny.build("llama", num_hidden_layers=8)

    def make():
        return make_prompt_cache(model)

    batch = Batch(make, probe(model, make), 4, 4096)
    twin = Twin.start(model, make, tiny.ids(9), 9, False)
    mx.eval(batch.arrays())
    layer = batch.nbytes // 8

    def peak(do) -> int:
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        do()
        mx.eval(batch.arrays())
        return mx.get_peak_memory() - before

    assert peak(lambda: batch.join(0, twin.state)) <= layer
    assert peak(lambda: batch.resize(4, 4096, {0: 3})) <= 2 * layer
    assert batch.nbytes == 8 * layer == 8 * 2 * 4 * 4096 * 32 * 4
    batch.resize(1, 1024, {3: 0})
    assert batch.nbytes == 8 * layer // 16 and isinstance(batch.take(0).caches[0], KVCache)


def test_a_head_beside_its_body(tmp_path):
    rt = runtime(headed.make(tmp_path / "m"), tmp_path / "c")
    assert rt.store is not None and rt.layout is not None and "head" in rt.layout.describe()
    rt.store.close()
    schedule = Schedule(rt.model, rt.make_cache, 7, rt.layout)
    assert schedule.run(24) <= tolerance(), schedule.moves


def test_a_head_that_nobody_asks_is_shown_its_steps_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(head_module, "MOST", 4)
    rt = runtime(headed.make(tmp_path / "m"), tmp_path / "c")
    assert rt.store is not None and rt.layout is not None
    rt.store.close()
    schedule = Schedule(rt.model, rt.make_cache, 8, rt.layout, capacity=96)
    schedule.join()
    schedule.join()
    for slot in schedule.twins:
        schedule.batch.row(slot).catch_up()  # one token and its hidden state wait
    for _ in range(24):
        schedule.step()
    # two arrays of each step that waits, two of each four steps that a head was shown
    assert len(schedule.batch.live()) - len(schedule.batch.arrays()) <= 2 * 4 + 2 * 2 * (1 + 24 // 4) < 2 * 24
    assert schedule.run(0) <= tolerance()
