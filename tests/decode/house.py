"""A small model, a batch with a row in each slot, and steps over it."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

from mlxkv.cache.batch import Batch
from mlxkv.cache.layout import probe
from mlxkv.decode.pool import Pool
from mlxkv.decode.runtime import open_runtime  # noqa: F401 - prepares numerics before a model is built
from mlxkv.decode.step import Compile, Steps
from mlxkv.decode.tracking import Track
from mlxkv.models.journal import scan
from mlxkv.models.spans import Spans
from tests import tiny
from tests.cache.batch.schedules import Twin, apart


class Small:
    """Attention without positions beside a state that decays: few operations, each kernel of a compiled step takes a
    second to build. Real architectures are compiled in the soak."""

    def __init__(self) -> None:
        self.table = mx.random.normal((tiny.VOCAB, 32), key=mx.random.key(0))
        self.spans = Spans()

    def __call__(self, tokens, cache):
        x = self.table[tokens]
        mask = cache[0].make_mask(tokens.shape[1], return_array=True, window_size=None)
        queries = x[:, None]
        keys, values = cache[0].update_and_fetch(queries, queries)
        out = scaled_dot_product_attention(queries, keys, values, cache[0], 0.2, mask)[:, 0]
        if self.spans.ask(x, None, cache[1]):
            sums = self.spans.run(cache[1], (0,), lambda x: self._sums(x, cache[1]), self._record(cache[1]), x)
        else:
            sums = self._sums(x, cache[1])
        return (out + sums) @ self.table.T

    def _sums(self, x, cache):
        total = cache[0] if cache[0] is not None else mx.zeros_like(x[:, 0])
        sums = []
        for i in range(x.shape[1]):
            total = self._next(total, x[:, i : i + 1])
            sums.append(total)
        cache[0] = total
        return mx.stack(sums, axis=1)

    @staticmethod
    def _next(total, x):
        return 0.9 * (mx.zeros_like(x[:, 0]) if total is None else total) + x[:, 0]

    def _record(self, cache):
        def record(journal, x):
            journal.keep(cache, (0,), [cache[0], x], self._after, fresh=cache[0] is None)
            return self._sums(x, cache)

        return record

    def _after(self, kept, rows):
        before, x = kept
        return [scan(self._next, before, [x], rows)]

    def make_cache(self):
        return [KVCache(), ArraysCache(1)]


class House:
    """``twins`` by slot are what the rows are alone."""

    def __init__(self, model, *, slots=2, capacity=64, compile: Compile = "off", pool=2) -> None:
        self.model = model
        self.make = lambda: make_prompt_cache(model)
        self.live = probe(model, self.make)
        self.pool = Pool.of(self.live, pool)
        self.steps = Steps(model, compile=compile, journals=getattr(model, "spans", None))
        self.batch, self.twins = self.full(slots, capacity)

    def full(self, slots: int, capacity: int):
        batch = Batch(self.make, self.live, slots, capacity)
        twins = [Twin.start(self.model, self.make, tiny.ids(5 + 6 * s, s), 16, True) for s in range(slots)]
        for slot, twin in enumerate(twins):
            batch.join(slot, twin.copy(self.make))
        return batch, twins

    def ids(self) -> mx.array:
        return mx.array([t.token for t in self.twins], mx.int32)

    def run(self, captures=None) -> mx.array:
        track = Track.of(self.batch.slots, self.pool.dummy, captures)
        logits = self.steps.run(self.batch, self.ids(), track, self.pool)
        mx.eval(logits, self.batch.live(), self.pool.arrays)
        return logits

    def compare(self, logits: mx.array) -> float:
        return max(apart(logits[s], t.feed([t.token])) for s, t in enumerate(self.twins))

    # a cycle

    def drafted(self, width: int, seed: int = 0) -> list[list[int]]:
        """By slot, the token that is not processed yet and drafts of no merit."""
        return [[t.token, *tiny.ids(width - 1, 100 * seed + s)] for s, t in enumerate(self.twins)]

    def cycle(self, width: int, kept: list[int], captures=None, seed: int = 0) -> float:
        """Verify and commit; gives back how far rows, and states that were captured, are from single steps. captures:
        row -> (pool slot, position)."""
        ids = self.drafted(width, seed)
        logits = self.steps.verify(self.batch, mx.array(ids, mx.int32), self.pool)
        mx.eval(logits, self.batch.live())
        track = Track.of(self.batch.slots, self.pool.dummy, captures) if captures is not None else None
        self.steps.commit(self.batch, kept, track, self.pool)
        mx.eval(self.batch.live(), self.pool.arrays)
        worst = 0.0
        for s, twin in enumerate(self.twins):
            for i in range(kept[s]):
                worst = max(worst, apart(logits[s, i], twin.feed([ids[s][i]])))
                into, position = (captures or {}).get(s, (0, 0))
                if position == twin.state.position:
                    pairs = zip(self.pool.arrays, recurrent(twin.state), strict=True)
                    worst = max(worst, *(apart(pooled[into : into + 1], state) for pooled, state in pairs))
        return max(worst, *(self.state(s) for s in range(len(self.twins))))

    def state(self, slot: int) -> float:
        """How far the row's recurrent state is from its twin's."""
        mine = [a for m in self.batch.row(slot).members if m.record == "state" for a in m.arrays().values()]
        return max(apart(a, b) for a, b in zip(mine, recurrent(self.twins[slot].state), strict=True))


def recurrent(state) -> list[mx.array]:
    return [a for m in state.members or () if m.record == "state" for a in m.arrays().values()]
