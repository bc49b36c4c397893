"""Rows of a batch with windows: drafts in spare columns, whatever each row keeps of them, and around the wrap."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from mlxkv.cache import ring
from mlxkv.cache.batch import Batch, BatchError
from mlxkv.cache.layout import probe
from mlxkv.cache.ring import RingKVCache, spare_bytes, with_rings
from mlxkv.decode.step import Steps
from tests import tiny
from tests.cache.batch.schedules import FAST, Schedule, Twin, apart, tolerance


def scheduled(arch: str, seed: int, window: int, **options) -> Schedule:
    model, _ = tiny.build(arch, sliding_window=window)
    return Schedule(model, lambda: with_rings(make_prompt_cache(model), 8), seed, drafts=8, **options)


@pytest.mark.parametrize("window", [8, 40, 100])
def test_rows_around_the_wrap(window):
    """Windows that all rows have gone past, some have, and none can: the last has no spare columns."""
    schedule = scheduled("gemma3_text", window, window)
    assert schedule.run(24) <= tolerance(), schedule.moves
    assert schedule.moves["cycle"] > 3


def test_with_sinks():
    assert scheduled("gpt_oss", 3, 8).run(16) <= tolerance()


def test_windows_that_keep_their_first_rows():
    model, _ = tiny.build("llama")
    make = lambda: with_rings([RotatingKVCache(12, keep=3) for _ in range(2)], 8)  # noqa: E731
    schedule = Schedule(model, make, 5, drafts=8)
    assert schedule.run(24) <= tolerance(), schedule.moves


def test_in_place(monkeypatch):
    """Where no bits are promised attention reads drafts where they stand, behind the ring."""
    monkeypatch.setattr(ring, "in_order", lambda: False)
    schedule = scheduled("gemma3_text", 6, 8)
    assert schedule.run(16) <= FAST, schedule.moves


class Small:
    """Attention over a window, without positions: few kernels to build."""

    table = mx.random.normal((tiny.VOCAB, 32), key=mx.random.key(0))

    def __call__(self, tokens, cache):
        x = self.table[tokens][:, None]
        mask = cache[0].make_mask(tokens.shape[1], window_size=8)
        keys, values = cache[0].update_and_fetch(x, x)
        return scaled_dot_product_attention(x, keys, values, cache[0], 0.2, mask)[:, 0] @ self.table.T


def test_compiled():
    """One trace of each kind serves every step before, across and after the wrap: nothing of a row is frozen in it."""
    model, make = Small(), lambda: [RingKVCache(8, 0, 3)]
    batch, steps = Batch(make, probe(model, make), 2, 64, spare=3), Steps(model, compile="on")
    twins = [Twin.start(model, make, tiny.ids(n), 16, True) for n in (3, 11)]
    for slot, twin in enumerate(twins):
        batch.join(slot, twin.copy(make))
    for i, kept in enumerate(([3, 1], [2, 4], [4, 4], [1, 1], [4, 2])):
        ids = [[twin.token, *tiny.ids(3, 10 * i + slot)] for slot, twin in enumerate(twins)]
        logits = steps.verify(batch, mx.array(ids, mx.int32))
        mx.eval(logits, batch.live())
        steps.commit(batch, kept)
        mx.eval(batch.live())
        for slot, twin in enumerate(twins):
            worst = max(apart(logits[slot, j], twin.feed([ids[slot][j]])) for j in range(kept[slot]))
            assert worst <= tolerance(), (i, slot)
    assert steps.traces == 2


def test_more_drafts_than_spare_columns_are_refused():
    model, _ = tiny.build("gemma3_text")
    make = lambda: with_rings(make_prompt_cache(model), 2)  # noqa: E731
    live = probe(model, make)
    batch, without = Batch(make, live, 2, 48, spare=2), Batch(make, live, 2, 48)
    twin = Twin.start(model, make, tiny.ids(11), 11, False)
    for each in (batch, without):
        each.join(0, twin.copy(make))
        before = [mx.array(a) for a in each.arrays()]
        held = each.hold()
        drafts = 3 if each is batch else 1
        with pytest.raises(BatchError, match=f"{drafts - 1} spare, cannot take {drafts} drafts back"):
            Steps(model, compile="off").verify(each, mx.zeros((2, drafts + 1), mx.int32))
        each.put_back(held)
        assert all(mx.array_equal(a, b).item() for a, b in zip(before, each.arrays(), strict=True))
    rows = without.nbytes
    assert rows < batch.nbytes <= rows + 2 * spare_bytes(live, 2)
