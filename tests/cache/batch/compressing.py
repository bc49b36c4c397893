"""A small model of compressed attention for tests of batches: few kernels to build, every kind of layer."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

from mlxkv.cache.compressed import CompressedCache
from tests import tiny

WIDTH = 16
#: window of raw rows; ratio and overlap of each layer, and whether it has an index
WINDOW = 6
LAYERS = ((0, False, False), (4, True, True), (8, False, False))
#: entries that a query reads where an index chooses them
TOP = 3


def noise(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(math.prod(shape))) / math.sqrt(shape[0])


class Compressing:
    """Attention over the last rows and over entries, some chosen by an index, one after the other; no positions but
    those that entries tell."""

    def __init__(self, layers: tuple[tuple[int, bool, bool], ...] = LAYERS) -> None:
        self.layers, self.table = layers, noise(tiny.VOCAB, WIDTH) * 10
        self.raw = [noise(WIDTH, (4 if overlap else 2) * WIDTH) for _, overlap, _ in layers]

    def make_cache(self, spare: int = 0) -> list[Any]:
        return [
            CompressedCache(
                window=WINDOW, ratio=r, overlap=o, head_dim=WIDTH, index_dim=WIDTH if i else None, spare=spare
            )
            for r, o, i in self.layers
        ]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        x = self.table[tokens]
        for raw, (ratio, overlap, index), state in zip(self.raw, self.layers, cache, strict=True):
            x = x + self._layer(x, raw, ratio, overlap, index, state)
        return x @ self.table.T

    def _layer(self, x: mx.array, raw: mx.array, ratio: int, overlap: bool, index: bool, cache: Any) -> mx.array:
        offset = cache.offset
        start = offset[:, None] if isinstance(offset, mx.array) else mx.array([[offset]])
        at = start + mx.arange(x.shape[1])
        seen = cache.update_window(x)
        keys, mask = gathered(seen.rows, seen.index), seen.mask
        if ratio:
            entries = cache.compress("kv", x @ raw, self._pool(overlap))
            number = mx.arange(entries.shape[1])
            closed = number < ((at + 1) // ratio)[..., None]
            if index:
                closed = closed & self._chosen(x, cache.compress("index", x @ raw, self._pool(overlap)), closed)
            all_of_them = mx.broadcast_to(entries[:, None], (*x.shape[:2], *entries.shape[1:]))
            keys = mx.concatenate([keys, all_of_them], axis=2)
            mask = mx.concatenate([mx.broadcast_to(mask, (*x.shape[:2], WINDOW)), closed], axis=2)
        scores = mx.where(mask, (keys * x[:, :, None]).sum(axis=-1), -1e30)
        weights = mx.where(mask, mx.softmax(scores, axis=-1), 0)[..., None]
        # one entry after the other: zeros at the end change no bits
        return mx.cumsum(mx.where(mask[..., None], keys, 0) * weights, axis=2)[:, :, -1]

    @staticmethod
    def _chosen(x: mx.array, keys: mx.array, closed: mx.array) -> mx.array:
        scores = mx.where(closed, x @ keys.swapaxes(1, 2), -mx.inf)
        rank = mx.argsort(mx.argsort(-scores, axis=-1), axis=-1)
        return rank < TOP

    @staticmethod
    def _pool(overlap: bool) -> Any:
        def pool(windows: mx.array, first: mx.array, there: mx.array) -> mx.array:
            half = windows.shape[3] // 2
            kv, score = windows[..., :half], mx.where(there[..., None], windows[..., half:], -1e30)
            if overlap:
                early = mx.arange(windows.shape[2])[:, None] < windows.shape[2] // 2
                kv = mx.where(early, kv[..., :WIDTH], kv[..., WIDTH:])
                score = mx.where(early, score[..., :WIDTH], score[..., WIDTH:])
            made = (mx.softmax(score, axis=2) * kv).sum(axis=2)
            return made + mx.sin(first.astype(mx.float32))[..., None]

        return pool


def gathered(rows: mx.array, index: mx.array) -> mx.array:
    """rows [B, K, d] at index [B, S, n]: [B, S, n, d]."""
    flat = index.reshape(index.shape[0], -1, 1)
    taken = mx.take_along_axis(rows, mx.broadcast_to(flat, (*flat.shape[:2], rows.shape[2])), axis=1)
    return taken.reshape(*index.shape, rows.shape[2])
