"""Stand-ins for models: real caches whose every row and state is a hash of the tokens that led to it.

No forward is run, so that a test can store and restore thousands of times; and what is right at any position follows
from the tokens alone, so that no run has to be remembered. ``ask`` drives the store as ``decode/generation.py`` does.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlxkv.cache.head import HeadCache
from mlxkv.cache.keys import Identity
from mlxkv.cache.layout import Layout, probe
from mlxkv.cache.lookup import REASONS, Lookup
from mlxkv.cache.record import Reader
from mlxkv.cache.state import SequenceState
from mlxkv.cache.store import PrefixStore

BLOCK = 4
HEADS, HIDDEN = 2, 3
WIDTH = {"keys": 4, "values": 6}


def _mixed(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: every bit of 64 depends on every other."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _values(hashes: np.ndarray, label: str, n: int) -> np.ndarray:
    """[len(hashes), n] float32 in [-1, 1): a function of each hash, the label and the place."""
    start = np.uint64(int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "little"))
    with np.errstate(over="ignore"):
        lanes = _mixed(start + np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        mixed = _mixed(hashes[:, None] + lanes[None])
    return ((mixed >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - np.float32(1)).astype(np.float32)


def _head_rows(tokens: mx.array, hidden: mx.array, kv: KVCache) -> None:
    """Row i of the head from hidden state i and token i + 1."""
    kv.update_and_fetch(*_head_values(np.array(tokens)[0], np.array(hidden)[0]))


def _head_values(tokens: np.ndarray, hidden: np.ndarray) -> tuple[mx.array, mx.array]:
    bits = np.ascontiguousarray(hidden, np.float32).view(np.uint32).astype(np.uint64)
    with np.errstate(over="ignore"):
        hashes = _mixed((bits * np.uint64(0x100000001B3) ** np.arange(1, HIDDEN + 1, dtype=np.uint64)).sum(axis=1))
        hashes = _mixed(hashes + tokens.astype(np.uint64))
    return _rows(hashes, "head.keys", "keys", mx.float32), _rows(hashes, "head.values", "values", mx.float32)


def _rows(hashes: np.ndarray, label: str, array: str, dtype: mx.Dtype, width: int = 0) -> mx.array:
    """[1, HEADS, len(hashes), width]"""
    width = width or WIDTH[array]
    plain = _values(hashes, label, HEADS * width).reshape(1, len(hashes), HEADS, width)
    return mx.array(np.ascontiguousarray(plain.transpose(0, 2, 1, 3))).astype(dtype)


@dataclass(frozen=True)
class Model:
    """``seed`` are its weights: twins differ in every value, not in their layout."""

    name: str
    make_cache: Callable[[], list[Any]]
    seed: int = 0
    dtype: mx.Dtype = mx.float32

    @cached_property
    def layout(self) -> Layout:
        seen: list[int] = []

        def run(ids: mx.array, cache: list[Any]) -> mx.array:
            a = len(seen)
            seen.extend(ids.tolist()[0])  # type: ignore[arg-type]
            self._feed(cache, seen, a, len(seen))
            return mx.zeros(1)

        return probe(run, self.make_cache)

    @cached_property
    def identity(self) -> Identity:
        weights = hashlib.sha256(f"{self.name} {self.seed}".encode()).digest()
        return Identity(weights, (("dtype", str(self.dtype)),), self.layout.digest, f"{self.name}-{self.seed}")

    def open(self, folder: Path, *, block: int = BLOCK, **options: Any) -> PrefixStore:
        return PrefixStore(folder, self.identity, self.layout, block=block, **options)

    def feed(self, state: SequenceState, tokens: Sequence[int], n: int) -> None:
        """A forward over the next ``n`` tokens."""
        a = state.position
        self._feed(state.caches, tokens, a, a + n)
        state.advance(n)

    def _hashes(self, tokens: Sequence[int]) -> np.ndarray:
        """One a token: of all tokens up to it."""
        h, out = hashlib.blake2b(f"{self.name} {self.seed}".encode(), digest_size=8), []
        for token in tokens:
            h.update(token.to_bytes(4, "little"))
            out.append(int.from_bytes(h.digest(), "little"))
        return np.array(out, np.uint64)

    def _slot(self, last: np.ndarray, label: str, i: int) -> mx.array:
        return mx.array(_values(last, f"{label}.slot{i}", 5 + i).reshape(1, 1, 5 + i))

    def _feed(self, caches: list[Any], tokens: Sequence[int], a: int, b: int) -> None:
        hashes = self._hashes(tokens[:b])[a:]
        for label, cache in _leaves(caches):
            if isinstance(cache, ChunkedKVCache):
                cache.maybe_trim_front()
            if isinstance(cache, QuantizedKVCache):
                width = cache.group_size
                cache.update_and_fetch(*(_rows(hashes, f"{label}.{n}", n, self.dtype, width) for n in WIDTH))
            elif isinstance(cache, (KVCache, RotatingKVCache, ChunkedKVCache, ConcatenateKVCache)):
                cache.update_and_fetch(*(_rows(hashes, f"{label}.{n}", n, self.dtype) for n in WIDTH))
            elif isinstance(cache, ArraysCache):
                for i in range(len(cache.cache)):
                    cache[i] = self._slot(hashes[-1:], label, i)
            else:
                cache.observe(
                    mx.array([list(tokens[a:b])], mx.int32), mx.array(_values(hashes, "hidden", HIDDEN)[None])
                )

    def wrong(self, state: SequenceState, tokens: Sequence[int]) -> list[str]:
        """What differs in any bit from the right state after ``tokens``; empty if nothing does."""
        p = len(tokens)
        hashes = self._hashes(tokens)
        bad = [] if state.position == p else [f"the sequence stands at {state.position}, not {p}"]

        def same(label: str, got: mx.array | None, want: mx.array) -> None:
            if got is None or got.dtype != want.dtype or got.shape != want.shape or _bits(got) != _bits(want):
                bad.append(f"{label} at {p}")

        for label, cache in _leaves(state.caches):
            if isinstance(cache, ArraysCache):
                for i, got in enumerate(cache.cache):
                    same(f"{label}.slot{i}", got, self._slot(hashes[-1:], label, i))
            elif isinstance(cache, HeadCache):
                hidden = _values(hashes, "hidden", HIDDEN)
                rows = _head_values(np.array(tokens[1:]), hidden[:-1])
                if (cache.seen, cache.kv.offset) != (p, p - 1):
                    bad.append(f"{label}: the head stands at {cache.seen} with {cache.kv.offset} rows")
                for name, want in zip(WIDTH, rows, strict=True):
                    got = getattr(cache.kv, name)
                    if p > 1:
                        same(f"{label}.{name}", None if got is None else got[..., : p - 1, :], want)
                same(f"{label}.hidden", cache.hidden[-1], mx.array(hidden[None, -1:]))
            elif isinstance(cache, QuantizedKVCache):
                if cache.offset != p:
                    bad.append(f"{label} stands at {cache.offset}, not {p}")
                for name in WIDTH:
                    plain = _rows(hashes, f"{label}.{name}", name, self.dtype, cache.group_size)
                    quantised = mx.quantize(plain, group_size=cache.group_size, bits=cache.bits)
                    for i, want in enumerate(quantised):
                        got = getattr(cache, name)
                        same(f"{label}.{name}.{i}", None if got is None else got[i][..., :p, :], want)
            else:
                if cache.offset != p:
                    bad.append(f"{label} stands at {cache.offset}, not {p}")
                first = 0
                if isinstance(cache, ChunkedKVCache):
                    first = cache.start_position
                    if first > (whole := p // cache.chunk_size * cache.chunk_size):
                        bad.append(f"{label} has rows from {first} on, not from {whole}")
                    if first == p:
                        continue  # its next token begins a chunk
                for name in WIDTH:
                    want, got = _rows(hashes, f"{label}.{name}", name, self.dtype), getattr(cache, name)
                    if isinstance(cache, RotatingKVCache):
                        if p > cache.max_size:
                            tail = want[..., p - cache.max_size + cache.keep :, :]
                            want = mx.concatenate([want[..., : cache.keep, :], tail], axis=2)
                        got = None if got is None else cache._temporal_order(got)
                    elif got is not None:
                        got, want = got[..., : p - first, :], want[..., first:, :]
                    same(f"{label}.{name}", got, want)
        return bad


def _bits(array: mx.array) -> bytes:
    return np.array(array.view(mx.uint8)).tobytes()


def _leaves(caches: list[Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for i, cache in enumerate(caches):
        if isinstance(cache, CacheList):
            yield from _leaves(list(cache.caches), f"{path}{i}.")
        else:
            yield f"{path}{i}", cache


MODELS = {
    m.name: m
    for m in (
        Model("growing", lambda: [KVCache(), KVCache()]),
        Model("window", lambda: [RotatingKVCache(6), KVCache(), RotatingKVCache(9)]),
        Model("kept", lambda: [RotatingKVCache(7, keep=2), RotatingKVCache(7, keep=2)]),
        Model("chunked", lambda: [ChunkedKVCache(6), KVCache(), ChunkedKVCache(9)]),
        Model("quantised", lambda: [QuantizedKVCache(group_size=32, bits=4), ArraysCache(1), ConcatenateKVCache()]),
        Model("recurrent", lambda: [ArraysCache(2), ArraysCache(1)]),
        Model("mixed", lambda: [ArraysCache(2), KVCache(), RotatingKVCache(5), ArraysCache(1)], dtype=mx.bfloat16),
        Model("list", lambda: [CacheList(ArraysCache(2), KVCache()), CacheList(RotatingKVCache(6), KVCache())]),
        Model("head", lambda: [ArraysCache(2), KVCache(), HeadCache(_head_rows)]),
    )
}


def twin(model: Model) -> Model:
    """Other weights, the same layout."""
    return Model(model.name, model.make_cache, model.seed + 1, model.dtype)


class WrongHit(AssertionError):
    """What must never happen."""


def ask(
    model: Model,
    store: PrefixStore,
    tokens: Sequence[int],
    *,
    ends: Sequence[int] = (),
    more: Sequence[int] = (1,),
    chunk: int = 7,
    keep: bool = True,
    salt: str = "",
    capacity: int = 16,
    lying: bool = False,
    messages: bool = False,
) -> Lookup:
    """One request: look up, restore, prefill to ``ends`` and n−1, "sample" ``more`` (at least one token), record.
    ``messages``: the ends are those of messages, whose states stay when the conversation goes on.

    Raises WrongHit if any bit of what was restored is not right, or a remembered answer (but in an index that may be
    ``lying``: it is a hint, and who asks for an answer compares its text).
    """
    n, sequence = len(tokens), list(tokens)

    def fresh() -> SequenceState:
        state = SequenceState.new(model.make_cache())
        state.reserve(capacity)
        return state

    text = " ".join(map(str, more))
    if (ids := store.answer_ids(sequence, text, salt)) not in (None, list(more)) and not lying:
        raise WrongHit(f"{model.name}: the answer {text} to {sequence} is said to be {ids}")
    plan = store.lookup(sequence, salt)
    state, lookup, plan = store.restore(plan, sequence, fresh, capacity, salt)
    if lookup.tokens and (bad := model.wrong(state, sequence[: lookup.tokens])):
        raise WrongHit(f"{model.name}: {sequence[: lookup.tokens]} restored from {store.folder.path}: {bad}")
    assert state.position == lookup.tokens <= n - 1
    assert (lookup.reason is None) == (lookup.tokens == n - 1) and lookup.reason in (None, *REASONS)
    if not keep:
        return lookup
    roles = dict.fromkeys(ends, "message") if messages else None
    recorder = store.recorder(state, sequence, plan, lambda: mx.synchronize(), salt, roles=roles)
    for edge in [n - 1] if model.layout.growing_only else sorted({e for e in ends if 0 < e < n - 1} | {n - 1}):
        while state.position < edge:
            model.feed(state, sequence, min(edge - state.position, chunk))
            mx.eval(state.live())
            recorder.flush()
            if state.position == edge:
                recorder.boundary()
                state.settle()
                mx.eval(state.live())
            recorder.commit()
    model.feed(state, sequence, 1)
    flushed = state.position
    for token in more[:-1]:
        if recorder.reach and state.position - flushed >= recorder.reach - 1:
            mx.eval(state.live())
            recorder.flush()
            recorder.commit()
            flushed = state.position
        sequence.append(token)
        model.feed(state, sequence, 1)
    held = state.hold()
    model.feed(state, [*sequence, more[-1]], 1)  # a step that was built ahead and is dropped
    state.put_back(held)
    mx.eval(state.live())
    recorder.boundary((n, text, more[-1]))
    recorder.commit(everything=True)
    return lookup


def verify(folder: Path, store: PrefixStore) -> None:
    """Every record is whole, and the index names what is there and nothing else."""
    names = {}
    for path in sorted((folder / "records").rglob("*.safetensors")):
        with Reader.open(path) as reader:
            for name in reader.tensors:
                reader.read(name)
            names[reader.meta.key, reader.meta.kind] = path.stat().st_size
            assert path == store.folder.file(reader.meta.key, reader.meta.kind)
    assert store.index.names() == names
    assert not list((folder / "tmp").iterdir())


def unevaluated(arrays: list[mx.array]) -> list[str]:
    """Operations that are still to be done for these."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return re.findall(r'label ="(\w+)"', graph.getvalue())
