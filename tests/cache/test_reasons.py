"""Why a request missed does not depend on the tier that is asked, nor on how token ids are ordered."""

from __future__ import annotations

import pytest

from tests import tiny
from tests.cache.stores import reopened
from tests.probe import run, runtime

RAM = 1 << 30


@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
def test_what_is_stored_goes_on_otherwise_or_is_another_prompts(tiny_model, tmp_path, arch):
    rt = runtime(tiny_model(arch), tmp_path, ram_budget=RAM)
    tokens = tiny.ids(20, seed=4)
    tokens[0] = tokens[16] = 100
    tokens[15] = tiny.EOS  # a message ends at 16: a place to stand
    run(rt, tokens)
    for tier in ("ram", "ssd"):
        if tier == "ssd":
            rt.store.close()
            rt = reopened(rt, tmp_path)
        for other in (3, 200):
            asked = [*tokens[:16], other, *tokens[17:]]
            cache = run(rt, asked, keep=False)[1].cache
            assert (cache.source, cache.miss_reason, cache.miss_position) == (tier, "different_tokens", 16)
            cache = run(rt, [other, *tokens[1:]], keep=False)[1].cache
            assert (cache.source, cache.miss_reason, cache.miss_position) == ("none", "empty", 0)
    rt.store.close()


def test_another_prompt_does_not_hide_that_this_one_is_stored_otherwise(tiny_model, tmp_path):
    """Whatever else was asked since the layout changed."""
    rt = runtime(tiny_model("llama"), tmp_path)
    tokens = tiny.ids(20, seed=4)
    tokens[0] = 100
    run(rt, tokens)
    rt.store.close()
    rt = runtime(tiny_model("llama"), tmp_path, store_bits=8)
    for other in (3, 200):
        run(rt, [other, *tokens[1:]])
        assert rt.store.writer.flush(10)
        assert run(rt, tokens, keep=False)[1].cache.miss_reason == "other_layout"
    rt.store.close()
