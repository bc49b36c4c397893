"""Every layout that oMLX wrote: what is imported is bit for bit what the tokens make it, and stands where it can."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from mlxkv.cache.record import Reader
from mlxkv.cache.state import SequenceState
from tests.cache.machine import scratch
from tests.cache.stores import records
from tests.cache.synthetic import MODELS, Model, ask, verify

from .damage import LAYOUTS, TOKENS
from .harness import codes, fingerprint, taken_in
from .omlx_writer import Style, save
from .stories import hashed

BORDERS = (4, 8, 12)
STOPS = (*BORDERS, 14)
MANY = {
    n: Model(f"slots{n}", lambda n=n: [CacheList(KVCache(), ArraysCache(n)), KVCache()])  # type: ignore[misc]
    for n in (1, 3, 4, 16)
}
FLAT = {
    n: Model(f"flat{n}", lambda n=n: [ArraysCache(n), RotatingKVCache(5), KVCache()])  # type: ignore[misc]
    for n in (1, 2, 3, 16)
}
LISTS = Model("lists", lambda: [CacheList(KVCache(), KVCache()), KVCache()])
KEPT = Model("kept", lambda: [RotatingKVCache(7, keep=2), KVCache()])

#: model, style, chunk of the run, and where a look-up of the first n tokens then stands, for n = 5, 9, 13
CASES: dict[str, tuple[Model, dict[str, Any], int, tuple[int, int, int]]] = {
    "rows": (MODELS["growing"], {}, 99, (4, 8, 12)),
    "rows of version 2": (MODELS["growing"], {"version": "2", "names": "keys"}, 99, (4, 8, 12)),
    "rows of version 2, new names": (MODELS["growing"], {"version": "2"}, 99, (4, 8, 12)),
    "stamped rows": (MODELS["growing"], {"stamped": True}, 99, (4, 8, 12)),
    "without class names": (MODELS["growing"], {"class_names": ""}, 99, (4, 8, 12)),
    "classes of states": (MODELS["growing"], {"class_names": "tuple"}, 99, (4, 8, 12)),
    "windows": (LAYOUTS["window"], {}, 99, (4, 8, 12)),
    "windows of version 2": (LAYOUTS["window"], {"version": "2", "names": "keys"}, 99, (4, 8, 12)),
    "rings of single steps": (LAYOUTS["window"], {}, 1, (4, 8, 12)),
    "rings of threes": (LAYOUTS["window"], {}, 3, (4, 8, 12)),
    "rings that keep": (KEPT, {}, 99, (4, 8, 12)),
    "rings that keep, of single steps": (KEPT, {}, 1, (4, 8, 12)),
    "cumulative": (LAYOUTS["pair"], {}, 99, (4, 8, 12)),
    "cumulative of version 2": (LAYOUTS["pair"], {"version": "2", "names": "keys"}, 99, (4, 8, 12)),
    "cumulative, stamped": (LAYOUTS["pair"], {"stamped": True}, 99, (4, 8, 12)),
    "cumulative, last block alone": (LAYOUTS["pair"], {"snapshots": frozenset()}, 99, (0, 0, 12)),
    "cumulative, second block and last": (LAYOUTS["pair"], {"snapshots": frozenset({8})}, 99, (0, 8, 12)),
    "per member": (LAYOUTS["pair"], {"composite": "pm"}, 99, (4, 8, 12)),
    "per member, stamped": (LAYOUTS["pair"], {"composite": "pm", "stamped": True}, 99, (4, 8, 12)),
    "per member of version 2": (LAYOUTS["pair"], {"composite": "pm", "version": "2"}, 99, (4, 8, 12)),
    "per member, cut short": (
        LAYOUTS["pair"],
        {"composite": "pm", "snapshots": frozenset({4, 8}), "live": 14},
        99,
        (4, 8, 8),
    ),
    "lists of windows and states": (MODELS["list"], {}, 99, (4, 8, 12)),
    "lists of windows and states, single steps": (MODELS["list"], {}, 1, (4, 8, 12)),
    "lists of windows and states, per member": (MODELS["list"], {"composite": "pm"}, 99, (4, 8, 12)),
    "lists of rows": (LISTS, {}, 99, (4, 8, 12)),
    "lists of rows of version 2": (LISTS, {"version": "2", "names": "keys"}, 99, (4, 8, 12)),
    "bfloat16, states beside a window": (MODELS["mixed"], {}, 99, (4, 8, 12)),
    "states proven by a window": (FLAT[2], {}, 99, (4, 8, 12)),
    "states proven by a window, last block alone": (FLAT[2], {"snapshots": frozenset()}, 99, (0, 0, 12)),
    "one slot that was never written": (FLAT[1], {"cut_slots": True}, 99, (0, 0, 0)),
    "slots cut to two": (FLAT[3], {"cut_slots": True}, 99, (0, 0, 0)),
    "states that nothing proves": (LAYOUTS["bare"], {}, 99, (0, 0, 0)),
    **{f"{n} slots in a list": (m, {}, 99, (4, 8, 12)) for n, m in MANY.items()},
    **{f"{n} slots in a list, per member": (m, {"composite": "pm"}, 99, (4, 8, 12)) for n, m in MANY.items()},
    **{f"{n} flat slots": (m, {}, 99, (4, 8, 12)) for n, m in FLAT.items() if n != 2},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block", [4, 8, 3], ids=["same grid", "ours is twice", "ours is odd"])
def test_what_is_imported_stands_where_it_can(case: str, block: int):
    model, style, chunk, stands = CASES[case]
    with scratch() as base:
        save(base / "omlx", hashed(model, TOKENS, STOPS, chunk=chunk), Style(**style))
        before = fingerprint(base / "omlx")
        store = model.open(base / "c", block=block)
        report = taken_in(model, base / "omlx", store)
        found = [ask(model, store, TOKENS[:n], keep=False) for n in (5, 9, 13)]
        verify(base / "c", store)
        store.close()
        assert fingerprint(base / "omlx") == before
    assert tuple(f.tokens for f in found) == stands, (codes(report), report)
    if stands == (4, 8, 12):
        assert report.imported.files == report.files == 3, codes(report)
    assert not report.why and not report.unstored.files


@pytest.mark.parametrize("style", [Style(), Style(composite="pm")], ids=["cumulative", "per member"])
def test_rows_of_4_8_and_12_become_slices_of_4(style):
    """As a cold run would have stored them: the same records, but for who wrote them."""
    model = LAYOUTS["pair"]
    with scratch() as base:
        save(base / "omlx", hashed(model, TOKENS, BORDERS), style)
        imported, cold = model.open(base / "imported"), model.open(base / "cold")
        taken_in(model, base / "omlx", imported)
        ask(model, cold, TOKENS[:13], ends=(4, 8))
        assert cold.writer.flush(20)
        for store in (imported, cold):
            store.close()
        spans = []
        for path in records(base / "imported"):
            with Reader.open(path) as mine, Reader.open(base / "cold" / path.relative_to(base / "imported")) as theirs:
                assert mine.tensors == theirs.tensors
                for name in mine.tensors:
                    assert bytes(mine.read(name)) == bytes(theirs.read(name))
                assert (mine.meta.start, mine.meta.end, mine.meta.tokens) == (
                    theirs.meta.start,
                    theirs.meta.end,
                    theirs.meta.tokens,
                )
                spans.append((mine.meta.kind, mine.meta.start, mine.meta.end))
        assert sorted(spans) == [(kind, n, n + 4) for kind in ("rows", "state") for n in (0, 4, 8)]


@pytest.mark.parametrize("n", [4, 16])
def test_bytes_grow_with_the_tokens_and_a_dry_run_says_what_is_freed(n):
    """A cumulative chain weighs about n²/2 blocks; what is stored of it weighs n."""
    model, tokens = LAYOUTS["pair"], list(range(1, 4 * n + 2))
    with scratch() as base:
        save(base / "omlx", hashed(model, tokens, range(4, 4 * n + 1, 4)), Style())
        weight = sum(p.stat().st_size for p in (base / "omlx").rglob("*.safetensors"))
        store = model.open(base / "c")
        promised = taken_in(model, base / "omlx", store, dry_run=True)
        assert not records(base / "c")
        report = taken_in(model, base / "omlx", store)
        assert ask(model, store, tokens, keep=False).tokens == 4 * n
        store.close()
        stored = {kind: [p.stat().st_size for p in records(base / "c", kind)] for kind in ("rows", "state")}
        assert len(stored["rows"]) == len(stored["state"]) == n
        assert max(stored["rows"]) - min(stored["rows"]) < 64  # digits of positions
        written = sum(map(sum, stored.values()))
    assert promised.new_bytes == report.new_bytes == written
    assert promised.frees == report.frees == weight - written
    assert promised.imported.files == report.imported.files == n


class Gaps(Model):
    """A member with a slot that is None and one of no elements."""

    def _feed(self, caches: list[Any], tokens: Any, a: int, b: int) -> None:
        super()._feed(caches, tokens, a, b)
        slots = caches[0][1]
        slots[1], slots[2] = None, mx.zeros((1, 4, 0, 6))


@pytest.mark.parametrize("style", [Style(), Style(composite="pm")], ids=["cumulative", "per member"])
def test_empty_slots(style):
    """None stays None, and an array of no elements keeps its shape."""
    model = Gaps("gaps", lambda: [CacheList(KVCache(), ArraysCache(4))])
    with scratch() as base:
        story = hashed(model, TOKENS, BORDERS)
        save(base / "omlx", story, style)
        store = model.open(base / "c")
        report = taken_in(model, base / "omlx", store)
        assert report.imported.files == 3, codes(report)
        for n in BORDERS:
            plan = store.lookup(TOKENS[: n + 1])
            state, found, _ = store.restore(plan, TOKENS[: n + 1], lambda: SequenceState.new(model.make_cache()), 16)
            assert found.tokens == n
            got, want = state.caches[0][1].cache, story.at[n][0].members[1].slots
            assert got[1] is None and got[2].shape == (1, 4, 0, 6)
            assert all(np.array_equal(np.array(got[i]), want[i]) for i in (0, 3))
        store.close()


def test_windows_of_different_lengths_are_refused_by_name():
    model = MODELS["window"]
    with scratch() as base:
        save(base / "omlx", hashed(model, TOKENS, BORDERS), Style())
        store = model.open(base / "c")
        assert set(codes(taken_in(model, base / "omlx", store)).values()) == {"LAYOUT"}
        store.close()


def test_without_consent_nothing_is_taken():
    """Which weights made these files nobody can read from them."""
    model = LAYOUTS["pair"]
    with scratch() as base:
        save(base / "omlx", hashed(model, TOKENS, BORDERS), Style())
        store = model.open(base / "c")
        report = taken_in(model, base / "omlx", store, consent=False)
        assert set(codes(report).values()) == {"NO_CONSENT"} and not records(base / "c")
        store.close()


def test_a_given_prompt_is_as_good_as_sidecars():
    model = LAYOUTS["pair"]
    with scratch() as base:
        save(base / "omlx", hashed(model, TOKENS, BORDERS), Style(sidecars=False, stamped=True))
        store = model.open(base / "c")
        report = taken_in(model, base / "omlx", store, prompt=TOKENS)
        assert report.imported.files == 3, codes(report)
        assert ask(model, store, TOKENS[:13], keep=False).tokens == 12
        store.close()


def test_what_else_stands_in_such_a_folder_is_left_alone():
    model = LAYOUTS["pair"]
    with scratch() as base:
        folder = base / "omlx"
        (block, *_) = save(folder, hashed(model, TOKENS, BORDERS), Style())
        for name in ("_boundary_snapshots/r1/4.safetensors", "_gdn_sidecars/ab/x.safetensors", "vision_features/a"):
            (folder / name).parent.mkdir(parents=True)
            (folder / name).write_bytes(block.read_bytes())
        (folder / "dflash_l2").symlink_to("/")
        (block.with_suffix(".txt")).write_text("text")
        before = fingerprint(folder)
        store = model.open(base / "c")
        report = taken_in(model, folder, store)
        assert report.imported.files == 3
        store.close()
        assert fingerprint(folder) == before


def test_a_second_import_finds_nothing_to_do():
    model = LAYOUTS["pair"]
    with scratch() as base:
        save(base / "omlx", hashed(model, TOKENS, BORDERS), Style())
        store = model.open(base / "c")
        taken_in(model, base / "omlx", store)
        again = taken_in(model, base / "omlx", store)
        assert (again.already.files, again.records, again.new_bytes) == (3, 0, 0)
        store.close()
