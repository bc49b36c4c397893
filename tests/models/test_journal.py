"""A forward with a journal gives what plain steps give, and tells the state after each of its tokens."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from mlxkv import numerics
from mlxkv.models import fast, spans
from mlxkv.models.spans_layers import FORMS
from tests import tiny

ARCHS = (
    "qwen3_5", "qwen3_next", "kimi_linear",
    "falcon_h1", "nemotron_h", "granitemoehybrid", "mamba2", "plamo2",
    "lfm2", "lfm2_moe",
)  # fmt: skip
EXACT = numerics.mode() == "exact" and numerics.current().device == "cpu"
#: largest difference / largest value; products of several rows sum in another order than those of one: 2.7e-6
BOUND = 0.0 if EXACT else 2e-5
FAST = 2e-5


@pytest.fixture(scope="module", params=ARCHS)
def layer(request):
    """mlx-lm's own recurrent layer of a tiny model, the same with a journal, what announces one, how many slots."""
    plain, mine = tiny.build(request.param)[0], tiny.build(request.param)[0]
    shared, done = spans.install(mine)
    assert done
    mine.eval()
    name = next(name for name, each in plain.named_modules() if type(each) in FORMS)
    own, ours = dict(plain.named_modules())[name], dict(mine.named_modules())[name]
    slots = len(next(c for c in walk(make_prompt_cache(plain)) if type(c) is ArraysCache).cache)
    return own, ours, shared, slots


def walk(caches):
    for cache in caches:
        yield from walk(cache.caches) if isinstance(cache, CacheList) else [cache]


def call(layer, x, cache):
    return layer(x, mask=None, cache=cache)


def inputs(rows, tokens, seed):
    return mx.random.normal((rows, tokens, 64), key=mx.random.key(seed))


def begun(layer, slots, rows, tokens, seed):
    """A cache that stands ``tokens`` tokens into a sequence (rows of different ones), read one by one."""
    cache, x = ArraysCache(slots), inputs(rows, tokens, seed)
    for t in range(tokens):
        call(layer, x[:, t : t + 1], cache)
        mx.eval([a for a in cache.cache if a is not None])
    return cache


def other(cache):
    """The same state in another cache object."""
    made = ArraysCache(len(cache.cache))
    made.cache = list(cache.cache)
    return made


def steps(layer, x, cache):
    """Plain steps of one token: (outputs, the slots after 0, 1, ... of them)."""
    out, states = [], [list(cache.cache)]
    for t in range(x.shape[1]):
        out.append(call(layer, x[:, t : t + 1], cache))
        mx.eval(out[-1], [a for a in cache.cache if a is not None])
        states.append(list(cache.cache))
    return mx.concatenate(out, axis=1), states


def verify(layer, shared, x, cache):
    with shared.recording(x.shape[1]) as journal:
        out = call(layer, x, cache)
    assert journal.covers(cache)
    return out, journal


def far(a, b):
    assert a.shape == b.shape and a.dtype == b.dtype
    a, b = (np.array(x.astype(mx.float32)) for x in (a, b))
    return float(np.abs(a - b).max() / max(float(np.abs(b).max()), 1e-30))


def same(found, slots):
    """Whether a journal's answer is these slots."""
    there = {i: a for i, a in enumerate(slots) if a is not None}
    return found.keys() == there.keys() and all(far(found[i], a) <= BOUND for i, a in there.items())


@pytest.mark.parametrize("before", [0, 1, 6])
@pytest.mark.parametrize("width", range(1, 10))
def test_outputs_and_states_are_those_of_plain_steps(layer, width, before):
    own, ours, shared, slots = layer
    start = begun(own, slots, 1, before, 1)
    x = inputs(1, width, 2)
    theirs, states = steps(own, x, other(start))
    cache = other(start)
    out, journal = verify(ours, shared, x, cache)
    assert far(out, theirs) <= BOUND
    for rows in range(width + 1):
        assert same(journal.slots(cache, rows), states[rows]), rows


@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("width", [1, 2, 4, 9])
def test_rows_of_a_batch_keep_different_numbers(layer, width, before):
    own, ours, shared, slots = layer
    start = begun(own, slots, 3, before, 3)
    x = inputs(3, width, 4)
    theirs, states = steps(own, x, other(start))
    cache = other(start)
    out, journal = verify(ours, shared, x, cache)
    assert far(out, theirs) <= BOUND
    last = states[-1]
    for kept in ([0, width, width // 2], [1, 1, 1], [width] * 3):
        found = journal.slots_by_row(cache, mx.array(kept, mx.int32))
        assert found.keys() == {i for i, a in enumerate(last) if a is not None}
        for i, array in found.items():
            for row, n in enumerate(kept):
                at = states[n][i] if states[n][i] is not None else mx.zeros_like(last[i])
                assert far(array[row], at[row]) <= BOUND, (kept, row, i)


@pytest.mark.skipif(numerics.current().device != "cpu", reason="layers for the CPU")
@pytest.mark.parametrize(
    ("arch", "before", "width"),
    [("qwen3_5", 0, 3), ("qwen3_next", 7, 9), ("falcon_h1", 0, 3), ("nemotron_h", 7, 9), ("granitemoehybrid", 2, 2),
     ("mamba2", 5, 4), ("plamo2", 3, 8)],
)  # fmt: skip
def test_the_fast_rule_of_the_cpu_is_mlx_lms_within_its_bound(arch, before, width):
    plain, mine = tiny.build(arch)[0], tiny.build(arch)[0]
    fast.accelerate(mine)
    shared, _ = spans.install(mine)
    shared.few = True
    name = next(name for name, each in plain.named_modules() if type(each) in FORMS)
    own, ours = dict(plain.named_modules())[name], dict(mine.named_modules())[name]
    start = begun(own, 2, 3, before, 1)
    x = inputs(3, width, 2)
    theirs, states = steps(own, x, other(start))
    cache = other(start)
    out, journal = verify(ours, shared, x, cache)
    assert far(out, theirs) < FAST
    for kept in ([width] * 3, [0, width, 1], [1, 2, width - 1]):
        found = journal.slots_by_row(cache, mx.array(kept, mx.int32))
        for row, n in enumerate(kept):
            for i, array in found.items():
                at = states[n][i] if states[n][i] is not None else mx.zeros_like(array)
                assert far(array[row], at[row]) < FAST
