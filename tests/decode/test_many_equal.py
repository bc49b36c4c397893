"""Many at once: random requests that come and go at random get, each, what it gets alone, and so does the store."""

from __future__ import annotations

import random

import pytest
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from tests import headed, tiny
from tests.decode.equal import bound_of, measure

#: state kinds that no architecture of the suite has: a llama's two layers with other cache objects
KINDS = {
    "keeps its first rows": lambda: [RotatingKVCache(12, keep=3) for _ in range(2)],
    "keeps its first rows, beside all rows": lambda: [RotatingKVCache(12, keep=3), KVCache()],
    "quantised": lambda: [QuantizedKVCache(group_size=32, bits=8) for _ in range(2)],
    "concatenated": lambda: [ConcatenateKVCache() for _ in range(2)],
}
#: rows of a window stand at other offsets after another cut, as those of gemma3_text do
WINDOWED = 2e-6


def check(report, bound):
    assert not report.wrong, "\n".join(report.wrong)
    assert report.records > 10 and report.shared > 0.6 and report.restored >= 3
    assert report.together >= 3


@pytest.mark.parametrize("arch", tiny.ARCHS)
def test_each_gets_what_it_gets_alone(tiny_model, tmp_path, arch):
    report = measure(tiny_model(arch), tmp_path, random.Random(f"{arch} 1"), requests=14, bound=bound_of(arch))
    check(report, bound_of(arch))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_state_in_company(tiny_model, tmp_path, kind):
    bound = WINDOWED if "first rows" in kind else 0.0
    rng = random.Random(f"{kind} 1")
    layers = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]} if "beside" in kind else {}
    model = tiny.make("llama", tmp_path / "model", **layers)
    report = measure(model, tmp_path, rng, requests=8, bound=bound, make_cache=KINDS[kind])
    check(report, bound)


def test_chunked_caches_in_company(tiny_model, tmp_path):
    report = measure(tiny_model("llama4"), tmp_path, random.Random(4), requests=8)
    check(report, 0.0)


def test_a_head_in_company(tmp_path):
    """Its rows are made from hidden states that batched steps leave."""
    report = measure(headed.make(tmp_path / "model"), tmp_path, random.Random(5), requests=8)
    check(report, 0.0)
