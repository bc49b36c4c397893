"""Attention within chunks (Llama-4's kind): resumed anywhere from the rows of the chunk alone, whatever the blocks."""

from __future__ import annotations

from pathlib import Path

import mlx_lm.models.llama4
import numpy as np
import pytest

from mlxkv.cache.record import Reader
from mlxkv.cache.rules import RULES
from mlxkv.cache.store import PrefixStore
from mlxkv.decode.options import Options
from mlxkv.decode.runtime import Runtime, open_runtime
from tests import tiny
from tests.cache.equality import tail
from tests.cache.stores import records
from tests.probe import TOLERANCE, run

TOKENS = tiny.ids(201, seed=21)


def opened(model: Path, folder: Path, block: int) -> tuple[Runtime, PrefixStore]:
    options = Options(model=model, cache_dir=folder, block_size=block, ram_budget=0, prefill_chunk=12)
    rt, _ = open_runtime(options)
    assert rt.store is not None
    return rt, rt.store


def made(folder: Path, chunk: int) -> Path:
    return tiny.make("llama4", folder / "m", attention_chunk_size=chunk)


def resumed(rt: Runtime, n: int, cold: bool = True) -> int:
    """Where a prompt that parts from TOKENS at ``n`` was resumed. ``cold``: its logits are those of a cold run."""
    prompt = TOKENS[:n] + tail(n, 1 + n % 5, TOKENS)
    logits, completion = run(rt, prompt, keep=False)
    if cold:
        expected, _ = run(rt, prompt, use_cache=False)
        assert np.abs(logits - expected).max() <= TOLERANCE * np.abs(expected).max(), n
    return completion.usage.cached_tokens


def held(path: Path) -> range:
    with Reader.open(path) as reader:
        return range(reader.meta.row_start, reader.meta.end)


# blocks that divide chunks, that chunks divide, and others
@pytest.mark.parametrize(("chunk", "block", "last"), [(8, 4, 18), (6, 12, 26), (8, 5, 42)])
def test_every_place_is_resumed_with_the_logits_of_a_cold_run(tmp_path, chunk, block, last):
    model = made(tmp_path, chunk)
    rt, store = opened(model, tmp_path / "c", block)
    for n in range(1, last):  # each end of a prompt is a place
        run(rt, TOKENS[: n + 1])
    store.close()
    rt, store = opened(model, tmp_path / "c", block)
    places = [*range(1, last)]
    assert [resumed(rt, n) for n in places] == places
    assert not store.faults and store.restores.nbytes_read["ssd"]
    store.close()


# (chunk, block, place, blocks whose windows are read): D.3, with its block more than ceil(chunk / block)
EXACT = [(8, 3, 15, [2, 3, 4]), (8, 5, 31, [4, 5, 6]), (12, 8, 24, []), (8, 8, 13, [1]), (12, 8, 23, [1, 2])]


@pytest.mark.parametrize(("chunk", "block", "n", "blocks"), EXACT)
def test_just_the_blocks_that_are_needed_are_read(tmp_path, chunk, block, n, blocks):
    rt, store = opened(made(tmp_path, chunk), tmp_path / "c", block)
    run(rt, TOKENS[: n + 1])
    assert store.writer.flush(20)
    windows = {path: held(path) for path in records(tmp_path / "c", "window")}
    assert sorted(p for span in windows.values() for p in span) == [*range(n + 1)]  # the last one is the answer's
    needed = [path for path, span in windows.items() if span.start < n and span.start // block in blocks]
    assert len(needed) == len(blocks)
    for path in windows.keys() - set(needed):
        path.unlink()
    assert resumed(rt, n) == n and not store.faults
    for path in needed:  # without any of them it is not
        kept = path.read_bytes()
        path.unlink()
        assert resumed(rt, n, cold=path == needed[0]) < n
        store.close()
        path.write_bytes(kept)
        rt, store = opened(tmp_path / "m", tmp_path / "c", block)
        assert resumed(rt, n, cold=False) == n
    store.close()


# what other runtimes had, or might have: rows of whole blocks, rounded down; a window that ends at the prompt's end
# (of one token more); all rows of the last chunk's length
MUTANTS = {
    "floor": lambda m, n: [(max(0, -(-n // 3) - m.window // 3) * 3, n)],
    "from the prompt's end": lambda m, n: [((n + 1) // m.window * m.window, n)],
    "a window": lambda m, n: [(max(0, n - m.window), n)],
}


@pytest.mark.parametrize("name", MUTANTS)
def test_another_rule_is_no_hit(tmp_path, monkeypatch, name):
    rt, store = opened(made(tmp_path, 8), tmp_path / "c", 3)
    run(rt, TOKENS[:16])
    assert store.writer.flush(20)
    assert resumed(rt, 15) == 15
    monkeypatch.setitem(RULES, "chunked", MUTANTS[name])
    assert resumed(rt, 15) == 0 and store.faults
    store.close()


def test_who_uses_the_class_hides_earlier_chunks():
    """Its rule rests on that. Another architecture of a newer mlx-lm with this class has to be looked at first."""
    folder = Path(mlx_lm.models.llama4.__file__).parent
    users = {path.stem for path in folder.glob("*.py") if "ChunkedKVCache" in path.read_text(encoding="utf-8")}
    assert users == {"cache", "llama4"}


def test_a_growing_conversation_writes_each_row_once(tmp_path):
    """Each turn resumes where the last one ended, whichever chunk that is in, and adds its own rows."""
    model = made(tmp_path, 12)
    rt, store = opened(model, tmp_path / "c", 8)
    written, at = [], 0
    for n in range(20, 201, 20):
        _, completion = run(rt, TOKENS[:n], max_tokens=1)
        assert completion.usage.cached_tokens == at
        assert store.writer.flush(20)
        at = n
        written.append(sum(path.stat().st_size for path in records(tmp_path / "c")))
        for kind in ("rows", "window"):
            spans = sorted((held(path) for path in records(tmp_path / "c", kind)), key=lambda span: span.start)
            assert [p for span in spans for p in span] == [*range(n)]
    store.close()
    first, *_, last = (b - a for a, b in zip(written, written[1:], strict=False))
    assert last < 1.3 * first  # bytes, headers and all
