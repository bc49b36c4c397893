"""Drafts of a request that runs on the calling thread, as ``cache explain`` and the tests' plain runs do."""

from __future__ import annotations

from typing import Any

import pytest

from mlxkv.decode.generation import Generation
from mlxkv.decode.options import Options
from mlxkv.decode.request import Delta
from mlxkv.decode.runtime import open_runtime
from tests import headed, tiny
from tests.decode.many import ask


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return headed.make(tmp_path_factory.mktemp("direct") / "model")


def test_a_direct_request_says_the_same_and_leaves_nothing(model, tmp_path):
    small = tiny.make("gemma3_text", tmp_path / "small")
    asked, said = ask(tiny.ids(25, seed=1), 30, logprobs=True), []
    ways: list[dict[str, Any]] = [
        {"draft": "off"},
        {"draft_depth": 3},
        {"draft": "ngram", "draft_depth": 3},
        {"draft": "model", "draft_model": small, "draft_depth": 2},
    ]
    for options in ways:
        rt, _ = open_runtime(Options(model=model, **options))
        done = Generation(rt, asked).run()
        said.append((done.token_ids, done.text, done.logprobs))
        told = []

        def emit(event, told=told):
            told.append(event)
            if sum(isinstance(e, Delta) for e in told) > 9:
                raise OSError("nobody listens")

        with pytest.raises(OSError, match="nobody listens"):
            Generation(rt, asked, emit).run()
        assert [name for name, held in rt.memory.ledger().items() if held] == ["weights"]
        if options.get("draft") == "ngram":
            assert rt.drafting is not None and not rt.drafting.drafter._known  # type: ignore[attr-defined]
    assert said == said[:1] * 4
