"""Cold runs whose caches are caught as numpy arrays: what the writer of legacy folders is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from tests.cache import synthetic

from .omlx_writer import KV, Layer, Listed, Ring, Slots, Story


def story(model: Any, tokens: list[int], stops: Iterable[int], *, chunk: int = 1 << 20) -> Story:
    """A run of a real model in mlx-lm's own caches, cut at ``stops`` and every ``chunk`` tokens."""
    return _run(
        make_prompt_cache(model), tokens, stops, chunk, lambda c, a, b: model(mx.array(tokens[a:b])[None], cache=c)
    )


def hashed(model: synthetic.Model, tokens: list[int], stops: Iterable[int], *, chunk: int = 1 << 20) -> Story:
    """The same of a stand-in whose every value is a hash of the tokens up to it."""
    return _run(model.make_cache(), tokens, stops, chunk, lambda c, a, b: model._feed(c, tokens, a, b))


def _run(
    caches: list[Any],
    tokens: list[int],
    stops: Iterable[int],
    chunk: int,
    forward: Callable[[list[Any], int, int], Any],
) -> Story:
    at, made = 0, {}
    for stop in sorted(stops):
        while at < stop:
            end = min(stop, at + chunk)
            forward(caches, at, end)
            at = end
        made[stop] = [_picture(c) for c in caches]
    return Story(tokens, made)


def _picture(cache: Any) -> Layer:
    if isinstance(cache, CacheList):
        return Listed(tuple(_picture(c) for c in cache.caches))  # type: ignore[arg-type]
    if isinstance(cache, ArraysCache):
        return Slots(tuple(None if a is None else _host(a) for a in cache.cache))
    if isinstance(cache, RotatingKVCache):
        return _ring(cache)
    assert type(cache) is KVCache
    return KV(_host(cache.keys[:, :, : cache.offset]), _host(cache.values[:, :, : cache.offset]))


def _ring(cache: RotatingKVCache) -> Ring:
    """At most ``max_size`` rows: the last rows of a long chunk, in order; else the buffer as it stands."""
    keep, size = cache.keep, cache.max_size
    keys, values, index = _host(cache.keys), _host(cache.values), cache._idx
    if keys.shape[2] > size:
        first = keys.shape[2] - (size - keep)
        keys, values = (np.concatenate([v[:, :, :keep], v[:, :, first:]], axis=2) for v in (keys, values))
        index = size
    elif cache.offset < keys.shape[2]:
        keys, values = keys[:, :, : cache.offset], values[:, :, : cache.offset]
    return Ring(keys, values, keep, size, cache.offset, index)


def _host(array: mx.array) -> np.ndarray:
    """A copy; bfloat16 as uint16."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
