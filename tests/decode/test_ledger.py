"""The ledger: who holds what, what fits, who gives way, what was measured; nothing latches."""

from __future__ import annotations

import ctypes
import gc
import random
import threading

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from mlxkv.cache.batch import Batch
from mlxkv.cache.layout import probe
from mlxkv.cache.ram import Ram
from mlxkv.cache.state import SequenceState
from mlxkv.decode import pressure
from mlxkv.decode.memory import ENTRIES, RUNNING, Memory
from mlxkv.decode.pressure import CRITICAL, NORMAL, WARNING, read_level
from mlxkv.decode.reservation import reserve
from mlxkv.decode.solo import MemoryFull, fits
from mlxkv.errors import RequestError, RequestTooLarge
from tests import tiny
from tests.cache import drafts

WEIGHTS = 1000


class Device:
    """What MLX and the system are made to say."""

    def __init__(self) -> None:
        self.active, self.spare, self.level = WEIGHTS, 0, NORMAL

    def memory(self, limit: int, ram: Ram | None = None, layout=None) -> Memory:
        now = {"device": lambda: (self.active, self.spare), "pressure": lambda: self.level}
        return Memory(limit, WEIGHTS, layout, ram, **now)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def records(tmp_path):
    """Eight entries of the same weight."""
    store = drafts.open_store(tmp_path / "c", ram_budget=0)
    made = drafts.chain(store, drafts.tokens(1, 8 * drafts.BLOCK))
    store.close()
    return made


def filled(records, budget: int = 1 << 20, pin: int = 0) -> Ram:
    """RAM that holds them, the first ``pin`` of them for the writer."""
    ram = Ram(budget)
    for i, draft in enumerate(records):
        ram.put(draft, pin=i < pin)
    return ram


# owners


def test_charges_are_by_owner_and_end_with_it(device):
    memory = device.memory(10_000)
    memory.charge("caches", "a", 300)
    memory.charge("queue", "a", 40)
    memory.charge("caches", "b", 500)
    memory.charge("caches", "a", 350)  # it grew: in place of what it was
    assert memory.ledger() == dict.fromkeys(ENTRIES, 0) | {"weights": WEIGHTS, "caches": 850, "queue": 40, "ram": 0}
    assert memory.held_by("a") == 390 and memory.reserved == 890
    assert memory.release("a", "queue") == 40
    memory.charge("restores", "a", 100)
    memory.move("a", "restores", "caches")
    assert memory.ledger()["caches"] == 950 and memory.ledger()["restores"] == 0
    memory.check_integrity({"a", "b"})
    with pytest.raises(AssertionError, match="caches of 'a'.*450"):
        memory.check_integrity({"b"})
    assert memory.release("a") == 450 and memory.release("a") == 0
    memory.check_integrity({"b"})
    memory.release("b")
    assert memory.reserved == 0 and memory.weights == WEIGHTS
    memory.check_integrity(())


@pytest.mark.parametrize(("name", "nbytes"), [("cache", 1), ("ram", 1), ("caches", -1)])
def test_what_cannot_be_charged_changes_nothing(device, name, nbytes):
    memory = device.memory(10_000)
    with pytest.raises(ValueError, match=name):
        memory.charge(name, "a", nbytes)
    assert memory.reserved == 0
    memory.check_integrity(())


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(ENTRIES), st.integers(0, 3), st.integers(0, 900), st.booleans()), max_size=30)
)
def test_any_history_ends_with_nothing(steps):
    """Sums are those of a plain dictionary, RAM gives just what is missing, and has it all back at the end."""
    ram = Ram(2000)
    memory, model = Device().memory(4000, ram), {}
    for name, owner, nbytes, ends in steps:
        if ends:
            freed = sum(model.pop((n, owner), 0) for n in ENTRIES)
            assert memory.release(owner) == freed
        else:
            memory.charge(name, owner, nbytes)
            model[name, owner] = nbytes
        memory.check_integrity(range(4))
        held = sum(model.values())
        assert memory.reserved == held - sum(n for (e, _), n in model.items() if e == "weights")
        assert ram.budget == max(0, min(2000, 4000 - WEIGHTS - held))
        need = random.Random(nbytes).randrange(4000)
        room = memory.room(need)
        idle = not any(n for (e, _), n in model.items() if e in RUNNING)
        assert room.fits == (need <= 4000 - WEIGHTS - held or (idle and room.ever))
        assert room.ever == (need + memory.weights <= 4000)
    for owner in range(4):
        memory.release(owner)
    assert memory.reserved == 0 and memory.weights == WEIGHTS and ram.budget == 2000
    memory.check_integrity(())


def test_threads_may_charge_at_once(device):
    memory = device.memory(1 << 40, Ram(1 << 20))

    def work(owner: int) -> None:
        for i in range(200):
            memory.charge("queue", (owner, i % 5), i)
            memory.room(i)
            memory.release((owner, (i + 2) % 5))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    memory.check_integrity([(owner, i) for owner in range(4) for i in range(5)])
    for owner in range(4):
        for i in range(5):
            memory.release((owner, i))
    assert memory.reserved == 0


# what fits


def test_one_that_does_not_fit_now_waits_and_is_let_in(device):
    memory = device.memory(WEIGHTS + 100)
    assert memory.room(60).fits
    memory.charge("caches", "a", 60)
    room = memory.room(60)
    assert (room.fits, room.ever, room.need, room.free, room.limit) == (False, True, 60, 40, WEIGHTS + 100)
    assert memory.room(40).fits
    memory.release("a")
    assert memory.room(60).fits


def test_one_that_can_never_fit_is_refused_with_both_numbers(device):
    memory = device.memory(WEIGHTS + 123_456)
    memory.charge("caches", "a", 1)
    room = memory.room(7_654_321)
    assert not room.ever and not room.fits
    memory.release("a")
    assert not memory.room(7_654_321).fits
    error = memory.too_large(room, 4096, "max_tokens")
    assert isinstance(error, RequestTooLarge) and isinstance(error, RequestError)
    assert all(part in error.message for part in ("7,654,321", "123,456", "4,096"))
    assert "max_tokens" in error.cure and "--memory-limit" in error.cure
    assert (error.param, error.status, error.code) == ("max_tokens", 400, "memory_limit_exceeded")


def test_ram_gives_way_before_a_request_waits(device, records):
    ram = filled(records)
    size = ram.nbytes // len(records)
    memory = device.memory(WEIGHTS + 10 * size, ram)
    assert ram.nbytes == 8 * size == memory.ledger()["ram"]
    assert ram.budget == 10 * size  # not what it may have on its own
    assert memory.room(9 * size).fits and ram.nbytes == 8 * size  # nothing leaves before it must
    memory.charge("caches", "a", 9 * size)
    assert ram.nbytes == size == memory.ledger()["ram"]
    assert memory.room(size).fits and not memory.room(size + 1).fits
    memory.release("a")
    assert ram.budget == 10 * size


def test_what_waits_for_the_writer_cannot_give_way(device, records):
    ram = filled(records, pin=3)
    size = ram.nbytes // len(records)
    memory = device.memory(WEIGHTS + 10 * size, ram)
    memory.charge("caches", "a", 2 * size)
    assert ram.pinned == 3 * size
    assert memory.room(5 * size).fits and not memory.room(5 * size + 1).fits
    memory.charge("caches", "b", 5 * size)
    assert ram.nbytes == 3 * size and not memory.room(1).fits
    ram.unpin(d.meta.key for d in records[:3])
    assert memory.room(3 * size).fits
    memory.charge("caches", "c", 3 * size)
    assert ram.nbytes == 0 and not memory.room(1).fits


def test_nobody_waits_for_nobody(device, records):
    """Alone, whatever would ever fit does: neither what was measured besides nor the writer can hold it up forever."""
    ram = filled(records, pin=8)
    memory = device.memory(WEIGHTS + ram.nbytes, ram)
    device.active = WEIGHTS + 50
    memory.measure()
    assert memory.other == 50
    assert memory.room(ram.nbytes).fits and not memory.room(ram.nbytes + 1).fits
    memory.charge("queue", "next", 4)
    assert memory.room(ram.nbytes).fits
    memory.charge("caches", "a", 1)
    assert not memory.room(1).fits


def test_what_runs_may_grow_where_it_could_have_started(device):
    """Its own memory is no reason to wait, others' is; memory pressure stops admissions, not answers."""
    memory = device.memory(WEIGHTS + 100)
    memory.charge("caches", "a", 40)
    device.active, device.level = WEIGHTS + 80, CRITICAL
    memory.measure()
    assert not memory.room(5).fits
    assert memory.room(60, "a").fits and not memory.room(61, "a").ever
    memory.charge("caches", "b", 10)
    assert memory.room(10, "a").fits and not memory.room(11, "a").fits and memory.room(60, "a").ever
    memory.release("b")
    assert memory.room(60, "a").fits


# what is measured


def test_what_was_measured_besides_counts_until_it_is_gone(device, records):
    ram = filled(records)
    size = ram.nbytes // len(records)
    memory = device.memory(WEIGHTS + 10 * size, ram)
    memory.charge("caches", "a", 2 * size)
    device.active = WEIGHTS + 2 * size + 5 * size  # of which nobody was told five
    memory.measure()
    assert memory.other == 5 * size and ram.nbytes == 3 * size
    assert memory.room(3 * size).fits and not memory.room(3 * size + 1).fits
    device.active = WEIGHTS + size  # half of the caches is not there yet: still theirs
    memory.measure()
    assert memory.other == 0 and ram.budget == 8 * size
    assert memory.room(8 * size).fits and not memory.room(8 * size + 1).fits
    device.active = WEIGHTS + 9 * size
    memory.measure()
    assert memory.other == 7 * size and ram.budget == size
    memory.release("a")
    assert memory.other == 0 and ram.budget == 10 * size  # at once, although nothing is measured while idle


def test_spare_buffers_go_first_once_it_is_too_much():
    """With the real device: buffers that MLX keeps for reuse are given back, but only then."""

    def spare() -> int:
        big = mx.zeros(1 << 20)
        mx.eval(big)
        del big
        return mx.get_cache_memory()

    mx.clear_cache()
    kept = spare()
    assert kept >= 4 << 20
    weights = mx.get_active_memory()
    Memory(weights + 2 * kept + (1 << 20), weights, None).measure()
    assert mx.get_cache_memory() == kept
    Memory(weights + kept // 2, weights, None).measure()
    assert mx.get_cache_memory() == 0
    spare()
    Memory(1 << 40, weights, None, pressure=lambda: CRITICAL).measure()
    assert mx.get_cache_memory() == 0


# memory pressure


def test_pressure_halves_ram_then_empties_it_and_stops_admissions(device, records):
    ram = filled(records, budget=1 << 20)
    size = ram.nbytes // len(records)
    ram.resize(8 * size)
    memory = device.memory(1 << 30, ram)
    seen = []
    for level in (NORMAL, WARNING, CRITICAL, WARNING, NORMAL):
        device.level = level
        memory.measure()
        assert memory.level == level
        seen.append((ram.budget // size, ram.nbytes // size, memory.room(1).fits, memory.room(1).ever))
    assert seen == [
        (8, 8, True, True),
        (4, 4, True, True),
        (0, 0, False, True),
        (4, 0, True, True),
        (8, 0, True, True),
    ]


def test_pressure_and_need_do_not_add_up(device):
    """Under pressure RAM gives the larger of both, not their sum."""
    ram = Ram(800)
    memory = device.memory(WEIGHTS + 1000, ram)
    device.level = WARNING
    memory.charge("caches", "a", 500)
    memory.measure()
    assert ram.budget == 400
    memory.charge("caches", "a", 700)
    assert ram.budget == 300


@pytest.mark.parametrize(("answer", "level"), [(1, NORMAL), (2, WARNING), (4, CRITICAL)])
def test_the_level_is_read_from_the_system(monkeypatch, answer, level):
    asked = []

    def sysctl(name, value, size, new, length) -> int:
        asked.append((name, size._obj.value, new, length))
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = answer
        return 0

    monkeypatch.setattr(pressure, "_sysctl", lambda: sysctl)
    assert read_level() == level
    assert asked == [(b"kern.memorystatus_vm_pressure_level", 4, None, 0)]


def test_a_level_that_cannot_be_read_is_normal(monkeypatch):
    monkeypatch.setattr(pressure, "_sysctl", lambda: lambda *args: -1)
    assert read_level() == NORMAL
    monkeypatch.setattr(pressure, "_sysctl", lambda: None)
    assert read_level() == NORMAL


# what is needed


def model_of(arch: str):
    model, _ = tiny.build(arch)
    layout = probe(model, lambda: make_prompt_cache(model))
    return model, layout, Memory(1 << 40, WEIGHTS, layout)


@pytest.mark.parametrize("arch", ["llama", "qwen3_5", "falcon_h1", "nemotron_h", "lfm2", "gemma3_text"])
def test_a_sequence_takes_what_is_said(arch):
    """At every step of prefill and decoding; windows take at most that."""
    model, layout, memory = model_of(arch)
    state, ids = SequenceState.new(make_prompt_cache(model)), mx.array(tiny.ids(60))
    rows = reserve(60, granule=16)
    state.reserve(rows)
    seen = []
    for width in (20, 13, 1, 1, 20, 1):
        model(ids[None, state.position : state.position + width], cache=state.caches)
        state.advance(width)
        mx.eval(state.live())
        seen.append(sum(a.nbytes for a in state.live()))
    said = memory.sequence_bytes(rows, 20)
    if layout.windows:
        assert max(seen) <= said < memory.sequence_bytes(rows + 16, 20)
        assert max(seen) == said  # a chunk over a full window is the most there is
    else:
        assert set(seen) == {said}


@pytest.mark.parametrize("arch", ["llama", "qwen3_5", "falcon_h1", "nemotron_h", "lfm2", "gemma3_text", "deepseek_v4"])
@pytest.mark.parametrize("shape", [(1, 4), (3, 256), (4, 1024)])
def test_a_batch_takes_what_is_said(arch, shape):
    model, layout, memory = model_of(arch)
    assert Batch(lambda: make_prompt_cache(model), layout, *shape).nbytes == memory.batch_bytes(*shape)
    assert Memory(1, 0, None).batch_bytes(*shape) == 0


@pytest.mark.parametrize("arch", ["llama", "qwen3_5", "gemma3_text"])
def test_a_join_peaks_where_it_is_said(arch):
    """Measured on the device: a join, a wider batch, a narrower one. Never more, small temporaries aside. How much less
    hangs on the device: the half, where what keys needed is given back before values ask for theirs."""
    model, layout, memory = model_of(arch)
    make_cache = lambda: make_prompt_cache(model)  # noqa: E731
    state = SequenceState.new(make_cache())
    state.reserve(1024)
    model(mx.array([tiny.ids(100)]), cache=state.caches)
    state.advance(100)
    state.settle()
    mx.eval(state.live())
    batch = Batch(make_cache, layout, 2, 2048)
    batch.join(0, state)
    shapes = [(2, 2048), (2, 2048), (4, 4096), (2, 2048)]
    todo = [
        lambda: batch.join(1, state),
        lambda: batch.resize(4, 4096, {0: 0, 1: 1}),
        lambda: batch.resize(2, 2048, {0: 0, 1: 1}),
    ]
    gc.collect()  # arrays that earlier tests left in cycles would go while it is measured
    for before, after, work, least in zip(shapes, shapes[1:], todo, (0.45, 0.85, 0.45), strict=False):
        mx.synchronize()
        start = mx.get_active_memory()
        mx.reset_peak_memory()
        work()
        mx.synchronize()
        extra = memory.join_extra(before, after)
        assert least * extra <= mx.get_peak_memory() - start <= 1.02 * extra
        assert batch.nbytes == memory.batch_bytes(*after)


def test_a_join_holds_old_and_new_at_once():
    _, layout, memory = model_of("llama")
    one, two = memory.batch_bytes(2, 256), memory.batch_bytes(4, 512)
    member = two // len(layout.members)
    assert memory.join_extra(None, (4, 512)) == two
    # the last member is copied while the old one is there, those before it are done
    assert memory.join_extra((2, 256), (4, 512)) == two - one + one // len(layout.members)
    assert memory.join_extra((4, 512), (4, 512)) == member
    assert memory.join_extra((4, 512), (2, 256)) == one // len(layout.members)
    for before in (None, (2, 256), (4, 512)):
        held = memory.batch_bytes(*before) if before else 0
        peak = memory.join_peak(before, (4, 512), 256)
        assert peak == held + memory.sequence_bytes(256) + memory.join_extra(before, (4, 512))
        assert peak >= two + memory.sequence_bytes(256)


def test_a_running_answer_is_not_ended_by_an_old_measurement(device):
    """What a chunk of another prompt needed is counted until it is measured again."""
    memory = device.memory(WEIGHTS + 100)
    memory.charge("caches", "a", 40)
    memory.charge("caches", "b", 10)
    device.active = WEIGHTS + 50 + 40
    memory.measure()
    with pytest.raises(MemoryFull, match="11 bytes more; 10 of"):
        fits(memory, "a", 11, 1)
    device.active = WEIGHTS + 50
    fits(memory, "a", 50, 1)
    with pytest.raises(MemoryFull):
        fits(memory, "a", 51, 1)
