"""The snapshot pool: which slots become free, in whose name, and that a captured state is the one a solo run stores.

A free that names the wrong slot leaves the count right (state-handoff §F.2): so these tests look at which slots are
free, and mutants must show there.
"""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest

from mlxkv.cache.planner import Plan
from mlxkv.cache.state import SequenceState
from mlxkv.decode.pool import IntegrityError, Pool, PoolError, Tracked, TransitionError, keep, places
from mlxkv.decode.tracking import Track, next_rung, plan, scatter
from tests import headed, tiny
from tests.cache import test_equality
from tests.cache.stores import records
from tests.probe import TOLERANCE, equal, run, runtime

SPECS = [((2, 3), mx.float32), ((4,), mx.bfloat16)]


def pool_with(free: list[int], slots: int = 16) -> Pool:
    """A pool of which just these slots are free, in this order; the others are "other"'s."""
    pool = Pool(SPECS, slots)
    for slot in range(slots):
        pool.take("other", slot)
    for slot in reversed(free):
        pool.free([slot], "other")
    assert pool.free_slots == tuple(free)
    return pool


def give(pool: Pool, slots, owner="r"):
    """Slots that were "other"'s are ``owner``'s; what is free stays."""
    for slot in slots:
        pool.free([slot], "other")
        pool.take(owner, slot)
    pool.check_integrity()


# frees own what they are told (§F.2)


class WithoutCopy(Pool):
    """A mutant: what is queued is the caller's own object, read at the end."""

    def free(self, indices, owner):
        if self._queue is None:
            return super().free(indices, owner)
        self._views = [*getattr(self, "_views", []), indices]

    def _release(self, slots):
        late = [int(i) for view in getattr(self, "_views", []) for i in view]
        self._views = []
        self._free[:0] = slots + late


class ReadAtEnd(Pool):
    """A mutant: which slots are an owner's is looked up when the group ends."""

    def free_all(self, owner):
        self._owners = [*getattr(self, "_owners", []), owner]
        return []

    def _release(self, slots):
        late, self._owners = getattr(self, "_owners", []), []
        slots = slots + [slot for owner in late for slot in self.of_owner(owner)]
        self._free[:0] = slots


def mutant(kind: type[Pool], pool: Pool) -> Pool:
    pool.__class__ = kind
    return pool


def rewritten(pool, row, view, edit):
    """Free ``view`` of ``row`` in a group, let the table be edited before it ends; what is free then, in order."""
    with pool.step():
        pool.free(view(row), "r")
        edit(row)
    return list(pool.free_slots)


def zero(row):
    row[:] = [0] * len(row) if isinstance(row, list) else 0


def to_nine(row):
    row[1] = 9


def to_five_six(row):
    row[1:3] = [5, 6] if isinstance(row, list) else type(row)([5, 6]) if isinstance(row, mx.array) else np.array([5, 6])


#: (vector, free before, row, what is freed of it, the edit, free after, free after if it was not copied)
EDITS = [
    (6, [10], [3, 7, 2], slice(None), zero, [3, 7, 2, 10], [0, 0, 0, 10]),
    (7, [10], [3, 7, 2], slice(None), to_nine, [3, 7, 2, 10], [3, 9, 2, 10]),
    (8, [], [11, 12, 13, 14], slice(1, 3), to_five_six, [12, 13], [5, 6]),
]
TABLES = {
    "list": list,
    "numpy": lambda row: np.array(row, np.int32),
    "mlx": lambda row: mx.array(row, mx.int32),
}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("free", "row", "part", "edit", "after"), [e[1:6] for e in EDITS], ids=[e[0] for e in EDITS])
def test_what_is_freed_is_what_was_named(free, row, part, edit, after, table):
    pool = pool_with(free)
    give(pool, row)
    whole = part == slice(None)
    assert rewritten(pool, TABLES[table](row), lambda r: r if whole else r[part], edit) == after
    pool.check_integrity()
    assert pool.of_owner("r") == sorted(set(row) - set(after))


@pytest.mark.parametrize(("free", "row", "part", "edit", "after", "wrong"), [e[1:] for e in EDITS])
def test_a_queue_without_a_copy_shows_in_which_slots_are_free(free, row, part, edit, after, wrong):
    pool = pool_with(free)
    give(pool, row)
    got = rewritten(mutant(WithoutCopy, pool), np.array(row), lambda r: r[part], edit)
    assert got == wrong != after
    assert len(got) == len(after)  # a count would not have told
    with pytest.raises(IntegrityError):
        pool.check_integrity()


def test_order_of_frees():
    """12: one at a time the last is in front; together they keep their order."""
    pool = pool_with([9])
    give(pool, [3, 7])
    pool.free([3], "r")
    pool.free([7], "r")
    assert pool.free_slots == (7, 3, 9)
    pool = pool_with([9])
    give(pool, [3, 7])
    with pool.step():
        pool.free(3, "r")
        pool.free((7,), "r")
        assert pool.free_slots == (9,)
        assert pool.count() == {"free": 1, "owned": 13, "captured": 0, "queued": 2}
    assert pool.free_slots == (3, 7, 9)


def remapped(kind):
    """13: slot 1 is the request's, slot 2 is free. 1 is freed in a group, and before it ends 2 is the request's."""
    pool = pool_with([2])
    give(pool, [1])
    mutant(kind, pool)
    with pool.step():
        pool.free_all("r")
        assert pool.take("r", 2) == 2
    return pool


def test_whose_slot_it_was_is_decided_when_it_is_freed():
    pool = remapped(Pool)
    assert pool.free_slots == (1,) and pool.of_owner("r") == [2]
    pool.check_integrity()


def test_a_mapping_read_at_the_end_shows_in_which_slots_are_free():
    pool = remapped(ReadAtEnd)
    assert 2 in pool.free_slots and 2 in pool.of_owner("r")  # free, and live
    with pytest.raises(IntegrityError):
        pool.check_integrity()


# groups


def test_a_group_ends_with_an_exception_too():
    pool = Pool(SPECS, 2)
    pool.take("r")
    with pytest.raises(KeyError), pool.step():
        pool.free([0], "r")
        assert pool.take("s") == 1 and pool.take("s") is None  # the freed one stays out of use
        raise KeyError
    assert pool.free_slots == (0,)
    pool.free([1], "s")  # at once again
    assert pool.used == 0
    pool.check_integrity()


def test_groups_do_not_nest():
    pool = Pool(SPECS, 3)
    pool.take("r")
    with pytest.raises(PoolError), pool.step():
        pool.free([0], "r")
        with pool.step():
            raise AssertionError("was let in")
    assert pool.free_slots == (0, 1, 2)
    with pool.step():
        pool.free([], "r")
    pool.check_integrity()


# transitions


def staged(stage):
    pool = Pool(SPECS, 3)
    if stage != "free":
        pool.take("r", 1)
    if stage == "captured":
        pool.capture(1, "r")
    return pool


GO = {
    "take": lambda pool, owner: pool.take(owner, 1),
    "capture": lambda pool, owner: pool.capture(1, owner),
    "read": lambda pool, owner: pool.read(1, owner),
    "free": lambda pool, owner: pool.free([1], owner),
}
ALLOWED = {("free", "take"), ("owned", "capture"), ("owned", "free"), ("captured", "free"), ("captured", "read")}
WRONG = [
    (stage, transition, owner)
    for stage in ("free", "owned", "captured", "queued")
    for transition in GO
    for owner in ("r", "s")
    if (stage, transition) not in ALLOWED or (owner == "s" and stage != "free")
]


@pytest.mark.parametrize(("stage", "transition", "owner"), WRONG)
def test_a_wrong_transition_is_refused(stage, transition, owner):
    def refused():
        before = pool.count(), pool.free_slots, pool.of_owner("r"), pool.of_owner("s")
        with pytest.raises(TransitionError) as e:
            GO[transition](pool, owner)
        assert (e.value.slot, e.value.owner, e.value.transition) == (1, owner, transition)
        assert all(word in str(e.value) for word in ("1", repr(owner), repr(transition), stage))
        assert (pool.count(), pool.free_slots, pool.of_owner("r"), pool.of_owner("s")) == before
        pool.check_integrity()

    pool = staged("owned" if stage == "queued" else stage)
    if stage == "queued":
        with pool.step():
            pool.free([1], "r")
            refused()
    else:
        refused()


@pytest.mark.parametrize("indices", [[0, 0], [0, 1, 5], [0, -1], [0, 3], np.array([0, 7]), mx.array([0, -1])])
def test_nothing_is_freed_of_what_is_half_wrong(indices):
    pool = Pool(SPECS, 3)
    pool.take("r"), pool.take("r")
    with pytest.raises(TransitionError):
        pool.free(indices, "r")
    assert pool.of_owner("r") == [0, 1] and pool.free_slots == (2,)


@pytest.mark.parametrize("indices", [[0.0], [True], "0", [None], np.array([[0]]), mx.array([0.0])])
def test_what_is_no_number_of_a_slot_is_refused(indices):
    pool = Pool(SPECS, 3)
    pool.take("r")
    with pytest.raises(PoolError):
        pool.free(indices, "r")
    assert pool.of_owner("r") == [0]


@pytest.mark.parametrize("indices", [0, np.int64(0), [np.int32(0)], (0,), np.array([0]), mx.array([0]), range(1)])
def test_numbers_of_slots_come_in_many_forms(indices):
    pool = Pool(SPECS, 3)
    pool.take("r")
    pool.free(indices, "r")
    assert pool.used == 0


def test_a_slot_is_somebodys():
    with pytest.raises(PoolError):
        Pool(SPECS, 1).take(None)


def test_random_histories_lose_nothing():
    """Against a plain model of who has what: after every action the books are whole, and the same."""
    for seed in range(20):
        rng = random.Random(seed)
        pool = Pool(SPECS, rng.choice([0, 1, 3, 8]))
        mine: dict[int, str] = {}
        written: set[int] = set()
        for _ in range(30):
            queued: set[int] = set()
            with pool.step():
                for _ in range(rng.randrange(6)):
                    owner = rng.choice("abc")
                    held = [s for s, o in mine.items() if o == owner]
                    match rng.choice(["take", "take", "capture", "free", "all"]):
                        case "take":
                            slot = pool.take(owner)
                            assert (slot is None) == (len(mine) + len(queued) == pool.slots)
                            if slot is not None:
                                assert slot not in mine and slot not in queued
                                mine[slot] = owner
                        case "capture" if set(held) - written:
                            slot = rng.choice(sorted(set(held) - written))
                            pool.capture(slot, owner)
                            written.add(slot)
                        case "free" if held:
                            some = rng.sample(held, rng.randint(1, len(held)))
                            pool.free(rng.choice([list, tuple, np.array, mx.array])(some), owner)
                            queued |= set(some)
                        case "all":
                            assert pool.free_all(owner) == sorted(held)
                            queued |= set(held)
                    mine = {s: o for s, o in mine.items() if s not in queued}
                    written -= queued
                    pool.check_integrity()
                    assert {o: pool.of_owner(o) for o in "abc"} == {
                        o: sorted(s for s in mine if mine[s] == o) for o in "abc"
                    }
                    assert pool.count()["queued"] == len(queued) and pool.count()["captured"] == len(written)
            pool.check_integrity()
            assert set(pool.free_slots) == set(range(pool.slots)) - set(mine)
            assert pool.used == len(mine)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._free.append(0),  # free and owned
        lambda pool: pool._free.append(2),  # free twice
        lambda pool: pool._free.remove(2),  # lost
        lambda pool: pool._tags.pop(),
        lambda pool: pool._tags.__setitem__(0, pool._tags[2]),  # nobody's, and in no list
        lambda pool: pool._tags.append(pool._tags[0]),  # one too many
    ],
)
def test_damaged_books_are_noticed(damage):
    pool = Pool(SPECS, 3)
    pool.take("r"), pool.take("s")
    pool.check_integrity()
    damage(pool)
    with pytest.raises(IntegrityError):
        pool.check_integrity()


# arrays


def test_arrays_are_there_when_they_are_needed():
    pool = Pool(SPECS, 4)
    assert pool.nbytes == 0 and pool.full_nbytes == 5 * (24 + 8)
    pool.take("r")
    assert pool.nbytes == 0
    assert [(a.shape, a.dtype) for a in pool.arrays] == [((5, 2, 3), mx.float32), ((5, 4), mx.bfloat16)]
    assert pool.nbytes == pool.full_nbytes
    with pytest.raises(PoolError):
        pool.arrays = pool.arrays[:1]
    with pytest.raises(PoolError):
        pool.forget()
    pool.free([0], "r")
    pool.forget()
    assert pool.nbytes == 0


def test_a_layout_without_recurrent_members_has_no_slots(tiny_model):
    rt = runtime(tiny_model("llama"), None)
    pool = Pool.of(rt.layout, 8)
    assert (pool.slots, pool.arrays, pool.nbytes, pool.full_nbytes) == (0, [], 0, 0)
    assert pool.take("r") is None
    assert scatter(pool.arrays, [], Track.of(4, pool.dummy, plan([8], [8], pool.free_slots))) == []
    pool.check_integrity()


def test_what_was_read_is_private():
    """The slot is freed and written anew, in place: what was read of it before is as it was."""
    pool = Pool([((4096,), mx.float32)], 8)
    slot = pool.take("r")
    assert slot is not None
    pool.arrays = scatter(pool.arrays, [mx.ones((2, 4096))], Track.of(2, 8, {1: (slot, 5)}))
    pool.capture(slot, "r")
    mx.eval(pool.arrays)
    cache = object()
    tracked = Tracked(pool, "r", {5: slot}, [(cache, 3)])
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    pool.free([slot], "r")
    state = [mx.full((2, 4096), 2.0)]
    arrays = scatter(pool.arrays, state, Track.of(2, 8, {1: (slot, 6)}))
    pool.forget()
    pool.arrays = arrays
    del arrays
    mx.eval(pool.arrays, state)
    assert mx.get_peak_memory() - before < 5 * 4096 * 4  # the step's two rows, a copy for each lane; no second pool
    kept = tracked.slots(cache, 5)
    assert kept.keys() == {3} and kept[3].shape == (1, 4096)
    assert (kept[3] == 1).all().item() and (pool.arrays[0][slot] == 2).all().item()
    assert tracked.slots(object(), 5) == {} and tracked.slots(cache, 6) == {}


# a captured state is the one that a solo run stores

FIRST, END = 8, 44
#: lengths of the rows' prompts: they stand at different positions, the one in the middle is recorded
STARTS = (3, 6, 20)


def rows_of(rt):
    """Three sequences of one batch, which stand at different positions."""
    rows = []
    for i, start in enumerate(STARTS):
        tokens = tiny.ids(END + 30, seed=50 + i)
        state = SequenceState.new(rt.make_cache())
        state.reserve(256)
        rt.model(mx.array(tokens[:start])[None], cache=state.caches)
        state.advance(start)
        mx.eval(state.live())
        rows.append((state, tokens))
    return rows


def stored_solo(rt, tokens, start):
    """Run alone, cut at each rung."""
    state = SequenceState.new(rt.make_cache())
    state.reserve(256)
    recorder = rt.store.recorder(state, tokens[:END], Plan(), rt.barrier)
    while state.position < END:
        n = start if not state.position else 1
        rt.model(mx.array(tokens[state.position : state.position + n])[None], cache=state.caches)
        state.advance(n)
        mx.eval(state.live())
        if state.position == next_rung(state.position - 1, FIRST):
            recorder.boundary(role="ladder")
        elif state.position % 5 == 0:
            recorder.flush()
    recorder.flush()
    recorder.commit(everything=True)
    rt.store.close()


def stored_through_pool(rt, flush_every):
    """Three rows step together; every state any of them wants goes through a pool of three slots. Gives back how many
    slots were in use at most."""
    pool = Pool.of(rt.layout, 3)
    pool.arrays = [mx.concatenate([a[:-1], mx.full((1, *a.shape[1:]), float("nan"))]) for a in pool.arrays]
    rows = rows_of(rt)
    state, tokens = rows[1]
    recorder = rt.store.recorder(state, tokens[:END], Plan(), rt.barrier)
    where = [places(s.members, rt.layout) for s, _ in rows]
    at: list[dict[int, int]] = [{} for _ in rows]
    most = 0
    while state.position < END:
        wanted = [next_rung(s.position, FIRST) for s, _ in rows]
        captures = plan([s.position + 1 for s, _ in rows], wanted, pool.free_slots)
        for row, (slot, position) in captures.items():
            assert pool.take(row, slot) == slot
            at[row][position] = slot
        for s, ids in rows:
            rt.model(mx.array(ids[s.position : s.position + 1])[None], cache=s.caches)
            s.advance(1)
        batch = [mx.concatenate([cache[n] for cache, n in place]) for place in zip(*where, strict=True)]
        pool.arrays = scatter(pool.arrays, batch, Track.of(len(rows), pool.dummy, captures))
        mx.eval(pool.arrays, [s.live() for s, _ in rows])
        for row, (slot, _) in captures.items():
            pool.capture(slot, row)
        most = max(most, pool.used)
        with pool.step():
            for row in (0, 2):
                pool.free_all(row)  # nobody records these
            if state.position % flush_every == 0:
                keep(recorder, pool, 1, at[1], where[1])
                at[1] = {}
        pool.check_integrity()
    keep(recorder, pool, 1, at[1], where[1])
    recorder.commit(everything=True)
    assert pool.used == 0
    rt.store.close()
    return most


@pytest.mark.parametrize(
    ("arch", "flush_every"),  # between rungs, and at them
    [("qwen3_5", 5), ("qwen3_5", 8), ("falcon_h1", 7), ("headed", 5)],
)
def test_a_captured_state_is_stored_as_a_solo_run_stores_it(tiny_model, tmp_path, arch, flush_every):
    model = headed.make(tmp_path / "model") if arch == "headed" else tiny_model(arch)
    most = stored_through_pool(runtime(model, tmp_path / "pool"), flush_every)
    assert most >= 1
    tokens = tiny.ids(END + 30, seed=51)
    stored_solo(runtime(model, tmp_path / "solo"), tokens, STARTS[1])

    mine, theirs = ({p.name: mx.load(str(p)) for p in records(tmp_path / k, "state")} for k in ("pool", "solo"))
    assert mine.keys() == theirs.keys() and len(mine) == 3  # at 8, 16 and 32
    for name, tensors in mine.items():
        assert tensors.keys() == theirs[name].keys()
        for key, a in tensors.items():
            assert np.array_equal(np.array(a), np.array(theirs[name][key]))

    rt = runtime(model, tmp_path / "pool")
    bound = max(test_equality.INEXACT.get(arch, (0.0, ""))[0], TOLERANCE)
    for position in (8, 16, 32):
        prompt = tokens[: position + 1]
        prompt += tiny.ids(5, seed=position)
        prompt[position] = (tokens[position] + 1) % 300
        logits, done = run(rt, prompt, keep=False)
        assert done.usage.cached_tokens == position
        assert equal(logits, run(rt, prompt, use_cache=False)[0], bound)
    rt.store.close()
