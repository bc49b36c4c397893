"""One reservation formula: the tables of reference/state-handoff.md §G, and real caches that hold just what it says."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from mlxkv.cache.layout import probe
from mlxkv.cache.state import SequenceState
from mlxkv.decode.memory import live_bytes
from mlxkv.decode.reservation import (
    BLOCK,
    DRAFTERS,
    AlignTable,
    Attention,
    CrossAttention,
    Recurrent,
    chunked_peak,
    ladder,
    lookahead,
    reserve,
    reserved_blocks,
    ring_peak,
    ring_rows,
    rungs,
    shapes,
    warm_up,
)
from mlxkv.errors import ConfigError
from tests import tiny

MAX = 1024


@pytest.mark.parametrize(
    ("drafter", "k", "rows"),
    [
        ("none", 3, 0),
        *[(name, 3, 3) for name in ("eagle", "eagle3", "mtp", "dspark", "draft_model")],
        ("dflash", 3, 4),
        ("dflash", 7, 8),
        *[(name, 3, 0) for name in ("ngram", "ngram_gpu", "suffix", "medusa", "mlp", "hidden_states")],
    ],
)
def test_lookahead(drafter, k, rows):
    assert lookahead(drafter, k) == rows


def test_an_unknown_drafter_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError) as e:
        lookahead("magic", 3)
    assert "magic" in e.value.message and all(name in e.value.cure for name in DRAFTERS)
    with pytest.raises(ConfigError, match="mode"):
        Recurrent("some")
    with pytest.raises(ConfigError, match="-1"):
        lookahead("mtp", -1)


@pytest.mark.parametrize(
    ("n", "ahead", "blocks"),
    [
        *[(5, 0, 1), (5, 3, 1), (5, 4, 1), (13, 3, 1), (13, 4, 2), (14, 3, 2), (16, 0, 1), (16, 3, 2), (17, 3, 2)],
        *[(1022, 4, 64), (1024, 4, 64), (1, 0, 1), (17, 0, 2)],
    ],
)
def test_blocks_of_attention(n, ahead, blocks):
    assert reserved_blocks(n, Attention(), lookahead=ahead, max_len=MAX) == blocks
    assert reserve(n, lookahead=ahead, max_len=MAX, granule=BLOCK) == blocks * BLOCK


@pytest.mark.parametrize(
    ("n", "plain", "align"),
    [(5, 4, 4), (13, 4, 4), (14, 5, 4), (16, 5, 4), (17, 5, 5), (1023, 67, 67), (1024, 67, 67)],
)
def test_blocks_of_recurrent_layers(n, plain, align):
    for mode, blocks in (("none", plain), ("all", plain), ("align", align)):
        assert reserved_blocks(n, Recurrent(mode, 3), lookahead=3, max_len=MAX) == blocks


@pytest.mark.parametrize(("n", "blocks"), [(1, 1), (16, 1), (17, 2)])
def test_blocks_without_speculation(n, blocks):
    for mode in ("none", "all", "align"):
        assert reserved_blocks(n, Recurrent(mode), max_len=MAX) == blocks


@pytest.mark.parametrize("n", [1, 500])
def test_blocks_of_cross_attention(n):
    assert reserved_blocks(n, CrossAttention(1500), lookahead=4, max_len=MAX) == 94


#: (k, look-ahead, [(computed, scheduled, attention, none, align)])
TRAJECTORIES = [
    (3, 3, [(0, 5, 1, 4, 4), (5, 4, 1, 4, 4), (9, 1, 1, 4, 4), (10, 4, 2, 5, 4)]),
    (5, 5, [(0, 7, 1, 6, 6), (7, 6, 2, 7, 6), (13, 1, 2, 7, 6), (14, 6, 2, 7, 7)]),
    (7, 8, [(0, 9, 2, 9, 8), (9, 8, 2, 9, 9), (17, 1, 2, 9, 9), (18, 8, 3, 10, 9)]),
]


@pytest.mark.parametrize(("k", "ahead", "steps"), TRAJECTORIES)
def test_blocks_along_a_speculative_run(k, ahead, steps):
    assert lookahead("dflash" if ahead > k else "mtp", k) == ahead
    for computed, scheduled, *want in steps:
        specs = (Attention(), Recurrent("none", k), Recurrent("align", k))
        assert [reserved_blocks(computed + scheduled, s, lookahead=ahead, max_len=MAX) for s in specs] == want, (
            computed,
            scheduled,
        )


@pytest.mark.parametrize(("n", "ahead", "without"), [(5, 2, 2), (9, 3, 3), (10, 4, 3), (14, 5, 4), (15, 5, 4)])
def test_lookahead_counts_at_block_4(n, ahead, without):
    assert reserved_blocks(n, Attention(), lookahead=3, max_len=MAX, block=4) == ahead
    assert reserved_blocks(n, Attention(), max_len=MAX, block=4) == without


def grown(table: AlignTable, n: int, ids) -> tuple[AlignTable, int]:
    wanted = table.wants(n)
    return table.grown(n, [next(ids) for _ in range(wanted)]), wanted


@pytest.mark.parametrize(
    "steps",
    [
        [(5, 4, 4), (18, 5, 1), (33, 6, 1), (49, 7, 1)],
        [(100, 10, 4), (104, 10, 0), (112, 10, 0), (113, 11, 1)],
        [(5, 4, 4), (100, 10, 1), (101, 10, 0)],
    ],
)
def test_table_of_mode_align(steps):
    """(tokens, length of the table, new blocks) with three running states for drafts."""
    table, ids = AlignTable(3), iter(range(100))
    for n, length, new in steps:
        table, taken = grown(table, n, ids)
        assert (len(table.columns), taken) == (length, new), n
    if steps[0][0] == 100:
        assert table.columns == (*[None] * 6, 0, 1, 2, 3, 4)
    with pytest.raises(ValueError, match="1 are wanted"):
        table.grown(1000, [])


@settings(deadline=None)
@given(st.integers(0, 4), st.integers(1, 9), st.lists(st.integers(0, 70), min_size=1, max_size=12), st.booleans())
def test_tables_of_mode_align_keep_their_promises(s, block, more, restored):
    """Real blocks are never lost or doubled, the last 1 + s columns are real, at most one is new a step."""
    first = 1 + more[0]
    hit = first // block if restored else 0
    table = AlignTable(s, block, (*[None] * (hit - 1), 1000) if hit else ())
    ids, n = iter(range(1000)), first
    for i, step in enumerate(more):
        n = first if i == 0 else n + step
        before = table
        table, taken = grown(table, n, ids)
        assert len(table.columns) == max(len(before.columns), reserved_blocks(n, Recurrent("align", s), block=block))
        assert taken <= (1 if before.runs else 1 + s)
        real = [c for c in table.columns if c is not None]
        assert len(real) == len(set(real)) == before.real + taken == table.real
        if table.runs:
            assert None not in table.columns[-1 - s :]
        assert set(before.columns) - {None} <= set(real)


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(0, 12), st.integers(1, 5000), st.sampled_from([1, 16, 256]))
def test_reserve_is_enough_capped_aligned_and_rises(n, ahead, max_len, granule):
    n = min(n, max_len)
    got = reserve(n, lookahead=ahead, max_len=max_len, granule=granule)
    assert got % granule == 0 and n <= min(n + ahead, max_len) <= got
    assert got < min(n + ahead, max_len) + granule and got <= reserve(max_len, granule=granule)
    assert got <= reserve(n + 1, lookahead=ahead, max_len=max_len, granule=granule)
    assert reserve(n, granule=granule) <= reserve(n, lookahead=ahead, granule=granule)


@settings(deadline=None)
@given(st.integers(1, 70000), st.integers(0, 12), st.integers(1, 70000), st.sampled_from([256, 1024]))
def test_ladder_has_room_and_few_rungs(n, ahead, max_len, first):
    n = min(n, max_len)
    got = ladder(n, max_len, lookahead=ahead, first=first)
    assert min(n + ahead, max_len) <= got <= reserve(max_len)
    assert got <= max(first, 2 * (n + ahead))
    steps = rungs(max_len, first=first)
    assert got in steps and list(steps) == sorted(set(steps)) and len(steps) <= 10
    assert got == first * 2 ** ((got // first).bit_length() - 1) or got == reserve(max_len)
    assert ladder(n, lookahead=ahead, first=first) >= got


@settings(deadline=None)
@given(st.integers(1, 9000), st.sampled_from(sorted(DRAFTERS)), st.integers(0, 8), st.data())
def test_shapes_are_those_that_a_run_can_meet(max_len, drafter, k, data):
    known = shapes(max_len, (1, 2, 4, 6), k=k, drafter=drafter)
    assert len(known) == len(set(known))
    n, slots = data.draw(st.integers(1, max_len)), data.draw(st.sampled_from([1, 2, 4, 6]))
    drafting = drafter != "none" and k > 0
    width = data.draw(st.sampled_from([1, k + 1] if drafting else [1]))
    assert (ladder(n, max_len, lookahead=lookahead(drafter, k)), slots, width) in known
    assert {w for _, _, w in known} == ({1, k + 1} if drafting else {1})


@pytest.mark.parametrize(("max_len", "k", "rungs"), [(3000, 3, [256, 512, 1024, 2048, 3072]), (300, 300, [512])])
def test_nothing_is_warmed_up_that_no_run_meets(max_len, k, rungs):
    met = {ladder(n, max_len, lookahead=k) for n in range(1, max_len + 1)}
    assert sorted(met) == rungs
    assert {(c, s) for c, s, _ in shapes(max_len, (1, 2), k=k, drafter="mtp")} == {(c, s) for c in met for s in (1, 2)}


@pytest.mark.parametrize(("k", "width", "prompt", "steps", "length"), [(0, 1, 2, 3, 5), (3, 4, 5, 5, 25)])
def test_warm_up(k, width, prompt, steps, length):
    made = warm_up(k)
    assert (made.width, made.prompt, made.steps, made.length) == (width, prompt, steps, length)
    blocks = reserved_blocks(made.length, Attention(), lookahead=k)
    assert made.requests(8, 1000, 100, blocks) == 8
    assert made.requests(8, 3 * prompt, 100, blocks) == 3
    assert made.requests(8, 1000, 1 + 2 * blocks, blocks) == 2
    assert made.requests(8, 1000, 1, blocks) == 1


# real caches


def rows_of(caches) -> set[int]:
    """Row counts of the arrays that are there."""
    arrays = [a for c in caches for a in (c.keys, c.values)]
    return {part.shape[2] for a in arrays for part in (a if isinstance(a, (tuple, list)) else [a])}


@pytest.fixture(scope="module")
def llama():
    return tiny.build("llama", num_hidden_layers=1)[0]


@pytest.mark.parametrize("cache", [KVCache, lambda: QuantizedKVCache(32, 8)], ids=["plain", "quantised"])
@pytest.mark.parametrize(("k", "ahead", "steps"), TRAJECTORIES)
def test_growing_caches_hold_what_is_reserved(llama, cache, k, ahead, steps):
    """Prefill, verify steps and plain ones: rejected rows are taken back, and each step writes inside its room."""
    ids = mx.array(tiny.ids(64))
    state, plain = SequenceState.new([cache()]), SequenceState.new([cache()])
    for computed, scheduled, blocks, *_ in steps:
        for s in (state, plain):
            for member in s.members or ():
                member.rewind(s.position - computed)
            s.position = computed
        state.reserve(reserve(computed + scheduled, lookahead=ahead, max_len=MAX, granule=BLOCK))
        logits = []
        for s in (state, plain):
            logits.append(llama(ids[None, computed : computed + scheduled], cache=s.caches))
            s.advance(scheduled)
            mx.eval(logits[-1], s.live())
        assert rows_of(state.caches) == {blocks * BLOCK}
        assert blocks * BLOCK >= computed + scheduled
        assert mx.array_equal(*logits)


def test_room_is_never_taken_away_and_the_cap_holds(llama):
    state = SequenceState.new([KVCache()])
    ids = mx.array(tiny.ids(40))
    seen = []
    for end in (5, 6, 30, 31, 39, 40):
        state.reserve(reserve(end, lookahead=4, max_len=40, granule=BLOCK))
        llama(ids[None, state.position : end], cache=state.caches)
        state.advance(end - state.position)
        mx.eval(state.live())
        seen += rows_of(state.caches)
    assert seen == [16, 16, 48, 48, 48, 48]
    state.reserve(16)
    assert rows_of(state.caches) == {48} and state.position == 40


@pytest.mark.parametrize("arch", ["qwen3_5", "gemma3_text", "falcon_h1", "lfm2"])
def test_a_mixed_run_holds_what_is_reserved(arch):
    """Chunks of a prompt, then single tokens, with buffers that grow by the formula: growing members hold just that,
    states of fixed size always the same, rings what ``ring_rows`` says."""
    model, _ = tiny.build(arch)
    layout = probe(model, lambda: make_prompt_cache(model))
    state = SequenceState.new(make_prompt_cache(model))
    ids, held = mx.array(tiny.ids(90)), {}
    for width in (11, 16, 6, 1, 1, 1, 20, *[1] * 12):
        n = state.position + width
        capacity = reserve(n, lookahead=3, max_len=70, granule=BLOCK)
        state.reserve(capacity)
        model(ids[None, state.position : n], cache=state.caches)
        before = state.position
        state.advance(width)
        mx.eval(state.live())
        want, most = 0, live_bytes(layout, capacity, 20)
        for member, spec in zip(state.members or (), layout.members, strict=True):
            rows = capacity
            if spec.kind == "window":
                rows = held[member.path] = ring_rows(held.get(member.path, 0), before, width, spec.window or 0)
                assert rows <= ring_peak(capacity, spec.window or 0, 20)
            arrays = member.arrays().values()
            assert [a.shape for a in arrays] == [t.sized(rows) for t in spec.tensors]
            want += sum(a.nbytes for a in arrays)
        assert want <= most
        if not layout.windows:
            assert want == most


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([4, 8, 13, 300, 600]),
    st.sampled_from([0, 2]),
    st.sampled_from([5, 16, 300]),
    st.sampled_from([40, 700]),
    st.randoms(use_true_random=False),
)
def test_rings_hold_what_is_foreseen(size, keep, chunk, capacity, rng: random.Random):
    ring, held, position = RotatingKVCache(size, keep), 0, 0
    while position < capacity:
        width = min(rng.choice([1, 1, 1, 2, chunk]), capacity - position)
        row = mx.zeros((1, 1, width, 1))
        ring.update_and_fetch(row, row)
        held = ring_rows(held, position, width, size)
        position += width
        assert ring.keys is not None
        assert held == ring.keys.shape[2] <= ring_peak(capacity, size, chunk)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([8, 100, 300]),
    st.sampled_from([5, 16, 300]),
    st.sampled_from([40, 700]),
    st.randoms(use_true_random=False),
)
def test_attention_chunks_hold_at_most_what_is_foreseen(size, chunk, capacity, rng: random.Random):
    cache, position, most = ChunkedKVCache(size), 0, 0
    while position < capacity:
        width = min(rng.choice([1, 1, 1, 2, chunk]), capacity - position, chunk)
        cache.maybe_trim_front()
        row = mx.zeros((1, 1, width, 1))
        cache.update_and_fetch(row, row)
        position += width
        assert cache.keys is not None
        most = max(most, cache.keys.shape[2])
    assert min(size, capacity) <= most <= chunked_peak(capacity, size, chunk)


@pytest.mark.parametrize("s", [0, 3])
def test_states_at_borders_stay_where_the_table_says(s):
    """Real states in mode align: what a column keeps is the state at its border, wherever drafts' blocks moved."""
    model, _ = tiny.build("lfm2", num_hidden_layers=2, full_attn_idxs=[1])
    ids = mx.array(tiny.ids(80))

    def conv(caches) -> np.ndarray:
        return np.array(caches[0].cache[0])

    caches = make_prompt_cache(model)
    cold = {}
    for position in range(80):
        model(ids[None, position : position + 1], cache=caches)
        cold[position + 1] = conv(caches)

    rng = random.Random(s)
    for _ in range(5):
        table, free, blocks = AlignTable(s), iter(range(100)), {}
        caches, position, borders = make_prompt_cache(model), 0, {}
        while position < 80:
            end = min(80, position + rng.choice([1, 2, 7, 16, BLOCK - position % BLOCK]))
            table, _ = grown(table, end, free)
            assert len(set(table.columns) - {None}) == table.real
            model(ids[None, position:end], cache=caches)
            position = end
            running = len(table.columns) - 1 - s
            assert running == -(-position // BLOCK) - 1
            blocks[table.columns[running]] = conv(caches)
            for draft in table.columns[running + 1 :]:
                blocks[draft] = np.full_like(conv(caches), np.nan)  # of tokens that may be rejected
            if position % BLOCK == 0:
                borders[running] = position
        assert borders
        for column, at in borders.items():
            assert np.array_equal(blocks[table.columns[column]], cold[at]), (column, at)
