"""A sequence without a model: real cache objects filled with random arrays, for benchmarks of the store alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache

from mlxkv.cache.keys import Identity
from mlxkv.cache.layout import Layout, probe
from mlxkv.cache.state import SequenceState
from mlxkv.cache.store import PrefixStore


@dataclass
class Shape:
    """``layers`` of keys and values [1, heads, n, width], and ``states`` recurrent arrays [1, state_size]."""

    layers: int = 8
    heads: int = 8
    width: int = 128
    dtype: mx.Dtype = mx.bfloat16
    states: int = 0
    state_size: int = 1 << 16
    _chunks: dict[int, mx.array] = field(default_factory=dict)

    def row_bytes(self) -> int:
        """Of one token."""
        return 2 * self.layers * self.heads * self.width * self.dtype.size

    def make_cache(self) -> list[Any]:
        return [KVCache() for _ in range(self.layers)] + [ArraysCache(size=1) for _ in range(self.states)]

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        n = ids.shape[1]
        if n not in self._chunks:
            self._chunks[n] = mx.random.normal((1, self.heads, n, self.width)).astype(self.dtype)
            mx.eval(self._chunks[n])
        for layer in cache:
            if isinstance(layer, KVCache):
                layer.update_and_fetch(self._chunks[n], self._chunks[n])
            else:
                layer[0] = mx.random.normal((1, self.state_size))
        return mx.zeros((1, n, 8))

    def layout(self) -> Layout:
        return probe(self, self.make_cache)

    def open(self, folder: Path, **options: Any) -> PrefixStore:
        layout = self.layout()
        return PrefixStore(
            folder, Identity(b"s" * 32, (("dtype", "any"),), layout.digest, "synthetic"), layout, **options
        )

    def fresh(self, capacity: int) -> SequenceState:
        state = SequenceState.new(self.make_cache())
        state.reserve(capacity)
        return state

    def extend(
        self,
        store: PrefixStore | None,
        tokens: list[int],
        boundaries: list[int],
        chunk: int = 2048,
    ) -> None:
        """Look up, restore, run over ``tokens`` in chunks and record what a request would record."""
        state, recorder = self.fresh(len(tokens)), None
        if store is not None:
            state, _, plan = store.restore(store.lookup(tokens), tokens, lambda: self.fresh(len(tokens)), len(tokens))
            recorder = store.recorder(state, tokens, plan, mx.synchronize)
        for edge in sorted({b for b in boundaries if state.position < b < len(tokens)} | {len(tokens)}):
            while state.position < edge:
                n = min(edge - state.position, chunk)
                self(mx.array([tokens[state.position : state.position + n]]), state.caches)
                state.advance(n)
                mx.eval(state.live())
                if recorder is not None:
                    recorder.flush()
                    if state.position == edge:
                        recorder.boundary()
                    recorder.commit()
        if recorder is not None:
            recorder.commit(everything=True)


def wait_written(store: PrefixStore) -> None:
    """Until everything that was handed over is durable."""
    if not store.writer.flush(600):
        raise SystemExit("the store did not write everything within ten minutes")
