"""Folders that oMLX would have written of cold runs of real models, taken in and resumed.

What a run gives that resumes on an imported state is compared with one that never left memory and was cut at the same
places: bit by bit (DESIGN §7, transparent). Against a plain cold run: bits, but for architectures whose sums depend on
the cut (tests/cache/test_equality.py), and the text in any case.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlxkv.cache.record import Reader
from tests import tiny
from tests.cache.stores import records
from tests.cache.test_equality import INEXACT
from tests.probe import BLOCK, equal, kept_in_memory, run, runtime

from .harness import codes, fingerprint, taken_in
from .omlx_writer import Style, save
from .stories import story

BORDERS = (8, 16, 24)
#: architecture, style, where the last stand is, and whether states are in it
CASES = {
    "rows": ("llama", Style(block=8), 24),
    "rows of version 2": ("llama", Style(block=8, version="2", names="keys"), 24),
    "windows": ("gemma3_text", Style(block=8), 24),
    "cumulative": ("falcon_h1", Style(block=8), 24),
    "cumulative of version 2": ("falcon_h1", Style(block=8, version="2", names="keys"), 24),
    "cumulative, last block alone": ("falcon_h1", Style(block=8, snapshots=frozenset()), 24),
    "per member": ("falcon_h1", Style(block=8, composite="pm", stamped=True), 24),
    "states that nothing proves": ("qwen3_5", Style(block=8), 0),
}


class Run:
    """One architecture: its folder, its prompt (messages end at the borders), what a cold run gives."""

    def __init__(self, arch: str, model: Path) -> None:
        self.arch, self.model = arch, model
        self.tokens = tiny.ids(30, seed=31)
        for end in BORDERS:
            self.tokens[end - 1] = tiny.EOS
        self.rt = runtime(model, None)
        self.story = story(self.rt.model, self.tokens, BORDERS)
        self.cold, done = run(self.rt, self.tokens, use_cache=False, max_tokens=64)
        self.text = done.token_ids


@pytest.fixture(scope="module")
def runs(tiny_model):
    made: dict[str, Run] = {}

    def get(arch: str) -> Run:
        if arch not in made:
            made[arch] = Run(arch, tiny_model(arch))
        return made[arch]

    return get


@pytest.mark.parametrize("case", CASES)
def test_an_imported_prefix_resumes_as_if_it_had_never_left_memory(runs, tmp_path, case):
    arch, style, stand = CASES[case]
    cold = runs(arch)
    save(tmp_path / "omlx", cold.story, style)
    before = fingerprint(tmp_path / "omlx")
    rt = runtime(cold.model, tmp_path / "c")
    report = taken_in(rt, tmp_path / "omlx", rt.store)
    logits, done = run(rt, cold.tokens, keep=False, max_tokens=64)
    assert done.usage.cached_tokens == stand, codes(report)
    assert done.token_ids == cold.text
    if stand:
        edges = [] if rt.layout.growing_only else [b for b in BORDERS if b <= stand]
        assert equal(logits, kept_in_memory(cold.rt, cold.tokens[:stand] + [0], cold.tokens, edges, stand))
    assert np.abs(logits - cold.cold).max() <= INEXACT.get(arch, (0.0,))[0] * np.abs(cold.cold).max()
    rt.store.close()
    assert fingerprint(tmp_path / "omlx") == before


@pytest.mark.parametrize("arch", ["falcon_h1", "gemma3_text"])
def test_its_records_are_those_of_a_cold_run(runs, tmp_path, arch):
    """A cold run that was cut at the same places stored the same bytes under the same names."""
    cold = runs(arch)
    save(tmp_path / "omlx", cold.story, Style(block=8))
    rt, own = runtime(cold.model, tmp_path / "c"), runtime(cold.model, tmp_path / "own")
    taken_in(rt, tmp_path / "omlx", rt.store)
    run(own, cold.tokens)
    for each in (rt, own):
        each.store.close()
    seen = 0
    for path in records(tmp_path / "c"):
        with Reader.open(path) as mine, Reader.open(tmp_path / "own" / path.relative_to(tmp_path / "c")) as theirs:
            assert mine.tensors == theirs.tensors
            for name in mine.tensors:
                assert bytes(mine.read(name)) == bytes(theirs.read(name))
        seen += 1
    assert seen == len(BORDERS) * len(rt.layout.kinds)


@pytest.mark.parametrize("theirs", [4, 12])
def test_grids_that_differ(runs, tmp_path, theirs):
    """Blocks of 4 and of 12 become ours of 8."""
    cold = runs("falcon_h1")
    stops = range(theirs, 25, theirs)
    save(tmp_path / "omlx", story(cold.rt.model, cold.tokens[:24], stops), Style(block=theirs))
    rt = runtime(cold.model, tmp_path / "c")
    assert rt.store.block == BLOCK != theirs
    taken_in(rt, tmp_path / "omlx", rt.store)
    for p in stops:
        prompt = cold.tokens[:p] + [7, 7]
        logits, done = run(rt, prompt, keep=False)
        assert done.usage.cached_tokens == p
        edges = [s for s in stops if s <= p]
        assert equal(logits, kept_in_memory(cold.rt, cold.tokens[:p] + [0], prompt, edges, p))
    rt.store.close()


def test_a_state_two_tokens_too_far_on_is_never_resumed(runs, tmp_path):
    """Stored from caches that stood at 26 while the chain ends at 24: refused, and the answer is the cold one."""
    cold = runs("falcon_h1")
    told = story(cold.rt.model, cold.tokens, (8, 16, 24, 26))
    save(tmp_path / "omlx", told, Style(block=8, snapshots=frozenset(), live=26))
    rt = runtime(cold.model, tmp_path / "c")
    report = taken_in(rt, tmp_path / "omlx", rt.store)
    assert "OVER_ADVANCED" in codes(report).values()
    logits, done = run(rt, cold.tokens, keep=False, max_tokens=64)
    assert done.usage.cached_tokens == 0 and done.token_ids == cold.text and equal(logits, cold.cold)
    rt.store.close()
