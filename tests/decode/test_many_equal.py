"""Many at once: random requests that come and go at random get, each, what it gets alone, and so does the store."""

from __future__ import annotations

import random

import pytest

from tests import headed, tiny
from tests.decode.equal import KINDS, bound_of, measure, of_kind


def check(report):
    assert not report.wrong, "\n".join(report.wrong)
    assert report.records > 10 and report.shared > 0.4
    assert report.together >= 2


@pytest.mark.parametrize("arch", tiny.ARCHS)
def test_each_gets_what_it_gets_alone(tiny_model, tmp_path, arch):
    report = measure(tiny_model(arch), tmp_path, random.Random(f"{arch} 1"), requests=8, bound=bound_of(arch))
    check(report)
    assert report.restored >= 3


@pytest.mark.parametrize("kind", sorted(KINDS)[1::2] + sorted(KINDS)[:1])
def test_each_kind_of_state_in_company(tmp_path, kind):
    rng = random.Random(f"{kind} 1")
    check(measure(folder=tmp_path, rng=rng, requests=7, **of_kind(kind, tmp_path / "model")))


def test_chunked_caches_in_company(tiny_model, tmp_path):
    report = measure(tiny_model("llama4"), tmp_path, random.Random(4), requests=7)
    check(report)


def test_a_head_in_company(tmp_path):
    """Its rows are made from hidden states that batched steps leave."""
    report = measure(headed.make(tmp_path / "model"), tmp_path, random.Random(5), requests=7)
    check(report)
