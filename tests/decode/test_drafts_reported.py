"""Each answer says how many tokens were drafted for it and how many of them were accepted; together they are what the
engine counts."""

from __future__ import annotations

import random

import pytest

from tests import architectures, headed
from tests.decode.many import ask, changed, load
from tests.decode.scripted import Scripted, drafted_by, pattern

PROMPTS = [[3, 5, 7, 9, 11], [4, 6, 8], [21, 22, 23, 24]]


def test_what_was_drafted_for_each(tiny_model):
    with load(tiny_model("qwen3_5"), None, draft="off") as engine:
        plain = [engine.submit(ask(prompt, max_tokens=20)).result() for prompt in PROMPTS]
    assert all(done.drafts.drafted == done.drafts.accepted == 0 for done in plain)
    drafter = Scripted(pattern("random", random.Random(1)), architectures.VOCAB)
    drafter.learn([[*prompt, *done.token_ids] for prompt, done in zip(PROMPTS, plain, strict=True)])
    with (
        changed(drafted_by(drafter)),
        load(tiny_model("qwen3_5"), None, draft="ngram", draft_depth=3) as engine,
    ):
        tickets = [engine.submit(ask(prompt, max_tokens=20)) for prompt in PROMPTS]
        answers = [ticket.result() for ticket in tickets]
        status = engine.status()
    assert [done.text for done in answers] == [done.text for done in plain]
    assert all(0 < done.drafts.accepted < done.drafts.drafted for done in answers)
    assert sum(done.drafts.drafted for done in answers) == status.drafted == sum(k for _, k in drafter.kept)
    assert sum(done.drafts.accepted for done in answers) == status.accepted == sum(n for n, _ in drafter.kept)


@pytest.mark.parametrize(("draft", "some"), [("mtp", True), ("off", False)])
def test_a_head(tmp_path, draft, some):
    fixed = {"draft_depth": 2} if some else {}  # or it may rest, on a machine where drafts do not pay
    with load(headed.make(tmp_path / "model"), None, draft=draft, **fixed) as engine:
        done = engine.submit(ask(PROMPTS[0], max_tokens=30)).result()
    assert (done.drafts.drafted > 0) is some
    assert done.drafts.accepted <= done.drafts.drafted
    assert done.to_json()["drafts"] == {"drafted": done.drafts.drafted, "accepted": done.drafts.accepted}
