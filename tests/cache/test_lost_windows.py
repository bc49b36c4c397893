"""Leaves that have lost a window, and blocks that hang on their rows."""

from __future__ import annotations

from tests.cache.machine import scratch
from tests.cache.synthetic import MODELS, ask

TOKENS = list(range(1, 22))


def test_rows_that_a_block_hangs_on_stay_where_the_index_is_built_again():
    """A leaf without a window was not merged into a block that has one, if the block needs the leaf's rows."""
    model = MODELS["mixed"]
    with scratch() as base:
        for tokens in (TOKENS[:6], TOKENS):  # a leaf, and the block that it became part of
            store = model.open(base / "c", block=8)
            ask(model, store, tokens)
            assert store.writer.flush(20)
            entries = [store.index.entry(key) for (key,) in store.index.execute("SELECT key FROM entries")]
            store.close()
        (block,) = [e for e in entries if e is not None and e.end == 8]
        leaf = next(e for e in entries if e is not None and e.key == block.base)
        assert "state" in leaf.kinds and "rows" in leaf.kinds
        store.folder.file(leaf.key, "window").unlink()
        for suffix in ("", "-wal", "-shm"):
            (base / "c" / f"index.sqlite{suffix}").unlink(missing_ok=True)
        store = model.open(base / "c", block=8)
        assert ask(model, store, TOKENS, keep=False).tokens == 20
        store.close()
