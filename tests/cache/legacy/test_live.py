"""oMLX folders as a tier of their own: asked at a miss, served in the same request, and from then on from our store."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import tiny
from tests.cache.stores import records
from tests.probe import equal, kept_in_memory, run, runtime

from . import damaged_blocks, damaged_files
from .damage import ALL
from .harness import fingerprint, served_live, vouch
from .omlx_writer import Style, blocks, prepare, save
from .stories import story

assert damaged_blocks and damaged_files  # they fill ALL

BORDERS = (8, 16, 24)
ARCHS = ("falcon_h1", "gemma3_text", "llama")


class Told:
    """A prompt of 30 tokens whose first 24 an oMLX stored, under the path of the model as it does."""

    def __init__(self, arch: str, model: Path, base: Path, **style) -> None:
        self.model, self.folder, self.cache = model, base / "omlx", base / "cache"
        self.tokens = tiny.ids(30, seed=31)
        for end in BORDERS:
            self.tokens[end - 1] = tiny.EOS
        rt = runtime(model, None)
        self.cold_rt = rt
        self.style = Style(model=str(model), block=8, sidecars=False, **style)
        self.story = story(rt.model, self.tokens, (*BORDERS, 26))
        self.cold, done = run(rt, self.tokens, use_cache=False, max_tokens=64)
        self.text = done.token_ids

    def save(self) -> None:
        save(self.folder, self.story, self.style)

    def open(self, *, live: bool = True, consent: bool = True, **options):
        rt = runtime(self.model, self.cache, legacy_dirs=(self.folder,) if live else (), **options)
        if consent:
            vouch(rt.store, self.folder)
        return rt

    def ask(self, rt):
        """(cached tokens, source): the answer is the cold one, and its logits are those of a run that remembered."""
        logits, done = run(rt, self.tokens, keep=False, max_tokens=64)
        cached = done.usage.cached_tokens
        assert done.token_ids == self.text
        if cached in BORDERS:
            edges = [] if rt.layout.growing_only else list(BORDERS)
            assert equal(logits, kept_in_memory(self.cold_rt, [*self.tokens[:cached], 0], self.tokens, edges, cached))
        else:
            assert cached == 0 and equal(logits, self.cold)
        return cached, done.cache.source


@pytest.mark.parametrize("arch", ARCHS)
def test_served_in_the_same_request_and_from_our_store_from_then_on(tiny_model, tmp_path, arch):
    told = Told(arch, tiny_model(arch), tmp_path)
    told.save()
    before = fingerprint(told.folder)
    rt = told.open()
    assert told.ask(rt) == (24, "legacy")
    assert rt.store.writer.flush(20)
    assert told.ask(rt) == (24, "ssd")
    rt.store.close()
    assert fingerprint(told.folder) == before
    shutil.rmtree(told.folder)
    rt = told.open(live=False)
    assert told.ask(rt) == (24, "ssd")
    rt.store.close()


def test_served_from_ram_the_next_time(tiny_model, tmp_path):
    told = Told("falcon_h1", tiny_model("falcon_h1"), tmp_path)
    told.save()
    rt = told.open(ram_budget=None)
    assert told.ask(rt) == (24, "legacy")
    assert told.ask(rt) == (24, "ram")
    rt.store.close()


def test_without_consent_nothing_is_asked(tiny_model, tmp_path):
    told = Told("falcon_h1", tiny_model("falcon_h1"), tmp_path)
    told.save()
    rt = told.open(consent=False)
    for _ in range(2):
        assert told.ask(rt) == (0, "none")
    assert rt.store.writer.flush(20) and not records(told.cache)
    rt.store.close()


def test_consent_is_for_these_weights_alone(tiny_model, tmp_path):
    """The model was trained further and stands under the same path: what was vouched for before does not hold."""
    model = tmp_path / "m"
    shutil.copytree(tiny_model("falcon_h1"), model)
    told = Told("falcon_h1", model, tmp_path)
    told.save()
    rt = told.open()
    assert told.ask(rt) == (24, "legacy")
    rt.store.close()
    shutil.rmtree(model)
    tiny.make("falcon_h1", model, seed=1)
    now = Told("falcon_h1", model, tmp_path)
    assert now.text != told.text
    rt = now.open(consent=False)
    assert now.ask(rt) == (0, "none")
    rt.store.close()


@pytest.mark.parametrize(
    ("modes", "cached"), [("ccp", 16), ("ppc", 16), ("cpp", 8), ("pcc", 8), ("cpc", 8), ("pcp", 8)]
)
def test_mixed_chains_are_never_joined(tiny_model, tmp_path, modes, cached):
    """Cumulative (c) and per-member (p) blocks of one chain: what comes before the first odd one can be resumed."""
    told = Told("falcon_h1", tiny_model("falcon_h1"), tmp_path)
    made = {"c": blocks(told.story, told.style)}
    made["p"] = blocks(told.story, Style(model=str(told.model), block=8, sidecars=False, composite="pm"))
    prepare(told.folder)
    for i, mode in enumerate(modes):
        made[mode][i].save(told.folder)
    rt = told.open()
    assert told.ask(rt)[0] == cached
    rt.store.close()


def test_a_state_that_stands_too_far_on_is_not_served(tiny_model, tmp_path):
    told = Told("falcon_h1", tiny_model("falcon_h1"), tmp_path, snapshots=frozenset(), live=26)
    told.save()
    rt = told.open()
    assert told.ask(rt) == (0, "none")
    rt.store.close()


#: the first file that is damaged in each way; scripts/soak does them all
FIRST = {d.codes[0]: d for d in reversed(ALL)}


@pytest.mark.parametrize("code", sorted(FIRST))
def test_what_is_damaged_is_a_miss(code):
    served_live(FIRST[code])
