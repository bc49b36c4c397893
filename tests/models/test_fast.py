"""The CPU's own layers compute what mlx-lm's do, within 5e-6 of the largest value."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache
from mlx_lm.models.gated_delta import gated_delta_ops, normalize_qk
from mlx_lm.models.qwen3_next import ModelArgs, Qwen3NextAttention, Qwen3NextGatedDeltaNet

from mlxkv import numerics
from mlxkv.models import activation, attention, fast, linear, rope
from mlxkv.models.conv import DepthwiseConv1d, is_depthwise
from mlxkv.models.gated_delta import ChunkedNextGatedDeltaNet, chunked_gated_delta, gated_delta_step, log_decay
from mlxkv.models.norm import rms_norm
from mlxkv.models.replace import as_subclass
from tests import tiny

pytestmark = pytest.mark.skipif(numerics.current().device != "cpu", reason="layers for the CPU")
TOLERANCE = 5e-6


def far(a, b):
    assert a.shape == b.shape and a.dtype == b.dtype
    return (mx.abs(a - b).max() / mx.abs(b).max()).item()


def problem(T, Hk, Hv, *, decay, seed=0, B=2, Dk=32, Dv=16, alike=1.0):
    """Random inputs; keys share a direction (``alike``), which makes the triangular systems hard."""
    keys = mx.random.split(mx.random.key(seed), 6)
    q, k = (mx.random.normal((B, T, Hk, Dk), key=keys[i]) + alike * i for i in (0, 1))
    q, k = normalize_qk(q, k, inv_scale=Dk**-0.5, eps=1e-6)
    v = mx.random.normal((B, T, Hv, Dv), key=keys[2])
    a = mx.random.normal((B, T, Hv), key=keys[3]) * 4
    beta = mx.sigmoid(mx.random.normal((B, T, Hv), key=keys[4]) * 3)
    log_g = log_decay(a, mx.log(mx.full((Hv,), decay)), mx.ones(Hv))
    return q, k, v, log_g, beta, mx.random.normal((B, Hv, Dv, Dk), key=keys[5])


@pytest.mark.parametrize("T", [1, 2, 31, 32, 33, 100, 257])
def test_chunked_gated_delta_any_length(T):
    q, k, v, log_g, beta, state = problem(T, 2, 4, decay=0.2, seed=T)
    y, after = chunked_gated_delta(q, k, v, log_g, beta, state)
    y0, after0 = gated_delta_ops(q, k, v, mx.exp(log_g), beta, state)
    assert far(y, y0) < TOLERANCE and far(after, after0) < TOLERANCE


@pytest.mark.parametrize("decay", [1e-6, 0.05, 1.0, 16.0, 300.0])
@pytest.mark.parametrize(("Hk", "Hv"), [(1, 1), (1, 4), (4, 4)])
def test_chunked_gated_delta_weak_and_strong_decay(decay, Hk, Hv):
    q, k, v, log_g, beta, state = problem(70, Hk, Hv, decay=decay, alike=3.0)
    y, after = chunked_gated_delta(q, k, v, log_g, beta, state)
    y0, after0 = gated_delta_ops(q, k, v, mx.exp(log_g), beta, state)
    assert mx.isfinite(y).all() and mx.isfinite(after).all()
    assert far(y, y0) < TOLERANCE and far(after, after0) < TOLERANCE


def test_chunked_gated_delta_weak_decay_after_a_strong_one():
    q, k, v, log_g, beta, state = problem(64, 2, 2, decay=0.01)
    log_g = mx.where((mx.arange(64) == 5)[None, :, None], -5000.0, log_g)
    y, after = chunked_gated_delta(q, k, v, log_g, beta, state)
    y0, after0 = gated_delta_ops(q, k, v, mx.exp(log_g), beta, state)
    assert far(y, y0) < TOLERANCE and far(after, after0) < TOLERANCE


def test_chunked_gated_delta_keys_all_alike():
    q, k, v, log_g, beta, state = problem(96, 1, 2, decay=1e-6, alike=1e4)
    y, after = chunked_gated_delta(q, k, v, log_g, mx.ones_like(beta), state)
    y0, after0 = gated_delta_ops(q, k, v, mx.exp(log_g), mx.ones_like(beta), state)
    assert far(y, y0) < TOLERANCE and far(after, after0) < TOLERANCE


def test_chunked_gated_delta_in_pieces_and_from_nothing():
    q, k, v, log_g, beta, _ = problem(90, 2, 4, decay=0.2)
    whole, end = chunked_gated_delta(q, k, v, log_g, beta)
    state, pieces = None, []
    for a, b in ((0, 40), (40, 41), (41, 90)):
        y, state = chunked_gated_delta(q[:, a:b], k[:, a:b], v[:, a:b], log_g[:, a:b], beta[:, a:b], state)
        pieces.append(y)
    assert far(mx.concatenate(pieces, axis=1), whole) < TOLERANCE and far(state, end) < TOLERANCE


@pytest.mark.parametrize("decay", [1e-3, 0.5, 50.0])
@pytest.mark.parametrize(("Hk", "Hv"), [(2, 2), (1, 4)])
def test_gated_delta_step(Hk, Hv, decay):
    keys = mx.random.split(mx.random.key(7), 5)
    qk = mx.random.normal((3, 2, Hk, 32), key=keys[0]) + 0.5
    v, state = mx.random.normal((3, Hv, 16), key=keys[1]), mx.random.normal((3, Hv, 16, 32), key=keys[2])
    a, b = mx.random.normal((3, Hv), key=keys[3]), mx.random.normal((3, Hv), key=keys[4])
    A_log, bias = mx.log(mx.full((Hv,), decay)), mx.ones(Hv)
    before = mx.array(state)
    y, after = gated_delta_step(qk, v, a, b, A_log, bias, state)
    q, k = normalize_qk(qk[:, :1], qk[:, 1:], inv_scale=32**-0.5, eps=1e-6)
    g, beta = mx.exp(log_decay(a, A_log, bias))[:, None], mx.sigmoid(b)[:, None]
    y0, after0 = gated_delta_ops(q, k, v[:, None], g, beta, state)
    assert far(y, y0[:, 0]) < TOLERANCE and far(after, after0) < TOLERANCE
    assert mx.array_equal(state, before)  # a kept state is never written into


@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 4, 3, 32), (1, 200, 64)])
def test_rms_norm(shape):
    x, weight = mx.random.normal(shape) * 3, mx.random.normal(shape[-1:])
    assert far(rms_norm(x, weight, 1e-5), mx.fast.rms_norm(x, weight, 1e-5)) < TOLERANCE


@pytest.mark.parametrize("channels", [24, 256, 1024])
@pytest.mark.parametrize("length", [1, 2, 64, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_depthwise_convolution(channels, length, bias):
    plain = nn.Conv1d(channels, channels, 4, groups=channels, bias=bias)
    if bias:
        plain.bias = mx.random.normal((channels,))
    assert is_depthwise(plain)
    mine = as_subclass(DepthwiseConv1d, plain)
    x = mx.random.normal((2, length + 3, channels))
    assert far(mine(x), plain(x)) < TOLERANCE


def test_other_convolutions_are_left_alone():
    assert not is_depthwise(nn.Conv1d(8, 8, 4))
    assert not is_depthwise(nn.Conv1d(8, 8, 4, groups=8, padding=3))
    assert not is_depthwise(nn.Conv1d(8, 8, 4, groups=8, stride=2))
    assert not is_depthwise(nn.Conv1d(8, 16, 4, groups=8))
    assert not is_depthwise(nn.Linear(8, 8))


def test_activations():
    x = mx.concatenate([mx.linspace(-100, 80, 5000), mx.array([-1e30, -200.0, 0.0])])
    assert far(activation.silu(x), nn.silu(x)) < TOLERANCE
    exact, close = mx.exp(x), activation.exp(x)
    assert (mx.abs(close - exact) <= 8e-6 * exact + 1e-30).all()


@pytest.mark.parametrize("arch", tiny.ARCHS)
@pytest.mark.parametrize("pieces", [(70,), (40, 1, 1, 3, 25)])
def test_accelerated_models_agree(arch, pieces):
    plain, mine = tiny.build(arch)[0], tiny.build(arch)[0]
    names = sorted(name for name, _ in tree_flatten(mine.parameters()))
    replaced = fast.accelerate(mine)
    assert replaced
    assert sorted(name for name, _ in tree_flatten(mine.parameters())) == names
    assert fast.accelerate(mine) == []  # nothing is replaced twice
    ids, done = tiny.ids(sum(pieces), 4), 0
    one, two = make_prompt_cache(plain), make_prompt_cache(mine)
    for n in pieces:
        x = mx.array([ids[done : done + n]])
        assert far(mine(x, cache=two), plain(x, cache=one)) < 4 * TOLERANCE  # several layers deep
        done += n
    for (_, a), (_, b) in zip(tree_flatten([c.state for c in two]), tree_flatten([c.state for c in one]), strict=True):
        if isinstance(a, mx.array):
            assert far(a, b) < 4 * TOLERANCE


def test_a_padded_batch_goes_mlx_lms_way():
    plain, mine = tiny.build("qwen3_5")[0], tiny.build("qwen3_5")[0]
    fast.accelerate(mine)
    x = mx.array([tiny.ids(40, 1), tiny.ids(40, 2)])
    outs = []
    for model in (plain, mine):
        cache = make_prompt_cache(model)
        for c in cache:
            if isinstance(c, ArraysCache):
                c.prepare(lengths=[20, 40])
        outs.append(model(x, cache=cache))
    assert far(outs[1], outs[0]) < 4 * TOLERANCE


def test_qwen3_next_layer():
    fields = dict.fromkeys(ModelArgs.__dataclass_fields__, 1) | {
        "hidden_size": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
    }
    plain = Qwen3NextGatedDeltaNet(ModelArgs(**fields))
    plain.eval()
    mine = as_subclass(ChunkedNextGatedDeltaNet, plain)
    one, two = ArraysCache(2), ArraysCache(2)
    for n in (50, 1, 33):
        x = mx.random.normal((2, n, 64))
        assert far(mine(x, cache=two), plain(x, cache=one)) < TOLERANCE
        assert far(two[0], one[0]) < TOLERANCE and far(two[1], one[1]) < TOLERANCE


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 48), (48,), (1, 3, 48), (2, 1, 48)])
def test_row_linear_is_a_linear_layer(shape, bias):
    theirs = nn.Linear(48, 80, bias=bias)
    mine = as_subclass(linear.RowLinear, theirs)
    x = mx.random.normal(shape, key=mx.random.key(3))
    assert mx.allclose(mine(x), theirs(x), rtol=1e-5, atol=1e-6).item()
    assert mine(x).shape == theirs(x).shape


@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13])
@pytest.mark.parametrize(("wide", "deep"), [(2050, 520), (300, 4096)])
def test_large_layers_and_heads_in_pieces(rows, wide, deep, monkeypatch):
    monkeypatch.setattr(numerics, "unpacked_products", lambda: True)
    theirs, head = nn.Linear(deep, wide), nn.Embedding(wide, deep)
    mine, own = as_subclass(linear.RowLinear, theirs), as_subclass(linear.RowEmbedding, head)
    assert linear.gains(theirs) and linear.gains_as_head(head)
    assert bool(linear.piece(rows, *theirs.weight.shape)) == (rows <= linear.ROWS)
    for shape in ((rows, 1, deep), (1, rows, deep), (rows, deep)):
        x = mx.random.normal(shape, key=mx.random.key(3))
        assert far(mine(x), theirs(x)) < TOLERANCE and far(own.as_linear(x), head.as_linear(x)) < TOLERANCE
    assert mx.array_equal(own(mx.array([0, wide - 1])), head(mx.array([0, wide - 1]))).item()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 4, 8, 20, 21])
def test_some_rows_of_a_small_layer(rows, bias, monkeypatch):
    monkeypatch.setattr(numerics, "unpacked_products", lambda: True)
    theirs = nn.Linear(128, 384, bias=bias)
    mine = as_subclass(linear.RowLinear, theirs)
    assert linear.turns(rows, *theirs.weight.shape) == (4 <= rows <= 20)
    for shape in ((rows, 1, 128), (1, rows, 128), (rows, 128)):
        x = mx.random.normal(shape, key=mx.random.key(3))
        assert far(mine(x), theirs(x)) < TOLERANCE


def test_wide_heads_and_quantised_layers_stay(monkeypatch):
    monkeypatch.setattr(numerics, "unpacked_products", lambda: False)
    assert linear.gains(nn.Linear(64, 64)) and not linear.gains(nn.Linear(64, 1 << 19))
    assert not linear.gains_as_head(nn.Embedding(1 << 19, 64))
    assert not linear.gains(nn.QuantizedLinear(64, 64)) and not linear.gains(linear.RowLinear(64, 64))


@pytest.mark.parametrize(("dims", "width"), [(32, 32), (16, 64)])
def test_shared_angles_rotate_like_mlxs_own(dims, width):
    theirs = [nn.RoPE(dims, base=base) for base in (10000.0, 10000.0, 1e6)]
    mine = [as_subclass(rope.SharedRoPE, layer) for layer in theirs]
    rope.share(mine)
    assert mine[0].angles is mine[1].angles is not mine[2].angles
    for offset, length in ((0, 5), (7, 1), (7, 3), (1000, 1)):
        x = mx.random.normal((1, 3, length, width), key=mx.random.key(offset))
        for a, b in zip(mine, theirs, strict=True):
            assert mx.allclose(a(x, offset=offset), b(x, offset=offset), rtol=1e-4, atol=2e-4).item()
    x = mx.random.normal((1, 3, 1, width))
    assert mx.array_equal(mine[0](x, offset=mx.array(3)), theirs[0](x, offset=mx.array(3))).item()


def test_rows_of_a_batch_are_rotated_as_they_are_alone():
    mine = [as_subclass(rope.SharedRoPE, nn.RoPE(16, base=base)) for base in (10000.0, 10000.0, 1e6)]
    rope.share(mine)
    x = mx.random.normal((3, 2, 1, 24), key=mx.random.key(1))
    for positions in ([5, 0, 900], [6, 1, 901]):
        offsets = mx.array(positions, mx.int32)
        for layer in mine:
            rows = mx.concatenate([layer(x[i : i + 1], offset=p) for i, p in enumerate(positions)])
            assert mx.array_equal(layer(x, offset=offsets), rows).item()
    assert layer(mx.concatenate([x, x], axis=2), offset=offsets).shape == (3, 2, 2, 24)


def gated_attention(heads, shared, size, dims):
    """mlx-lm's layer with random norms, and the one that takes its place."""
    fields = dict.fromkeys(ModelArgs.__dataclass_fields__, 1) | {
        "hidden_size": 48,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "head_dim": size,
        "partial_rotary_factor": dims / size,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
    }
    mx.random.seed(heads)
    holder, plain = nn.Module(), Qwen3NextAttention(ModelArgs(**fields))
    holder.layer = Qwen3NextAttention(ModelArgs(**fields))
    for norm in (plain.q_norm, plain.k_norm):
        norm.weight = 1 + 0.3 * mx.random.normal(norm.weight.shape)
    mx.eval(plain.parameters())
    holder.layer.update(plain.parameters())
    fast.accelerate(holder)  # replaces its parts too
    assert type(holder.layer) is attention.FewAttention
    return plain, holder.layer


class Columns:
    """Rows of a batch: each sequence writes at its own columns."""

    def __init__(self, keys, values, offsets, tokens):
        self.keys, self.values, self.offset = keys, values, offsets
        self.at = offsets[:, None] + mx.arange(tokens)
        self.mask = (mx.arange(keys.shape[2]) <= self.at[:, :, None])[:, None]

    def update_and_fetch(self, keys, values):
        at = mx.broadcast_to(self.at[:, None, :, None], keys.shape)
        self.keys = mx.put_along_axis(self.keys, at, keys, axis=2)
        self.values = mx.put_along_axis(self.values, at, values, axis=2)
        return self.keys, self.values


@pytest.mark.parametrize(("heads", "shared", "size", "dims"), [(2, 1, 64, 16), (4, 2, 16, 16), (3, 3, 24, 8)])
@pytest.mark.parametrize("tokens", [1, 2, 9, 16, 17])
@pytest.mark.parametrize("positions", [[0], [61], [5, 0, 40]])
def test_attention_over_a_few_tokens(heads, shared, size, dims, tokens, positions):
    plain, mine = gated_attention(heads, shared, size, dims)
    B, key = len(positions), mx.random.key(tokens)
    x = mx.random.normal((B, tokens, 48), key=key)
    held = mx.random.normal((2, B, shared, 80, size), key=key)
    one, two = (Columns(*held, mx.array(positions, mx.int32), tokens) for _ in range(2))
    assert far(mine(x, two.mask, two), plain(x, one.mask, one)) < 4 * TOLERANCE
    assert far(two.keys, one.keys) < TOLERANCE and mx.array_equal(two.values, one.values)
    # and alone: its position is a number, and one token needs no mask
    one, two = KVCache(), KVCache()
    for n in (7, 1, tokens, 1):
        x = mx.random.normal((1, n, 48), key=key)
        mask = None if n == 1 else "causal"
        assert far(mine(x, mask, two), plain(x, mask, one)) < 4 * TOLERANCE
        assert far(two.keys[:, :, : two.offset], one.keys[:, :, : one.offset]) < TOLERANCE


def test_attention_of_other_kinds_stays():
    plain, mine = gated_attention(2, 1, 64, 16)
    assert attention.gains(plain) and not attention.gains(mine)
    plain.q_norm.weight = plain.q_norm.weight.astype(mx.bfloat16)
    assert not attention.gains(plain)
    plain = gated_attention(2, 1, 64, 16)[0]
    plain.rope = nn.RoPE(16, traditional=True)
    assert not attention.gains(plain)


def test_masks_of_other_kinds_go_mlx_lms_way():
    """Numbers that are added to scores, a mask for each head, and one for all sequences."""
    plain, mine = gated_attention(4, 2, 16, 16)
    x, seen = mx.random.normal((1, 2, 48)), mx.tril(mx.ones((2, 2), mx.bool_))
    heads = mx.broadcast_to(seen, (1, 4, 2, 2))
    for mask in (mx.where(seen, 0.0, -1e9)[None, None], heads, seen):
        assert far(mine(x, mask, KVCache()), plain(x, mask, KVCache())) < 4 * TOLERANCE
    cache = KVCache()
    cache.update_and_fetch(*mx.random.normal((2, 1, 2, 5, 16)))
    other = KVCache()
    other.update_and_fetch(cache.keys[:, :, :5], cache.values[:, :, :5])
    cache.offset = np.int64(5)
    assert far(mine(x[:, :1], None, cache), plain(x[:, :1], None, other)) < 4 * TOLERANCE
