"""Bits depend on a token's position alone: not on how the prompt was cut, how much is looked at at once, or ties."""

import random

import mlx.core as mx
import pytest

from mlxkv.cache.compressed import CompressedCache
from mlxkv.models.deepseek_v4 import attention
from mlxkv.models.deepseek_v4.indexer import best
from tests import tiny


def run(model, ids, cuts):
    """Logits of the ids read in pieces of these lengths, and then what is left."""
    cache, out, at = model.make_cache(), [], 0
    for n in [*cuts, len(ids)]:
        if at < len(ids):
            out.append(model(mx.array([ids[at : at + n]]), cache))
            mx.eval(out[-1])
            at += n
    return mx.concatenate(out, axis=1)


def test_cuts_change_no_bit():
    model, _ = tiny.build("deepseek_v4")
    ids, rng = tiny.ids(90, 2), random.Random(3)
    whole = run(model, ids, [])
    for cuts in ([1] * 50, *([rng.choice([1, 2, 3, 4, 5, 7, 8, 16, 33]) for _ in range(90)] for _ in range(4))):
        assert mx.array_equal(run(model, ids, cuts), whole), cuts


def test_cuts_change_no_bit_at_the_published_lengths():
    published = {"compress_ratios": [4, 128], "sliding_window": 128, "index_topk": 16, "num_hidden_layers": 2}
    model, _ = tiny.build("deepseek_v4", **published)
    ids = tiny.ids(270, 2)
    whole = run(model, ids, [])
    for cuts in ([64] * 5, [125, 1, 1, 1, 1, 2, 100, 23, 1, 1, 1], [7, 129, 3, 116, 1, 1]):
        assert mx.array_equal(run(model, ids, cuts), whole), cuts


def test_queries_taken_few_at_once_change_no_bit(monkeypatch):
    model, _ = tiny.build("deepseek_v4")
    ids = tiny.ids(90, 4)
    whole = run(model, ids, [])
    monkeypatch.setattr(attention, "_AT_ONCE", 4 * 400 * 7)  # seven queries or fewer
    assert mx.array_equal(run(model, ids, []), whole)


def test_the_best_of_equal_scores_are_the_earliest():
    rng = random.Random(5)
    for _ in range(60):
        entries, k = rng.randrange(1, 70), rng.randrange(1, 24)
        rows = [[float(rng.randrange(3)) for _ in range(entries)] for _ in range(3)]
        visible = [rng.randrange(entries + 1) for _ in rows]
        got = best(mx.array([rows]), mx.array([visible]), k)[0].tolist()
        for row, n, chosen in zip(rows, visible, got, strict=True):
            want = sorted(sorted(range(n), key=lambda i, row=row: (-row[i], i))[:k])
            assert chosen == want + [-1] * (min(k, entries) - len(want))


def test_what_is_hidden_may_be_anything():
    q, own, shared = (
        mx.random.normal(shape, key=mx.random.key(i)) for i, shape in enumerate([(2, 3, 4, 8), (2, 3, 5, 8), (2, 6, 8)])
    )
    own_mask, visible = mx.random.randint(0, 2, (2, 3, 5), key=mx.random.key(9)) > 0, mx.array([[1, 2, 2], [4, 4, 5]])
    shared_mask = mx.arange(6) < visible[..., None]
    sinks, scale = mx.zeros(4), 0.3
    want = attention.attend(q, own, own_mask, shared, shared_mask, sinks, scale)
    own = mx.where(own_mask[..., None], own, mx.nan)
    shared = mx.where(mx.any(shared_mask, axis=1)[..., None], shared, mx.nan)
    assert mx.isnan(own).any() and mx.isnan(shared).any()
    assert mx.array_equal(attention.attend(q, own, own_mask, shared, shared_mask, sinks, scale), want)


@pytest.mark.parametrize(
    ("p", "raw", "fours", "hundreds"),
    [
        (0, 1, 0, 0),
        (3, 4, 1, 0),
        (127, 128, 32, 1),
        (128, 128, 32, 1),
        (255, 128, 64, 2),
        (1000, 128, 250, 7),
    ],
)
def test_what_a_query_sees(p, raw, fours, hundreds):
    """The last row of the table: raw rows 873 to 1000. Each row and entry says of which token it is."""
    for ratio, want in ((4, fours), (128, hundreds)):
        cache = CompressedCache(window=128, ratio=ratio, overlap=ratio == 4, head_dim=1)
        tokens = mx.arange(p + 1, dtype=mx.float32).reshape(1, -1, 1)
        cache.update_window(tokens[:, :p]) if p else None
        seen = cache.update_window(tokens[:, p:])
        rows = [seen.rows[0, i, 0].item() for i, there in zip(seen.index[0, 0], seen.mask[0, 0], strict=True) if there]
        assert rows == list(range(p + 1 - raw, p + 1))
        made = cache.compress("kv", tokens, lambda windows, first, there: first.reshape(1, -1, 1))
        assert made[0, :, 0].tolist() == [n * ratio for n in range(want)]
