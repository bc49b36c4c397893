"""Drafts in a batch: whatever its rows keep of them, each row is what single steps make of it alone."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxkv.cache.batch import Batch, BatchError, obstacle_of_drafts
from mlxkv.cache.layout import probe
from mlxkv.decode.runtime import open_runtime  # noqa: F401 - prepares numerics before a model is built
from mlxkv.decode.step import Steps
from mlxkv.models.spans import install
from tests import headed, tiny
from tests.cache.batch.schedules import Schedule, Twin, tolerance
from tests.cache.test_kinds import CACHES
from tests.probe import runtime

#: growing rows, windows, recurrent layers with a journal, and several of them
DRAFTS = (
    "llama", "qwen3_5", "qwen3_5_moe", "qwen3_next", "falcon_h1", "nemotron_h", "granitemoehybrid", "mamba2", "plamo2",
    "lfm2", "lfm2_moe", "gemma3_text", "gpt_oss", "gemma3n",
)  # fmt: skip
#: what is said of others whose rows can share a batch
OBSTACLES = {
    **{name: "Layer 0 is recurrent and keeps no journal" for name in ("jamba", "rwkv7", "bailing_moe_linear")},
    # in exact only: MLA multiplies in another order for one token than for several
    **{name: "differ by" for name in ("deepseek_v3", "kimi_linear", "longcat_flash")},
}


def journalled(arch: str, **options):
    """(model, make_cache, layout, journals)"""
    model, _ = tiny.build(arch, **options)
    live = probe(model, lambda: make_prompt_cache(model))
    return model, lambda: make_prompt_cache(model), live, install(model)[0]


def scheduled(arch: str, seed: int, **options) -> Schedule:
    model, make_cache, live, journals = journalled(arch)
    return Schedule(model, make_cache, seed, live, journals=journals, drafts=8, **options)


@pytest.mark.parametrize("arch", DRAFTS)
def test_rows_keep_what_they_keep_of_drafts(arch):
    schedule = scheduled(arch, seed=3)
    assert schedule.run(12) <= tolerance(), schedule.moves
    assert schedule.moves["cycle"] > 2


@pytest.mark.parametrize("name", CACHES)
def test_every_cache_class_of_a_llama(name):
    model, _ = tiny.build("llama")
    schedule = Schedule(model, CACHES[name], 2, drafts=8)
    assert schedule.run(20) <= tolerance(), schedule.moves


def test_one_row_in_one_slot_after_its_company_left():
    schedule = scheduled("qwen3_5", seed=4, slots=1)
    schedule.join()
    for _ in range(6):
        schedule.cycle()
        schedule.step()
    assert schedule.run(0) <= tolerance()


def test_a_head_beside_its_body_is_shown_what_its_row_kept(tmp_path):
    rt = runtime(headed.make(tmp_path / "m"), tmp_path / "c")
    assert rt.store is not None and rt.live is not None and "head" in rt.live.describe()
    rt.store.close()
    shared, done = install(rt.model.model)  # unless the runtime did
    schedule = Schedule(rt.model, rt.make_cache, 7, rt.live, journals=shared if done else rt.spans, drafts=4)
    assert schedule.run(16) <= tolerance(), schedule.moves


@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
def test_a_free_slot_full_of_nan_stands_beside(arch):
    schedule = scheduled(arch, seed=6)
    schedule.join()
    (slot,) = schedule.twins
    poison = [mx.array(a) for a in schedule.batch.arrays()]
    for a in poison:
        a[1 - slot] = float("nan")
    schedule.batch.bind(poison)
    for _ in range(3):
        schedule.cycle()
    assert schedule.run(0) <= tolerance() and schedule.batch.positions[1 - slot] == 0
    schedule.join()
    schedule.cycle()
    assert schedule.run(0) <= tolerance()


def begun(arch: str, capacity: int):
    """A batch of two slots with a row of eleven tokens in the first, and its steps."""
    model, make_cache, live, journals = journalled(arch)
    batch = Batch(make_cache, live, 2, capacity, spare=8)
    batch.join(0, Twin.start(model, make_cache, tiny.ids(11), 11, False).copy(make_cache))
    return batch, Steps(model, compile="off", journals=journals), make_cache


def ids(width: int) -> mx.array:
    return mx.array([tiny.ids(width, 1), [0] * width], mx.int32)


def test_what_is_not_possible_is_refused_and_changes_nothing():
    batch, steps, _ = begun("qwen3_5", 16)
    before = [mx.array(a) for a in batch.arrays()]
    with pytest.raises(BatchError, match="Rows \\[0\\] have no room for 6 tokens more in 16 columns"):
        steps.verify(batch, ids(6))
    with pytest.raises(BatchError, match="No verify step waits"):
        steps.commit(batch, [1, 0])
    assert batch.positions == [11, 0]
    assert all(mx.array_equal(a, b).item() for a, b in zip(before, batch.arrays(), strict=True))
    steps.verify(batch, ids(5))
    for kept in ([0, 0], [6, 0], [2, 1], [2]):
        with pytest.raises(BatchError, match="cannot keep"):
            steps.commit(batch, kept)
    for call in (
        lambda: steps.run(batch, mx.zeros((2,), mx.int32)),
        lambda: steps.verify(batch, ids(2)),
        lambda: batch.take(0),
        lambda: batch.resize(3, 32, {0: 0}),
    ):
        with pytest.raises(BatchError, match="waits for its commit"):
            call()
    assert batch.positions == [16, 0]
    steps.commit(batch, [5, 0])
    assert batch.positions == [16, 0]


def test_a_row_may_leave_before_the_commit():
    """After a failure everybody does."""
    batch, steps, make_cache = begun("qwen3_5", 32)
    other = Twin(steps._model, batch.take(0))
    batch.join(1, other.copy(make_cache))
    steps.verify(batch, ids(3))
    batch.leave(0)
    steps.commit(batch, [0, 2])
    assert batch.positions == [0, 13] and batch.rows == [1]


def test_an_empty_slot_is_computed_too():
    batch, steps, _ = begun("llama", 32)
    batch.resize(2, 4, {})
    with pytest.raises(BatchError, match="does not fit into 4 columns"):
        steps.verify(batch, ids(5))


@pytest.mark.parametrize("arch", ["llama", "qwen3_5", "gemma3_text", "mamba2", "deepseek_v4", *OBSTACLES])
def test_who_can_draft_is_asked_of_the_model(arch):
    if OBSTACLES.get(arch) == "differ by" and tolerance():
        pytest.skip("only bits show it")
    reason = obstacle_of_drafts(*journalled(arch), 8)
    assert OBSTACLES[arch] in (reason or "") if arch in OBSTACLES else reason is None


class Hasty:
    """A llama that sees the tokens behind when it is given several."""

    def __init__(self) -> None:
        self.llama = tiny.build("llama")[0]
        self.layers = self.llama.layers

    def __call__(self, tokens, cache):
        logits = self.llama(tokens, cache=cache)
        return logits + 0.1 * logits.mean(axis=1, keepdims=True) if 1 < tokens.shape[1] < 4 else logits


def asked(model, most: int) -> str | None:
    def make():
        return make_prompt_cache(model)

    return obstacle_of_drafts(model, make, probe(model, make), None, most)


def test_a_model_that_is_another_with_several_tokens():
    reason = asked(Hasty(), 8)
    assert reason is not None and "when 2 tokens are verified at once" in reason
    assert asked(Hasty(), 0) == "nothing is drafted"
