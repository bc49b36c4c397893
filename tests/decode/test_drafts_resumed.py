"""A prediction head after a resume: what it drafts, and what of it is kept, is what it would have been without one."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import pytest

from mlxkv.decode.batched import Batched
from mlxkv.decode.drafters.mtp import MTP
from mlxkv.decode.solo import Solo
from tests import headed, tiny
from tests.decode.many import ask, load

#: few tokens to choose from, so that a head which was never trained is right now and then
FEW = dict.fromkeys(range(20, 24), 100.0)


@contextmanager
def watched():
    """The unprocessed token and the drafts of each cycle, by row, and what was kept."""
    cycles = []

    def verify(kind):
        real = kind.verify
        return lambda run, inputs: (cycles.append(inputs), real(run, inputs))[1]

    def committed(drafter, round, kept):
        rows = cycles.pop().tolist()
        cycles.append({tuple(rows[slot]): n for slot, n in kept.items()})

    with (
        mock.patch.object(Solo, "verify", verify(Solo)),
        mock.patch.object(Batched, "verify", verify(Batched)),
        mock.patch.object(MTP, "committed", committed),
    ):
        yield cycles


def asks(engine, request):
    with watched() as cycles:
        done = engine.submit(request).result()
    return done, cycles


@pytest.mark.parametrize(("kind", "depth"), [("qwen3_5", 3), ("mimo", 1)])
def test_acceptance_after_a_resume_is_that_without_one(tmp_path, kind, depth):
    """From disk in another engine: the whole prompt, the prompt and its answer, and a part of the prompt. Some of the
    answers are sampled; some of the rows come of plain steps, in which nothing is drafted."""
    model = headed.make(tmp_path / "model", kind)
    how = {"draft": "mtp", "draft_depth": depth}
    greedy, drawn = {"logit_bias": FEW}, {"logit_bias": FEW, "temperature": 1.0, "seed": 7}
    prompt, other = [*tiny.ids(30, seed=1), tiny.EOS, *tiny.ids(14, seed=3)], tiny.ids(12, seed=2)  # two messages
    with load(model, tmp_path / "c", **how) as first:
        said = first.submit(ask(prompt, 24, **greedy)).result().token_ids
    with load(model, tmp_path / "c", draft="off") as plain:
        plain.submit(ask(other, 12, **greedy)).result()
    with load(model, None, **how) as cold:
        later = [
            ask(prompt, 24, **greedy),
            ask([*prompt, *said, *other], 24, **drawn),
            ask([*prompt[:33], *other], 24, **greedy),
            ask([*other, 5, 6], 24, **drawn),
        ]
        right = [asks(cold, each) for each in later]
    accepted = 0
    for each, (alone, cycles) in zip(later, right, strict=True):
        with load(model, tmp_path / "c", ram_budget=0, **how) as engine:
            done, mine = asks(engine, each)
        assert done.usage.cached_tokens >= 8, done.cache
        assert done.token_ids == alone.token_ids
        assert mine == cycles and len(cycles) > 3
        accepted += sum(n - 1 for kept in cycles for n in kept.values())
    assert accepted > 10
