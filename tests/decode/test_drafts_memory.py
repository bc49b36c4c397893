"""What cycles take besides the caches: a copy of one costs more than all that a cycle gains."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import mlx.core as mx
import pytest

from mlxkv.decode import needs, seats
from mlxkv.decode.group import Group
from mlxkv.decode.request import Delta
from tests import headed, tiny
from tests.decode.late import scripted
from tests.decode.many import ask, changed, load
from tests.decode.scripted import drafted_by


@pytest.fixture
def cycles(monkeypatch):
    """Of each cycle: slots of its forward, bytes of all live arrays before it, and how many bytes more there were at
    most."""
    seen: list[tuple[int, int, int]] = []
    real = Group._cycle

    def cycle(group, most):
        run = group.executor
        mx.eval(run.live())
        mx.clear_cache()
        mx.reset_peak_memory()
        before, held = mx.get_active_memory(), sum(a.nbytes for a in run.live())
        ended = real(group, most)
        mx.synchronize()
        if ended is not None:
            seen.append((run.slots, held, mx.get_peak_memory() - before))
        return ended

    monkeypatch.setattr(Group, "_cycle", cycle)
    return seen


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", ["head", "llama", "falcon_h1"])
def test_a_cycle_holds_no_second_cache(tmp_path, cycles, monkeypatch, kind, rows):
    for module in (needs, seats):
        monkeypatch.setattr(module, "OPEN_END", 1 << 15)
    long: dict[str, Any] = {"max_position_embeddings": 1 << 16}
    model = headed.make(tmp_path / "model", **long) if kind == "head" else tiny.make(kind, tmp_path / "model", **long)
    drafter = None if kind == "head" else scripted(random.Random(1))
    scripts = changed(drafted_by(drafter)) if drafter else contextlib.nullcontext()
    with scripts, load(model, None, draft="ngram" if drafter else "mtp", draft_depth=4) as engine:
        endless: dict[str, Any] = {"max_tokens": 1 << 15, "logit_bias": {tiny.EOS: -100.0}}
        tickets = [engine.submit(ask(tiny.ids(20, seed=i), **endless)) for i in range(rows)]
        said = (event for event in tickets[-1] if isinstance(event, Delta))
        for _ in range(40):
            next(said)
        for ticket in tickets:
            ticket.cancel()
    told = [(held, more) for slots, held, more in cycles if slots == rows][3:]
    assert len(told) > 5 and all(held > 15 << 20 for held, _ in told)
    # keys or values of one layer are an eighth of the caches, or more
    assert max(more for _, more in told) < min(held for held, _ in told) / 16, told
