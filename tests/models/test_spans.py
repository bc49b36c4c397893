"""Recurrent layers that go past a boundary without a cut leave there what a cut would have left."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from mlxkv import numerics
from mlxkv.models import fast, spans
from tests import tiny

ARCHS = (
    "qwen3_5", "qwen3_next", "kimi_linear",
    "falcon_h1", "nemotron_h", "granitemoehybrid", "mamba2", "plamo2",
    "lfm2", "lfm2_moe",
)  # fmt: skip
#: largest difference / largest value, where another cut changes bits even in ``exact`` on a CPU
INEXACT = {
    "kimi_linear": (2e-6, "its latent attention computes one token another way than several: 7.2e-7"),
}
FAST = 2e-5  # products of several rows sum in another order than those of one: 2.7e-6
LENGTH = 26
#: the first token, neighbours, pieces shorter than any convolution's kernel, the last token
BOUNDARIES = [(1,), (25,), (13,), (1, 2, 3, 4), (1, 5, 7, 8, 20, 24, 25), tuple(range(1, 26))]


@pytest.fixture(scope="module", params=ARCHS)
def arch(request):
    return request.param


@pytest.fixture(scope="module")
def model(arch):
    """A model with layers for sub-spans; without an announcement it is what it was."""
    made = tiny.build(arch)[0]
    shared, done = spans.install(made)
    assert done
    made.eval()
    return made, shared


def slots(caches):
    """The arrays of all recurrent caches, as they are now."""
    out = []
    for cache in caches:
        for each in cache.caches if isinstance(cache, CacheList) else [cache]:
            if isinstance(each, ArraysCache):
                out.append((each, [a for a in each.cache]))
    return out


def split(model, ids, start, cuts, *, evaluate=True):
    """States at ``cuts`` of forwards that end there, and the last logits; tokens before ``start`` are one forward."""
    caches, at, states = make_prompt_cache(model), 0, {}
    for end in [*([start] if start else []), *cuts, len(ids)]:
        logits = model(mx.array([ids[at:end]]), cache=caches)
        at, states[end] = end, [arrays for _, arrays in slots(caches)]
        if evaluate:
            mx.eval(logits, states[end])
    return states, logits[:, -1]


def whole(model, shared, ids, start, cuts):
    caches = make_prompt_cache(model)
    if start:
        mx.eval(model(mx.array([ids[:start]]), cache=caches), [a for _, a in slots(caches)])
    with shared.inside(start, len(ids), cuts) as left:
        logits = model(mx.array([ids[start:]]), cache=caches)
    states = {}
    for cut in cuts:
        found = [left.slots(cache, cut) for cache, _ in slots(caches)]
        states[cut] = [[held[i] for i in sorted(held)] for held in found]
    states[len(ids)] = [arrays for _, arrays in slots(caches)]
    return states, logits[:, -1]


def far(a, b):
    """Largest difference / largest value; shapes and dtypes must be the same."""
    assert a.shape == b.shape and a.dtype == b.dtype
    a, b = (np.array(x.astype(mx.float32)) for x in (a, b))
    return float(np.abs(a - b).max() / max(float(np.abs(b).max()), 1e-30))


def worst(mine, theirs):
    assert mine.keys() <= theirs.keys()
    pairs = []
    for cut, layers in mine.items():
        for a, b in zip(layers, theirs[cut], strict=True):
            assert len(a) == len(b) and a
            pairs += zip(a, b, strict=True)
    return max(far(a, b) for a, b in pairs)


def bound(arch):
    exact = numerics.current().device == "cpu" and numerics.mode() == "exact"
    return INEXACT.get(arch, (0.0, ""))[0] if exact else FAST


@pytest.mark.parametrize("cuts", BOUNDARIES, ids=str)
def test_states_inside_a_forward_are_those_of_a_cut(model, arch, cuts):
    ids = tiny.ids(LENGTH, 3)
    theirs, last = split(tiny.build(arch)[0], ids, 0, cuts)
    mine, logits = whole(*model, ids, 0, cuts)
    assert worst(mine, theirs) <= bound(arch) and far(logits, last) <= bound(arch)


def test_from_the_middle_of_a_sequence(model, arch):
    ids, cuts = tiny.ids(LENGTH, 4), (8, 9, 19)
    theirs, last = split(tiny.build(arch)[0], ids, 7, cuts)
    mine, logits = whole(*model, ids, 7, cuts)
    assert worst(mine, theirs) <= bound(arch) and far(logits, last) <= bound(arch)


@pytest.mark.skipif(numerics.current().device != "cpu", reason="layers for the CPU")
def test_with_the_fast_layers_of_the_cpu(arch):
    plain, mine = tiny.build(arch)[0], tiny.build(arch)[0]
    fast.accelerate(plain)
    fast.accelerate(mine)
    shared, done = spans.install(mine)
    assert done and fast.accelerate(mine) == []  # nothing is replaced twice
    ids, cuts = tiny.ids(90, 5), (1, 2, 30, 31, 39, 80, 89)
    theirs, last = split(plain, ids, 0, cuts)
    states, logits = whole(mine, shared, ids, 0, cuts)
    assert worst(states, theirs) < FAST and far(logits, last) < FAST


def test_half_precision_keeps_shapes_and_types(arch):
    plain, mine = tiny.build(arch)[0], tiny.build(arch)[0]
    shared, _ = spans.install(mine)
    plain.set_dtype(mx.bfloat16)
    mine.set_dtype(mx.bfloat16)
    ids, cuts = tiny.ids(12, 6), (1, 2, 7)
    theirs, _ = split(plain, ids, 0, cuts, evaluate=False)
    states, _ = whole(mine, shared, ids, 0, cuts)
    for cut in (*cuts, 12):
        both = [[[(a.shape, a.dtype) for a in layer] for layer in found[cut]] for found in (states, theirs)]
        assert both[0] == both[1]


def test_parameters_are_the_same_and_nothing_changes_without_an_announcement(model, arch):
    plain = tiny.build(arch)[0]
    names = [sorted(name for name, _ in tree_flatten(m.parameters())) for m in (model[0], plain)]
    assert names[0] == names[1]
    ids = mx.array([tiny.ids(LENGTH, 7), tiny.ids(LENGTH, 8)])
    assert mx.array_equal(model[0](ids, cache=make_prompt_cache(model[0])), plain(ids, cache=make_prompt_cache(plain)))


@pytest.mark.parametrize("tokens", [(1, 5), (2, 6)], ids=["another length", "a batch"])
def test_a_forward_that_was_not_announced_leaves_nothing(model, tokens):
    network, shared = model
    rows, n = tokens
    caches = make_prompt_cache(network)
    with shared.inside(0, 6, (3,)) as left:
        network(mx.zeros((rows, n), mx.int32), cache=caches)
    assert all(left.slots(cache, 3) == {} for cache, _ in slots(caches))


@pytest.mark.parametrize("cuts", [(), (0,), (6,), (3, 3), (4, 2)], ids=str)
def test_boundaries_that_are_not_inside_are_refused(cuts):
    with pytest.raises(ValueError, match="inside"), spans.Spans().inside(0, 6, cuts):
        pass
