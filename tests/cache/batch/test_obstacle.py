"""What keeps the rows of a model from being decoded together is found before any real row is."""

from __future__ import annotations

import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxkv.cache.batch import obstacle
from mlxkv.cache.layout import probe
from tests import headed, tiny
from tests.cache.batch.schedules import tolerance
from tests.probe import runtime

#: MORE's, by what is said of them; of all others nothing is
OBSTACLES = {
    "llama4": "Layer 0 keeps its state in ChunkedKVCache",
    "minimax_m3_vl": "logits differ",  # keeps the last block of all rows, wherever a row ends
    "deepseek_v32": "logits differ",  # in exact only: it gathers the rows it chose in another order
}


def asked(model) -> str | None:
    def make():
        return make_prompt_cache(model)

    return obstacle(model, make, probe(model, make))


@pytest.mark.parametrize(
    "arch", [*tiny.ARCHS, *OBSTACLES, "longcat_flash", "longcat_flash_ngram", "rwkv7", "deepseek_v4"]
)
def test_architectures(arch):
    if arch == "deepseek_v32" and tolerance():
        pytest.skip("only bits show it")
    reason = asked(tiny.build(arch)[0])
    assert OBSTACLES[arch] in (reason or "") if arch in OBSTACLES else reason is None


def test_a_choice_among_rows_that_begins_beyond_a_length():
    """Sixteen blocks of 128 rows, as the published model has them: two short sequences show nothing."""
    reason = asked(tiny.build("minimax_m3_vl", index_block_size=128, index_topk_blocks=16)[0])
    assert reason is not None and "at 4,300 and 2,500 tokens" in reason


def test_a_model_with_a_head(tmp_path):
    rt = runtime(headed.make(tmp_path / "m"), tmp_path / "c")
    assert rt.store is not None and rt.layout is not None and "head" in rt.layout.describe()
    rt.store.close()
    assert obstacle(rt.model, rt.make_cache, rt.layout) is None


class Wrapped:
    """A llama with something wrong about it."""

    def __init__(self, wrong) -> None:
        self.llama, self.wrong = tiny.build("llama")[0], wrong
        self.layers = self.llama.layers

    def __call__(self, tokens, cache):
        return self.wrong(self.llama(tokens, cache=cache), cache)


def failing(logits, cache):
    int(cache[0].offset)  # one position for all rows
    return logits


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (failing, "fails on several sequences at once"),
        (lambda logits, cache: logits + 0.1 * logits.mean(axis=0, keepdims=True), "beside another row"),
        (lambda logits, cache: logits * float("nan") if logits.shape[0] > 1 else logits, "differ by nan"),
        (lambda logits, cache: logits, ""),
    ],
)
def test_a_model_that_does_not_keep_rows_apart(wrong, said):
    reason = asked(Wrapped(wrong))
    assert said in reason if said else reason is None


def test_a_slot_that_keeps_something_of_an_earlier_row():
    class Leaky:
        """Adds how many joint steps were made before."""

        def __init__(self) -> None:
            self.llama, self.steps = tiny.build("llama")[0], 0
            self.layers = self.llama.layers

        def __call__(self, tokens, cache):
            logits = self.llama(tokens, cache=cache)
            if tokens.shape[0] > 1:
                logits, self.steps = logits + self.steps, self.steps + 1
            return logits

    reason = asked(Leaky())
    assert reason is not None and "after a row came to another's place" in reason
