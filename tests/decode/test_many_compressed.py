"""Compressed attention in company: each request gets what it gets alone, with drafts and without, together or in
turns."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mlxkv.cache.compressed import CompressedCache
from tests import architectures, tiny
from tests.decode.equal import measure
from tests.decode.many import Alone, ask, load, with_caches
from tests.decode.scripted import Scripted, pattern

#: layers of two ratios, one with an index, and little beside attention
CHANGES: dict[str, Any] = {"num_hidden_layers": 2, "compress_ratios": [4, 8], "hc_sinkhorn_iters": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.make("deepseek_v4", tmp_path_factory.mktemp("model"), **CHANGES)


def test_each_gets_what_it_gets_alone(model, tmp_path):
    report = measure(model, tmp_path, random.Random(1), requests=4)
    assert not report.wrong, "\n".join(report.wrong)
    assert report.records > 10 and report.shared > 0.4 and report.together >= 2 and report.restored


def test_whatever_is_drafted(model, tmp_path):
    drafter = Scripted(pattern("random", random.Random(2)), architectures.VOCAB)
    report = measure(
        model,
        tmp_path,
        random.Random(3),
        requests=4,
        drafter=drafter,
        ladder=16,
        thin=True,
        draft="ngram",
        draft_depth=5,
    )
    assert not report.wrong, "\n".join(report.wrong)
    assert report.together >= 2 and report.cycles > 8 and report.compared > 3


class Unknown(CompressedCache):
    """Another class, of which no batch knows anything."""

    def with_spare(self, spare: int) -> Unknown:
        return Unknown(**{**_numbers(self), "spare": spare})


def _numbers(cache: CompressedCache) -> dict[str, Any]:
    names = ("window", "ratio", "overlap", "head_dim", "index_dim", "dtype")
    return {name: getattr(cache, name) for name in names}


def test_a_class_that_no_batch_knows_takes_turns(model):
    loaded: Any = tiny.build("deepseek_v4", **CHANGES)[0]
    asked = [ask(tiny.ids(9 + 7 * n, seed=n), 12) for n in range(3)]
    alone = Alone(model)
    right = [alone(each).token_ids for each in asked]
    alone.close()
    with (
        with_caches(lambda: [Unknown(**_numbers(cache)) for cache in loaded.make_cache()]),
        load(model, None, draft="off") as engine,
    ):
        tickets = [engine.submit(each) for each in asked]
        assert [ticket.result().token_ids for ticket in tickets] == right
        assert "Layer 0 keeps its state in Unknown" in (engine.status().turns or "")
