"""Drafts change nothing: random requests that come and go get, each, what it gets alone and plainly, whatever is
drafted for them and however much of it is right; and the store keeps, array by array, what plain runs keep."""

from __future__ import annotations

import random

import pytest

from tests import architectures, headed
from tests.decode.equal import KINDS, bound_of, measure, of_kind
from tests.decode.many import load
from tests.decode.scripted import PATTERNS, Scripted, pattern

#: architecture, drafts of a cycle, how they fare; all architectures alone are in test_cycles.py
CASES = [
    ("llama", 1, "all"),
    ("gemma3_text", 2, "alternating"),
    ("qwen3_5", 3, "random"),
    ("falcon_h1", 4, "none"),
    ("nemotron_h", 6, "random"),
    ("lfm2", 8, "all"),
]
#: answers of a few tokens leave states on the way too
LADDER = 16


def scripted(how: str, seed: str) -> Scripted:
    return Scripted(pattern(how, random.Random(seed)), architectures.VOCAB)


def check(report, drafter):
    assert not report.wrong, "\n".join(report.wrong)
    assert report.records > 10 and report.together >= 2
    assert report.cycles > 8 and report.compared > 3
    assert len(drafter.kept) >= report.cycles and not drafter.open


@pytest.mark.parametrize(("arch", "depth", "how"), CASES)
def test_whatever_is_drafted(tiny_model, tmp_path, arch, depth, how):
    drafter = scripted(how, arch)
    report = measure(
        tiny_model(arch),
        tmp_path,
        random.Random(f"{arch} drafts"),
        requests=7,
        bound=bound_of(arch),
        drafter=drafter,
        ladder=LADDER,
        thin=True,
        max_rows=3,
        draft="ngram",
        draft_depth=depth,
    )
    check(report, drafter)


def test_a_head_that_drafts(tmp_path):
    model = headed.make(tmp_path / "model", num_hidden_layers=2)
    report = measure(model, tmp_path, random.Random(5), requests=6, ladder=LADDER, thin=True, max_rows=3, draft_depth=2)
    assert not report.wrong, "\n".join(report.wrong)
    assert report.cycles > 8 and report.compared > 3


def test_layers_without_a_journal_are_run_again(tiny_model, tmp_path):
    """Only where drafts are asked for; what is accepted is run once more, from a state that was kept."""
    drafter = scripted("random", "again")
    report = measure(tiny_model("mamba"), tmp_path, random.Random(6), requests=4, max_rows=1, drafter=drafter,
                     draft="ngram", draft_depth=3)  # fmt: skip
    assert not report.wrong, "\n".join(report.wrong)
    assert len(drafter.kept) > 10 and len(set(drafter.kept)) > 2
    with load(tiny_model("mamba"), None) as engine:
        assert engine.info.drafter is None


@pytest.mark.parametrize("kind", sorted(KINDS)[1:2])
def test_each_kind_of_state(tmp_path, kind):
    drafter, rng = scripted("random", kind), random.Random(f"{kind} drafts")
    report = measure(folder=tmp_path, rng=rng, requests=7, drafter=drafter, thin=True, draft="ngram",
                     max_rows=3, draft_depth=3, **of_kind(kind, tmp_path / "model"))  # fmt: skip
    check(report, drafter)


def test_patterns_are_what_they_say():
    rights = {name: [pattern(name, random.Random(1))(4) for _ in range(3)] for name in PATTERNS}
    assert rights["all"] == [4, 4, 4] and rights["none"] == [0, 0, 0]
