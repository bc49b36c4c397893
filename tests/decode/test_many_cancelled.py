"""Fifty requests are given up in the queue, in prefill, while they are restored or decoded: nothing is left of them."""

from __future__ import annotations

import random

import pytest

import mlxkv
from mlxkv.errors import EngineClosed
from tests import tiny
from tests.decode.cancels import measure
from tests.decode.equal import bound_of
from tests.decode.many import Crowd, ask, load


@pytest.mark.parametrize(("arch", "ram"), [("qwen3_5", 0), ("gemma3_text", 1 << 26)])
def test_nothing_is_left_and_a_retry_is_cheap(tiny_model, tmp_path, arch, ram):
    report = measure(tiny_model(arch), tmp_path, random.Random(3), 25, ram=ram, bound=bound_of(arch))
    assert not report.wrong, "\n".join(report.wrong)
    assert report.given_up >= 25 and set(report.places) == {"queue", "prefill", "decoding"}
    assert report.hits == report.retries >= 10


def test_closing_ends_everybody(tiny_model, tmp_path):
    """Those that run are given up, those that wait refused, and what was computed is there afterwards."""
    engine = load(tiny_model("qwen3_5"), tmp_path)
    crowd = Crowd(engine)
    for number in range(24):
        crowd.submit(number, ask(tiny.ids(30, seed=number), 400))
    # at least eight at a time: before the first is through
    crowd.until(lambda: crowd.seen[0].ended or sum(len(seen.tokens) >= 3 for seen in crowd.seen.values()) >= 8)
    assert not crowd.seen[0].ended
    engine.close()
    for outcome in crowd.finish().values():
        if (done := outcome.completion) is not None:
            assert done.finish_reason == "cancelled"
        else:
            assert isinstance(outcome.error, EngineClosed) and not outcome.events
    begun = [number for number, seen in crowd.seen.items() if seen.tokens]
    with load(tiny_model("qwen3_5"), tmp_path) as engine:
        for number in begun:
            prompt = [*tiny.ids(30, seed=number), *crowd.seen[number].tokens, 3]
            again = mlxkv.generate(engine, prompt, max_tokens=1)
            assert again.usage.cached_tokens == len(prompt) - 2
