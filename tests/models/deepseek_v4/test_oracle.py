"""The model against NumPy's float64, and against the vectors of ``reference/state-handoff.md`` A.8."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxkv.models.deepseek_v4 import ModelArgs
from mlxkv.models.deepseek_v4.attention import attend
from mlxkv.models.deepseek_v4.compressor import Compressor
from mlxkv.models.deepseek_v4.indexer import best, scores
from mlxkv.models.deepseek_v4.rotary import Rotary
from tests import tiny
from tests.models.deepseek_v4 import oracle

#: the tiny model's own, and DeepSeek-V4's numbers with fewer layers; the choice of the last is made among 37 entries
SHAPES = {
    "tiny": {},
    "published": {"compress_ratios": [0, 128, 4, 128], "sliding_window": 128, "index_topk": 16, "num_hidden_layers": 3},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_the_equations(shape):
    model, config = tiny.build("deepseek_v4", seed=1, **SHAPES[shape])
    ids = tiny.ids(300, 1)
    got = np.array(model(mx.array([ids])))[0]
    weights = {name: np.array(array) for name, array in tree_flatten(model.parameters())}
    want = oracle.logits(weights, config, ids)
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
    # and steps, which make each entry from rows that they remember
    cache = model.make_cache()
    steps = [model(mx.array([ids[:280]]), cache), *(model(mx.array([[token]]), cache) for token in ids[280:])]
    got = np.array(mx.concatenate(steps, axis=1))[0]
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def test_scores_of_the_indexer():
    q, keys = mx.array([[[[1.0, 0], [0, 2]]]]), mx.array([[[1.0, 1], [-1, 2], [3, -1]]])
    scored = scores(q, keys, mx.array([[[0.5, 1.0]]]))
    assert np.allclose(scored[0, 0], [1.25, 2.0, 0.75])
    assert best(scored, mx.array([[3]]), 2).tolist() == [[[0, 1]]]


def test_the_sink_takes_its_share():
    # two keys whose products with the query are 1 and 2, and which say as values what they weigh
    q, rows = mx.array([[[[1.0, 0, 0]]]]), mx.array([[[[1.0, 1, 0], [2.0, 0, 1]]]])
    out = attend(q, rows, mx.ones((1, 1, 2), mx.bool_), None, None, mx.array([0.5]), 1.0)
    assert np.allclose(out[0, 0, 0, 1:], [0.231224, 0.628532], atol=1e-6)
    assert float(out[0, 0, 0, 1:].sum()) == pytest.approx(0.859756, abs=1e-6)


def compressor(ratio: int, ape: list[list[float]] | None = None) -> Compressor:
    """With entries of width 1 that are neither normalised nor turned."""
    made = Compressor(ModelArgs(hidden_size=1), ratio, 1)
    made.kv_norm = lambda x: x
    made.ape = made.ape if ape is None else mx.array(ape)
    return made


class Still(Rotary):
    def __init__(self) -> None:
        pass

    def at(self, x, positions):
        return x


@pytest.mark.parametrize(("high", "want"), [(0.0, [11.5, 8.5, 12.5]), (3.0, [12.740096, 14.489434, 18.489433])])
def test_overlapping_windows(high, want):
    made = compressor(4, [[0.0, 0], [0, 0], [0, 0], [0, high]])
    p = mx.arange(12, dtype=mx.float32)
    rows = mx.stack([p, 10 + p, mx.zeros(12), mx.zeros(12)], axis=1)  # kv_low, kv_high, gates
    positions = mx.arange(3)[:, None] * 4 - 4 + mx.arange(8)
    windows = rows[mx.maximum(positions, 0)][None]
    first = mx.arange(3) * 4
    got = made.pool(windows, first, positions >= 0, Still())
    assert np.allclose(got[0, :, 0], want, atol=1e-6)
    # what stands in rows that there are not is not read
    windows[:, 0, :4] = mx.nan
    assert mx.array_equal(made.pool(windows, first, positions >= 0, Still()), got)
    gate = np.zeros((12, 2))
    kv = np.array(rows)[:, :2]
    assert np.allclose([oracle.entry(kv, gate, np.array(made.ape), n, 4, True)[0] for n in range(3)], want, atol=1e-6)


def test_windows_that_do_not_overlap():
    rows = mx.stack([mx.arange(256, dtype=mx.float32), mx.zeros(256)], axis=1).reshape(1, 2, 128, 2)
    got = compressor(128).pool(rows, mx.array([0, 128]), mx.ones((2, 128), mx.bool_), Still())
    assert np.allclose(got[0, :, 0], [63.5, 191.5])
