"""Two processes store the same block with different boundaries: whoever's rows are there are used."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from mlxkv.cache.record import Reader
from tests.cache.machine import scratch
from tests.cache.synthetic import BLOCK, MODELS, ask, verify

MODEL, PROMPT = MODELS["mixed"], [1, 2, 3, 4, 5, 6, 7]


def written(folder: Path, *ends: int) -> None:
    store = MODEL.open(folder)
    ask(MODEL, store, PROMPT, ends=ends)
    store.close()


@pytest.mark.parametrize("kinds", [("rows", "window"), ("rows",), ("window",)])
@pytest.mark.parametrize("mine", [(2,), ()], ids=["a-delta", "all-rows"])
def test_rows_that_start_elsewhere_than_the_index_says(kinds, mine):
    """The other process's files came later, its line in the index earlier (or power took the line back)."""
    with scratch() as base:
        written(base / "a", *mine)
        written(base / "b", *({(2,), ()} - {mine}).pop())
        for path in sorted((base / "b" / "records").rglob("*.safetensors")):
            to = base / "a" / path.relative_to(base / "b")
            if path.name.split(".")[1] in kinds and to.exists():
                shutil.copy(path, to)
        store = MODEL.open(base / "a")
        found = ask(MODEL, store, PROMPT, keep=False)
        if kinds == ("rows", "window") and mine:
            assert found.reason is None and not store.faults  # nothing was lost, and nothing is called damage
        ask(MODEL, store, PROMPT)
        assert store.writer.flush(20)
        assert ask(MODEL, store, PROMPT, keep=False).reason is None
        assert not list((base / "a" / "quarantine").iterdir())
        verify(base / "a", store)
        store.close()


def test_entries_that_stand_elsewhere_than_the_chain_says():
    """An index whose entries are all moved by a block fits itself, and no look-up finds them: they are written again,
    each after the one it hangs on."""
    with scratch() as base:
        written(base / "c", 2, 5)
        with closing(sqlite3.connect(base / "c" / "index.sqlite")) as db, db:
            db.execute(
                f"UPDATE entries SET start = start + {BLOCK}, end = end + {BLOCK}, row_start = row_start + {BLOCK}"
            )
        for _ in range(3):
            written(base / "c", 2, 5)
        store = MODEL.open(base / "c")
        assert ask(MODEL, store, PROMPT, keep=False).reason is None
        store.close()


def test_an_index_from_before_rows_were_written_again():
    """The rows before a block's own were evicted, the block was written again whole, then power took the index back."""
    with scratch() as base:
        written(base / "c", 2)
        before = (base / "c" / "index.sqlite").read_bytes()
        for path in list((base / "c" / "records").rglob("*.safetensors")):
            with Reader.open(path) as reader:
                if reader.meta.end == 2:
                    path.unlink()
        written(base / "c")
        (base / "c" / "index.sqlite").write_bytes(before)
        store = MODEL.open(base / "c")
        assert ask(MODEL, store, PROMPT, keep=False).reason is None
        verify(base / "c", store)
        store.close()
