"""Cycles of one sequence in every architecture whose state can be taken back: after each of them, logits of what is
kept and all arrays are those of single steps with mlx-lm's own caches."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxkv.cache.ring import with_rings
from mlxkv.cache.state import SequenceState
from mlxkv.decode.drafters.ngram import NGram
from mlxkv.decode.drafting import Drafting, choose, examine
from mlxkv.decode.options import Options
from mlxkv.decode.solo import Solo
from mlxkv.models.spans import install
from tests import tiny
from tests.architectures import DRAFTS_INEXACT
from tests.cache.batch.schedules import Twin, apart, farthest, tolerance
from tests.decode.scripted import PATTERNS, pattern

ARCHS = (*tiny.ARCHS, *tiny.MORE_ARCHS, *tiny.OWN_ARCHS)
#: recurrent layers without a journal, or state of no known kind
WITHOUT = {
    "baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "jamba", "kimi_k3", "longcat_flash_ngram",
    "mamba", "olmo_hybrid", "recurrent_gemma", "rwkv7",
}  # fmt: skip
PROMPT = 9


class Cycling:
    """One sequence that drafts up to 8 tokens, and its twin."""

    def __init__(self, arch: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.model, _ = tiny.build(arch)
        self.journals, _ = install(self.model)
        self.bound = max(tolerance(), DRAFTS_INEXACT.get(arch, (0.0, ""))[0])

    def caches(self, spare: int = 8):
        return with_rings(make_prompt_cache(self.model), spare)

    def begin(self) -> None:
        tokens = tiny.ids(PROMPT, self.random.randrange(1 << 30))
        self.twin = Twin.start(self.model, lambda: self.caches(0), tokens, PROMPT - 1, True)
        state = SequenceState.new(self.caches())
        self.run = Solo(self.model, state, lambda rows: 256, Drafting(NGram(), self.journals, 8))
        self.model(mx.array([tokens[:-1]]), cache=state.caches)
        state.advance(PROMPT - 1)
        state.settle()
        self.step(tokens[-1])

    def step(self, token: int) -> None:
        logits = self.run.forward(mx.array([token], mx.int32), {})
        mx.eval(logits, self.run.live())
        if self.twin.state.position < self.run.position(0):
            self.near(logits[0], self.twin.feed([token]))

    def cycle(self, depth: int, right: int) -> None:
        """``right`` drafts are kept beside the root."""
        before = self.run.position(0)
        tokens = [self.twin.token, *tiny.ids(depth, self.random.randrange(1 << 30))]
        logits = self.run.verify(mx.array([tokens], mx.int32))
        self.run.commit([right + 1], {})
        mx.eval(logits, self.run.live())
        assert self.run.position(0) == before + right + 1
        for i in range(right + 1):
            self.near(logits[0, i], self.twin.feed([tokens[i]]))
        assert farthest(self.run.state, self.twin.state) <= self.bound

    def near(self, mine: mx.array, theirs: mx.array) -> None:
        assert apart(mine, theirs) <= self.bound


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch not in WITHOUT])
def test_every_architecture_takes_back_what_was_not_kept(arch):
    """Depths 1 to 8, and all patterns by turns; windows and chunks of 8 and 12 tokens wrap several times."""
    number = ARCHS.index(arch)
    made = Cycling(arch, number)
    made.begin()
    right = [pattern(name, made.random) for name in PATTERNS]
    for turn, depth in enumerate(made.random.sample(range(1, 9), 8)):
        made.cycle(depth, right[(number + turn) % 4](depth))
        if turn % 3 == 2:
            made.step(made.twin.token)


@pytest.mark.parametrize("arch", sorted(WITHOUT))
def test_the_others_have_layers_without_a_journal(arch):
    made = Cycling(arch, 0)
    rewinds, _, _ = examine(made.model, made.caches, made.journals)
    assert rewinds.why_not and (rewinds.again or rewinds.most == 0)
    assert choose(Options(model=""), head=None, rewinds=rewinds) == ("off", rewinds.why_not)
