"""``cache_salt``: users of one folder are told and given exactly what they would be if the others were not there."""

from __future__ import annotations

import time
from dataclasses import asdict

import pytest

from mlxkv.decode.request import Request, SamplingParams
from mlxkv.errors import RequestError
from tests import tiny
from tests.cache.stores import prompt, reopened
from tests.probe import Probe, runtime

RAM = 1 << 30


def ask(rt, tokens, salt, max_tokens=4):
    request = Request(tokens=list(tokens), sampling=SamplingParams(max_tokens=max_tokens), salt=salt)
    made = Probe(rt, request, lambda e: None, lambda: False, time.monotonic())
    made.completion = made.run()
    assert rt.store.writer.flush(10)
    return made


def told(made):
    """All that a client learns, but for times."""
    done = made.completion
    return done.token_ids, asdict(done.usage), asdict(done.cache), made.logits.tobytes()


@pytest.mark.parametrize(("arch", "ram"), [("llama", 0), ("qwen3_5", RAM)])
def test_nothing_is_learnt_of_another_salt(tiny_model, tmp_path, arch, ram):
    """Ruby asks the same, less, more and branches of what Opal has stored, before and after it is there."""
    own = prompt()
    asked = [own[:20], own, [*own[:13], *tiny.ids(9, seed=4)], tiny.ids(12, seed=5)]
    alone = runtime(tiny_model(arch), tmp_path / "alone", ram_budget=ram)
    expected = [told(ask(alone, ids, "ruby")) for ids in asked]
    alone.store.close()
    shared = runtime(tiny_model(arch), tmp_path / "shared", ram_budget=ram)
    for other in ("opal", "", "rubys"):
        opal = ask(shared, own, other)
        assert opal.completion.cache.miss_reason == "empty" and opal.completion.usage.cached_tokens == 0
    found = []
    for ids in asked:
        ask(shared, [*ids, *tiny.ids(5, seed=6)], "opal")  # whatever comes next, Opal has it already
        found.append(told(ask(shared, ids, "ruby")))
    assert found == expected
    shared.store.close()
    # after a restart with another layout: Opal is told why Opal's state does not fit, others are not
    for salt, options in (("jade", {"block": 4}), ("pearl", {"store_bits": 8})):
        other = reopened(shared, tmp_path / "shared", **options)
        assert ask(other, own, salt).completion.cache.miss_reason == "empty"
        assert ask(other, own, "opal").completion.cache.miss_reason == "other_layout"
        other.store.close()


def test_an_answer_is_not_known_to_another_salt(tiny_model, tmp_path):
    """The ids that a text was sampled as come back to the one who has them, from RAM and from disk."""
    rt = runtime(tiny_model("qwen3_5"), tmp_path, ram_budget=RAM)
    tokens = tiny.ids(12, seed=2)
    done = ask(rt, tokens, "ruby", max_tokens=8).completion
    for store in (rt.store, None):
        if store is None:
            rt.store.close()
            store = reopened(rt, tmp_path).store
        assert store.answer_ids(tokens, done.text, "ruby") == done.token_ids
        assert store.answer_ids(tokens, done.text, "opal") is store.answer_ids(tokens, done.text) is None
    store.close()


@pytest.mark.parametrize("bad", [None, 5, b"ruby"])
def test_a_salt_is_a_text(bad):
    with pytest.raises(RequestError, match="salt"):
        Request(prompt="hello", salt=bad)
