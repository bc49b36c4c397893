"""Which rows and blocks a kind needs to be resumed: the tables of reference/state-handoff.md, D.2 and D.3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from mlx_lm.models.cache import KVCache

from mlxkv.cache import kinds
from mlxkv.cache.layout import probe
from mlxkv.cache.member import Member
from mlxkv.cache.rules import RULES, RuleError, UnknownKind, required_blocks, spans, window_blocks
from tests import tiny
from tests.probe import run, runtime


@dataclass(frozen=True)
class Ruled:
    kind: str
    window: int | None = None
    keep: int = 0
    path: tuple[int, ...] = (4, 1)


@pytest.mark.parametrize(
    ("member", "block", "blocks"),
    [
        (Ruled("chunked", 8192), 1024, 8),
        (Ruled("chunked", 8192), 3000, 3),
        (Ruled("chunked", 8192), 8192, 1),
        (Ruled("chunked", 8193), 1024, 9),
        (Ruled("chunked", 1), 1024, 1),
        (Ruled("chunked", 8192), 16384, 1),
        (Ruled("window", 128), 256, 1),
        (Ruled("window", 1024), 256, 4),
        (Ruled("window", 1025), 256, 5),
        (Ruled("recurrent"), 256, 1),
        (Ruled("growing"), 256, None),
    ],
)
def test_blocks_of_a_window(member, block, blocks):
    assert window_blocks(member, block) == blocks


@pytest.mark.parametrize("kind", ["chunked", "window"])
@pytest.mark.parametrize("size", [0, -1, None])
def test_a_window_of_nothing_is_refused(kind, size):
    for ask in (window_blocks, lambda m, block: required_blocks(m, block, 5), spans):
        with pytest.raises(RuleError, match=r"Layer 4\.1 .* attends within"):
            ask(Ruled(kind, size), 256)


@pytest.mark.parametrize(
    ("chunk", "block", "position", "blocks"),
    [
        (8192, 3000, 3000, 1),
        (8192, 3000, 9000, 1),
        (8192, 3000, 15_000, 3),
        (8192, 3000, 15_360, 4),
        (8192, 3000, 16_384, 0),
        (8192, 1024, 15_360, 7),
        (8, 3, 15, 3),  # where whole blocks, rounded down, would be two
    ],
)
def test_blocks_that_are_needed_at_a_place(chunk, block, position, blocks):
    assert required_blocks(Ruled("chunked", chunk), block, position) == blocks


def test_what_is_needed_is_what_a_mask_leaves_visible():
    """By brute force: never more than the window's blocks at a block's end, at most one more inside a block, none more
    where blocks divide chunks."""
    for chunk in range(1, 30):
        member = Ruled("chunked", chunk)
        for block in range(1, 20):
            most = window_blocks(member, block) or 0
            for n in range(90):
                seen = [p for p in range(n) if p // chunk == n // chunk]
                assert [p for a, b in spans(member, n) for p in range(a, b)] == seen
                need = required_blocks(member, block, n)
                assert need == len({p // block for p in seen})
                assert need <= most + (n % block != 0 and chunk % block != 0), (chunk, block, n)


@pytest.mark.parametrize(
    ("member", "needed"),
    [
        (Ruled("growing"), [(0, 30)]),
        (Ruled("head"), [(0, 30)]),
        (Ruled("window", 12), [(18, 30)]),
        (Ruled("window", 12, keep=3), [(0, 3), (18, 30)]),
        (Ruled("window", 28, keep=3), [(0, 30)]),
        (Ruled("chunked", 12), [(24, 30)]),
        (Ruled("chunked", 10), []),
        (Ruled("recurrent"), []),
        (Ruled("latents", 7), [(23, 30)]),
        (Ruled("latents", 0), []),  # a window of the next token alone
        (Ruled("entries"), [(0, 30)]),
        (Ruled("pending"), []),
    ],
)
def test_rows_that_are_needed(member, needed):
    assert spans(member, 30) == needed
    assert spans(member, 0) == []


class Other(kinds.Growing):
    kind = "sparse"


def test_a_kind_without_a_rule_is_refused_at_start(tiny_model, tmp_path, monkeypatch):
    """Not taken for one that needs all rows, nor for one that needs none: the model runs, nothing is kept."""
    with pytest.raises(UnknownKind, match=r"Layer 4\.1 keeps its state as 'sparse'"):
        window_blocks(Ruled("sparse"), 8)
    monkeypatch.setitem(kinds.KINDS, KVCache, Other)
    rt = runtime(tiny_model("llama"), tmp_path)
    with pytest.raises(UnknownKind, match="Layer 0 keeps its state as 'sparse'"):
        probe(rt.model, rt.make_cache)
    assert rt.store is None and rt.layout is None
    tokens = tiny.ids(20, seed=1)
    for _ in range(2):
        _, completion = run(rt, tokens)
        assert (completion.usage.cached_tokens, completion.cache.miss_reason) == (0, "off")


def subclasses(cls: type) -> Iterator[type]:
    for inner in cls.__subclasses__():
        yield inner
        yield from subclasses(inner)


def test_every_kind_has_a_rule():
    import mlxkv.cache.batch.batch
    import mlxkv.cache.compressed_members
    import mlxkv.cache.head  # noqa: F401

    declared = {m.kind for m in subclasses(Member) if m.__module__.startswith("mlxkv.") and hasattr(m, "kind")}
    assert {"growing", "chunked", "hidden", "entries"} <= declared <= set(RULES)
