"""Whose files they are: what is of another model, or of a folder that nobody has vouched for, is never served."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxkv.cache.legacy import tier as tier_module
from mlxkv.cache.legacy.omlx_file import read_block
from mlxkv.cache.legacy.omlx_keys import our_names, same_model
from mlxkv.cache.legacy.omlx_layers import fit
from mlxkv.cache.legacy.tier import LegacyTier
from mlxkv.cache.store import PrefixStore
from tests.cache.machine import scratch
from tests.cache.synthetic import MODELS, ask, twin

from .damage import TOKENS
from .harness import NAME, codes, fingerprint, taken_in, vouch
from .omlx_writer import Block, Style, blocks, prepare, save
from .stories import hashed

MODEL = MODELS["growing"]
ENDS = (4, 8, 12)


def chain(of=MODEL, **style) -> list[Block]:
    return blocks(hashed(of, TOKENS, ENDS), Style(**style))


@pytest.fixture
def base() -> Iterator[Path]:
    with scratch() as folder:
        yield folder


def opened(base: Path, folder: Path, names: tuple[str, ...] = (NAME,)) -> tuple[PrefixStore, LegacyTier]:
    store = MODEL.open(base / "c")
    vouch(store, folder)
    store.legacy = tier = LegacyTier((folder,), names)
    return store, tier


def test_a_file_that_says_another_model_is_of_none(base):
    """Its name is the hash of our model's name and tokens, and what it says of itself is not."""
    save(base / "omlx", hashed(MODEL, [1, 2, 3, 4], (4,)), Style())  # one of ours: its block size is tried
    for block in chain(twin(MODEL), sidecars=False):
        block.metadata["model_name"] = "/models/another"
        block.save(base / "omlx")
    store, tier = opened(base, base / "omlx")
    assert ask(MODEL, store, TOKENS, keep=False).tokens == 0
    assert tier.counters.refused == 3
    store.close()


def test_a_file_without_tokens_is_looked_for_under_its_own_name(base):
    ours = f"/models/{MODEL.identity.name}"
    prepare(base / "omlx")
    for block in chain(model=ours, sidecars=False):
        block.metadata["model_name"] = f"/elsewhere/{MODEL.identity.name}" if block.index else ours
        block.save(base / "omlx")
    store = MODEL.open(base / "c")
    report = taken_in(MODEL, base / "omlx", store, prompt=TOKENS, source_model=None)
    assert report.imported.files == 1 and sorted(codes(report).values()) == ["NO_TOKENS"] * 2
    assert ask(MODEL, store, TOKENS, keep=False).tokens == 4
    store.close()


@pytest.mark.parametrize(
    ("theirs", "ours", "same"),
    [
        ("/hub/models--other--Qwen3-Next/snapshots/0123", our_names("qwen/Qwen3-Next"), False),
        ("other/Qwen3-Next", our_names("qwen/Qwen3-Next"), False),
        ("qwen/Qwen3-Next", our_names("0123", Path("/hub/models--qwen--Qwen3-Next/snapshots/0123")), True),
        ("other/Qwen3-Next", our_names("Qwen3-Next", Path("/hub/models--qwen--Qwen3-Next/snapshots/0123")), False),
        ("/hub/models--qwen--Qwen3-Next/snapshots/0123", our_names("Qwen3-Next", Path("/models/Qwen3-Next")), True),
        ("/models/Qwen3-Next", our_names("qwen/Qwen3-Next"), True),
        ("qwen/Qwen3-Next", our_names("Qwen3-Next", Path("models/Qwen3-Next")), True),
    ],
)
def test_models_of_one_name_but_of_different_people(theirs, ours, same):
    assert same_model(theirs, ours) is same


def test_another_persons_model_of_the_same_name_is_not_served(base):
    save(base / "omlx", hashed(twin(MODEL), TOKENS, ENDS), Style(model="/hub/models--other--big/snapshots/1"))
    store, _ = opened(base, base / "omlx", our_names("ours/big"))
    assert ask(MODEL, store, TOKENS, keep=False).tokens == 0
    store.close()


def test_a_link_that_leads_elsewhere_meanwhile_is_not_vouched_for(base):
    save(base / "good", hashed(MODEL, [1, 2, 3, 4], (4,)), Style())
    save(base / "wrong", hashed(twin(MODEL), TOKENS, ENDS), Style())
    link = base / "omlx"
    link.symlink_to(base / "good")
    store, _ = opened(base, link)
    assert ask(MODEL, store, TOKENS, keep=False).tokens == 0
    link.unlink()
    link.symlink_to(base / "wrong")
    assert ask(MODEL, store, TOKENS, keep=False).tokens == 0
    link.unlink()
    link.symlink_to(base / "good")
    save(base / "good", hashed(MODEL, TOKENS, ENDS), Style())
    assert ask(MODEL, store, TOKENS, keep=False).tokens == 12
    store.close()


def test_looking_in_a_slow_folder_ends_in_time(base, monkeypatch):
    """Each file is asked for after the time is over: only the first is."""
    folder = base / "omlx"
    save(folder, hashed(MODEL, TOKENS, ENDS), Style())
    store, tier = opened(base, folder)
    tier.seconds = 0.01
    asked = []

    def slow(path, *args, **kwargs):
        if str(path).startswith(str(folder)) and str(path).endswith(".safetensors"):
            asked.append(path)
            time.sleep(0.02)
        return stat_of(path, *args, **kwargs)

    stat_of = os.lstat
    monkeypatch.setattr(tier_module.os, "lstat", slow)
    before = fingerprint(folder)
    asked.clear()
    for _ in range(3):  # the next request goes on where the last one had to stop
        assert ask(MODEL, store, TOKENS, keep=False).tokens == 0
        assert 0 < len(asked) <= 2
        asked.clear()
    monkeypatch.undo()
    tier.seconds = 20
    assert ask(MODEL, store, TOKENS, keep=False).tokens == 12
    assert not tier.counters.faults
    assert fingerprint(folder) == before
    store.close()


def test_of_a_chain_of_very_many_blocks_the_first_are_served(base, monkeypatch):
    """Any file may say that blocks are of one token: not every request may look for as many files."""
    monkeypatch.setattr(tier_module, "_BLOCKS", 2)
    save(base / "omlx", hashed(MODEL, TOKENS, ENDS), Style())
    store, tier = opened(base, base / "omlx")
    assert ask(MODEL, store, TOKENS, keep=False).tokens == 8
    assert not tier.counters.faults
    store.close()


def test_what_nobody_asks_for_is_not_kept_of_a_block(base):
    """A chain's blocks are held at a time: not what else their headers may be full of."""
    prepare(base)
    paths = []
    for block in chain():
        block.metadata["note"] = "x" * (4 << 20)
        block.metadata["layer_meta_states"] = '["' + "y" * (4 << 20) + '", []]'
        paths.append(block.save(base))
    tracemalloc.start()
    try:
        fitted = [fit(read_block(path), MODEL.layout) for path in paths]
        assert len(fitted) == 3 and tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()
