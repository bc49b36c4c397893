"""A loss of power: oMLX syncs nothing, so that a file has its name and its length, and pages of zeros at its end."""

from __future__ import annotations

import pytest

from mlxkv.cache.legacy.tier import LegacyTier
from tests.cache.machine import scratch
from tests.cache.synthetic import MODELS, ask

from .harness import NAME, codes, taken_in, vouch
from .omlx_writer import Style, save
from .stories import hashed

MODEL = MODELS["growing"]
TOKENS = list(range(1, 201))
BLOCK, ENDS = 64, (64, 128, 192)


@pytest.mark.parametrize("live", [True, False])
def test_a_file_whose_end_was_never_written_is_not_served(live):
    with scratch() as base:
        folder = base / "omlx"
        paths = save(folder, hashed(MODEL, TOKENS, ENDS), Style(block=BLOCK))
        whole = paths[1].read_bytes()
        paths[1].write_bytes(whole[:-4096] + bytes(4096))
        store = MODEL.open(base / "c")
        if live:
            vouch(store, folder)
            store.legacy = LegacyTier((folder,), (NAME,))
        else:
            assert codes(taken_in(MODEL, folder, store))[str(paths[1].relative_to(folder))] == "HOLE"
        assert ask(MODEL, store, TOKENS, keep=False).tokens == BLOCK  # raises WrongHit
        store.close()
