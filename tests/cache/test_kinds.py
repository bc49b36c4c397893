"""Every cache class of mlx-lm: what a store kept of it, opened anew, is worth what a run that never left memory has."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlxkv.cache.layout import LayoutError, probe
from mlxkv.cache.record import Reader
from mlxkv.cache.ring import with_rings
from mlxkv.cache.state import PositionError, SequenceState, UnknownCache, members_of
from tests import tiny
from tests.cache.equality import LENGTH, resumed, story
from tests.cache.stores import recached, records, reopened
from tests.probe import BLOCK, equal, run, runtime

#: cache objects for a llama of two layers. Windows of 12 wrap within 37 tokens, and not on a block's edge
CACHES = {
    "quantised": lambda: [QuantizedKVCache(group_size=32, bits=8) for _ in range(2)],
    "quantised beside plain rows": lambda: [KVCache(), QuantizedKVCache(group_size=32, bits=4)],
    "concatenated": lambda: [ConcatenateKVCache() for _ in range(2)],
    "window, wrapped": lambda: [RotatingKVCache(12) for _ in range(2)],
    "window that keeps its first rows, wrapped": lambda: [RotatingKVCache(12, keep=3) for _ in range(2)],
    "window that keeps more than a block": lambda: [RotatingKVCache(20, keep=BLOCK + 3) for _ in range(2)],
    "window that keeps its first rows, not wrapped": lambda: [RotatingKVCache(64, keep=3) for _ in range(2)],
}
GROWING = ("quantised", "quantised beside plain rows", "concatenated")


class Remembering:
    """A llama whose two layers and a sum in float32 share one nested CacheList; two slots of the sum hold nothing."""

    def __init__(self, llama) -> None:
        self.llama = llama

    def __call__(self, tokens, cache):
        (rows, window), memory = cache[0][0].caches, cache[0][1]
        logits = self.llama(tokens, cache=[window, rows])
        inputs = self.llama.model.embed_tokens(tokens).astype(mx.float32)
        total = memory[1] if memory[1] is not None else mx.zeros_like(inputs[:, 0])
        sums = []
        for i in range(tokens.shape[1]):
            total = 0.9 * total + inputs[:, i]
            sums.append(total)
        memory[1] = total
        return logits + self.llama.lm_head(mx.stack(sums, axis=1).astype(logits.dtype))

    @staticmethod
    def make_cache():
        return [CacheList(CacheList(KVCache(), RotatingKVCache(12)), ArraysCache(3))]


@pytest.fixture(scope="module")
def llama(tiny_model, tmp_path_factory):
    rt = runtime(tiny_model("llama"), tmp_path_factory.mktemp("kinds"), prefill_chunk=12)
    rt.store.close()
    return rt


def stored_and_reopened(rt, folder):
    run(rt, story()[0])
    rt.store.close()
    assert not rt.store.writer.counters.faults
    return reopened(rt, folder)


def check(rt):
    """Every boundary is resumed, and in the bits of a run that remembered."""
    tokens, ends = story()
    report = resumed(rt, tokens, ends, range(BLOCK + 2), promise=False)
    assert report["transparent"] == 0.0
    for p, length, cached, _ in report["restored"]:
        if length:
            assert cached == p, (p, length)
        elif rt.layout.growing_only:
            assert cached == p - 1
    assert not rt.store.faults


@pytest.mark.parametrize("name", CACHES)
def test_restored_as_if_it_had_stayed_in_memory(llama, tmp_path, name):
    rt = stored_and_reopened(recached(llama, tmp_path, CACHES[name]), tmp_path)
    assert rt.layout.growing_only == (name in GROWING)
    check(rt)
    rt.store.close()


@pytest.mark.parametrize("writes", ["window", "ring"])
def test_a_window_and_a_ring_read_each_other_s_records(llama, tmp_path, writes):
    """Whether drafts are verified is no part of a key."""
    plain = CACHES["window that keeps its first rows, wrapped"]
    kinds = {"window": plain, "ring": lambda: with_rings(plain(), 8)}
    rt = stored_and_reopened(recached(llama, tmp_path, kinds.pop(writes)), tmp_path)
    (reads,) = kinds.values()
    assert probe(rt.model, reads).digest == rt.layout.digest
    rt = dataclasses.replace(rt, make_cache=reads)
    check(rt)
    rt.store.close()


@pytest.mark.parametrize("arch", ["llama4", "longcat_flash_ngram"])
def test_architectures_with_chunks_and_with_slots_that_fill(tiny_model, tmp_path, arch):
    rt = runtime(tiny_model(arch), tmp_path, prefill_chunk=12)
    rt = stored_and_reopened(rt, tmp_path)
    assert ("chunked" in rt.layout.describe()) == (arch == "llama4")
    check(rt)
    rt.store.close()


def test_a_state_is_not_kept_before_its_slots_have_filled(tiny_model, tmp_path):
    rt = runtime(tiny_model("longcat_flash_ngram"), tmp_path)
    for n in (2, 3, 4, 6):  # it remembers three ids
        tokens = tiny.ids(n, seed=n)
        cold, _ = run(rt, tokens)
        rt.store.writer.flush()
        logits, completion = run(rt, tokens, keep=False)
        assert equal(logits, cold)
        assert completion.usage.cached_tokens == (n - 1 if n - 1 >= 3 else 0)
    assert not rt.store.faults
    rt.store.close()


def test_nested_lists_with_empty_slots_and_another_dtype(tmp_path):
    mixed = tiny.make("llama", tmp_path / "m", sliding_window=12, layer_types=["sliding_attention", "full_attention"])
    rt = runtime(mixed, tmp_path / "plain", prefill_chunk=12)
    rt.store.close()
    rt.model.set_dtype(mx.bfloat16)
    rt = recached(rt, tmp_path / "nested", Remembering.make_cache, Remembering(rt.model))
    assert [(t.name, t.dtype) for t in rt.layout.tensors("rows", "window", "state")] == [
        ("0.0.0.keys", "BF16"),
        ("0.0.0.values", "BF16"),
        ("0.0.1.keys", "BF16"),
        ("0.0.1.values", "BF16"),
        ("0.1.slot1", "F32"),
    ]
    check(stored_and_reopened(rt, tmp_path / "nested"))
    other = probe(rt.model, lambda: [CacheList(*Remembering.make_cache()[0].caches[:1], ArraysCache(2))])
    assert other.digest != rt.layout.digest  # as many tensors, another number of slots


def test_parameters_of_a_kind_are_part_of_the_layout(llama):
    made = [
        lambda: [KVCache(), KVCache()],
        lambda: [QuantizedKVCache(32, 8), QuantizedKVCache(32, 8)],
        lambda: [QuantizedKVCache(32, 4), QuantizedKVCache(32, 4)],
        lambda: [RotatingKVCache(12), RotatingKVCache(12)],
        lambda: [RotatingKVCache(12, keep=3), RotatingKVCache(12, keep=3)],
        lambda: [RotatingKVCache(13), RotatingKVCache(13)],
        lambda: [ChunkedKVCache(12), ChunkedKVCache(12)],
    ]
    assert len({probe(llama.model, make).digest for make in made[:6]}) == 6
    assert members_of(made[6]())[0].params() == {"chunk": 12}


@pytest.mark.parametrize("arch", ["llama4", "gemma3_text"])
def test_no_more_rows_are_read_than_a_window_or_chunk_holds(tiny_model, tmp_path, arch):
    """The rows before are not even opened: a record of theirs may be gone."""
    rt = runtime(tiny_model(arch), tmp_path, prefill_chunk=12)
    rt = stored_and_reopened(rt, tmp_path)
    tokens, ends = story()
    first = min(a for m in rt.layout.members if m.record == "window" for a, _ in m.needs(ends[-1]))
    assert first == (ends[-1] // 12 * 12 if arch == "llama4" else ends[-1] - 8)
    with_tail = [*tokens[: ends[-1]], 1, 2]
    cold, _ = run(rt, with_tail, use_cache=False)
    spans = {path: _rows(path) for path in records(tmp_path, "window")}
    assert any(b <= first for _, b in spans.values())
    for path, (_, b) in spans.items():
        if b <= first:
            path.unlink()
    logits, completion = run(rt, with_tail, keep=False)
    assert completion.usage.cached_tokens == ends[-1]
    assert np.abs(logits - cold).max() <= 2e-6 * np.abs(cold).max()
    next(path for path, (a, b) in spans.items() if a < ends[-1] and first < b and path.exists()).unlink()
    _, completion = run(rt, with_tail, keep=False)
    assert completion.usage.cached_tokens < ends[-1] and completion.cache.miss_reason == "evicted"
    rt.store.close()


def _rows(path):
    with Reader.open(path) as reader:
        return reader.meta.row_start, reader.meta.end


def forward(rt, state, ids):
    logits = rt.model(mx.array(ids)[None], cache=state.caches)
    state.advance(len(ids))
    mx.eval(logits, state.live())
    return np.array(logits[0, -1])


@pytest.mark.parametrize("name", [*GROWING, "chunked"])
def test_taking_tokens_back(llama, tiny_model, name):
    """After a rewind the run goes on as if the tokens had never been; what cannot be taken back is refused."""
    rt, make = llama, CACHES.get(name)
    if make is None:
        rt = runtime(tiny_model("llama4"), None)
        make = rt.make_cache
    tokens, wrong = tiny.ids(30, seed=3), tiny.ids(5, seed=4)
    straight, back = (SequenceState(c, members_of(c)) for c in (make(), make()))
    for state in (straight, back):
        forward(rt, state, tokens[:20])
    forward(rt, back, wrong)
    chunked = [m for m in back.members if m.kind == "chunked"]
    assert len(chunked) == (3 if name == "chunked" else 0)
    for member in back.members:
        with pytest.raises(PositionError):
            member.rewind(member.rewindable() + 1)
        # before 20 the first 8 rows went, with which the first chunk of 12 is not whole
        assert member.rewindable() == (13 if member.kind == "chunked" else 25)
        member.rewind(5)
    back.position -= 5
    for a in (20, 23, 24):
        assert np.array_equal(forward(rt, straight, tokens[a : a + 3]), forward(rt, back, tokens[a : a + 3]))
    assert all(m.position == straight.position for m in [*straight.members, *back.members])


@pytest.mark.parametrize("name", [*CACHES, "chunked"])
def test_a_step_that_never_was(llama, tiny_model, name):
    """What is held before a step and put back after it is what a run without the step has."""
    rt, make = llama, CACHES.get(name)
    if make is None:
        rt = runtime(tiny_model("llama4"), None)
        make = rt.make_cache
    tokens = tiny.ids(20, seed=3)
    straight, held = (SequenceState(c, members_of(c)) for c in (make(), make()))
    for state in (straight, held):
        before = state.hold()
        forward(rt, state, [9])
        state.put_back(before)
        for i in range(0, 18, 6):
            forward(rt, state, tokens[i : i + 6])
    for token in tokens[18:]:
        handle = held.hold()
        forward(rt, held, [7])
        held.put_back(handle)
        del handle
        assert np.array_equal(forward(rt, straight, [token]), forward(rt, held, [token]))


class Subclass(KVCache):
    pass


class Padded(ArraysCache):
    pass


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: [KVCache(), Subclass()], "Layer 1 keeps its state in Subclass"),
        (lambda: [KVCache(), CacheList(KVCache(), CacheList(Padded(1)))], "Layer 1.1.0 keeps its state in Padded"),
        (lambda: [RotatingKVCache(4, keep=4)] * 2, "no room"),
    ],
)
def test_unknown_is_refused(llama, make, says):
    with pytest.raises(UnknownCache, match=says):
        probe(llama.model, make)


def test_padded_for_a_batch_is_refused(llama):
    model = Remembering(llama.model)
    make = lambda: [CacheList(CacheList(KVCache(), RotatingKVCache(12)), ArraysCache(3, left_padding=[1]))]  # noqa: E731
    with pytest.raises(PositionError, match="padded"):
        probe(model, make)


def test_a_state_that_never_settles_is_refused(llama):
    class Hoarder(Remembering):
        def __call__(self, tokens, cache):
            logits = super().__call__(tokens, cache)
            seen = cache[0][1][0]
            cache[0][1][0] = tokens if seen is None else mx.concatenate([seen, tokens], axis=1)
            return logits

    with pytest.raises(LayoutError, match="change from token to token"):
        probe(Hoarder(llama.model), Remembering.make_cache)


def test_a_cache_that_is_never_used_keeps_the_store_off_but_the_model_runs(llama):
    make = lambda: [KVCache(), KVCache(), KVCache()]  # noqa: E731
    with pytest.raises(PositionError, match="Member 2"):
        probe(llama.model, make)
    tokens = tiny.ids(LENGTH, seed=2)
    plain, _ = run(llama, tokens, use_cache=False)
    off = dataclasses.replace(llama, make_cache=make, layout=None, store=None)
    logits, completion = run(off, tokens, max_tokens=4)
    assert equal(logits, plain) and len(completion.token_ids) == 4
