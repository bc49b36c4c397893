"""The state of compressed attention: bits do not depend on how a prompt was cut."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest

from mlxkv.cache.compressed import CompressedCache


def pool(windows, first, there):
    d = windows.shape[-1] // 4
    kv = mx.concatenate([windows[:, :, :4, :d], windows[:, :, 4:, d : 2 * d]], axis=2)
    score = mx.concatenate([windows[:, :, :4, 2 * d : 3 * d], windows[:, :, 4:, 3 * d :]], axis=2)
    weights = mx.softmax(mx.where(there[..., None], score, -1e30), axis=2)
    return mx.sum(weights * kv, axis=2) + first[..., None]


def test_entries_of_the_specification():
    cache = CompressedCache(window=8, ratio=4, overlap=True, head_dim=1)
    rows = mx.array([[[p, 10 + p, 0, 0] for p in range(12)]], mx.float32)
    entries = cache.compress("kv", rows, lambda *a: pool(*a) - a[1][..., None])
    np.testing.assert_allclose(np.array(entries)[0, :, 0], [11.5, 8.5, 12.5], rtol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_cuts_do_not_matter(seed):
    rng = random.Random(seed)
    tokens = mx.random.normal((1, 75, 32))
    raw = mx.random.normal((1, 75, 8))
    whole = CompressedCache(window=8, ratio=4, overlap=True, head_dim=8)
    seen = whole.update_window(raw)
    rows = np.array(seen.rows)[0][np.array(seen.index)[0]]
    entries = whole.compress("kv", tokens, pool)
    cut = CompressedCache(window=8, ratio=4, overlap=True, head_dim=8)
    at = 0
    while at < 75:
        n = min(75 - at, rng.choice([1, 2, 3, 7, 30]))
        part = cut.update_window(raw[:, at : at + n])
        mask = np.array(part.mask)[0]
        assert np.array_equal(np.array(seen.mask)[0, at : at + n], mask)
        assert np.array_equal(np.array(part.rows)[0][np.array(part.index)[0]][mask], rows[at : at + n][mask])
        cut.compress("kv", tokens[:, at : at + n], pool)
        at += n
    assert mx.array_equal(cut.entries("kv"), entries)
    assert mx.array_equal(cut.latents.read(68, 75), whole.latents.read(68, 75))
    assert mx.array_equal(cut.parts["kv"].pending.read(68, 75), whole.parts["kv"].pending.read(68, 75))
