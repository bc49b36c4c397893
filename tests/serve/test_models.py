"""Models behind names: on demand, one at a time, drained before they leave; a request waits, or is told why not."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from mlxkv.errors import ConfigError, EngineClosed, ModelError, QueueFull
from mlxkv.serve import models as module
from mlxkv.serve.models import Models
from mlxkv.serve.registry import Entry, Registry, names_of


@dataclass
class Garage:
    """Makes engines that only remember what was done to them. ``hold`` keeps loads waiting while it is set."""

    log: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self):
        self.gate.set()

    def check(self, entry: Entry):
        if entry.name in self.missing:
            self.log.append(f"missed {entry.name}")
            raise ModelError("/private/path is missing.")

    def load(self, entry: Entry):
        self.gate.wait(10)
        if entry.name in self.broken:
            self.log.append(f"failed {entry.name}")
            raise ModelError("/private/path is broken.")
        self.log.append(f"load {entry.name}")
        name = entry.name
        return SimpleNamespace(
            name=name, info=SimpleNamespace(load_s=0.0), close=lambda: self.log.append(f"close {name}")
        )


def registry(*entries: Entry | str) -> Registry:
    return Registry(e if isinstance(e, Entry) else Entry(e, f"/models/{e}", (f"{e}-alias",)) for e in entries)


def shop(*entries: Entry | str, max_loaded: int = 1) -> tuple[Garage, Models]:
    garage = Garage()
    return garage, Models(registry(*entries), garage.load, max_loaded=max_loaded, check=garage.check)


def in_loop(work):
    """Run a test's coroutine function; a hang is a failure, not a wait."""

    def test():
        asyncio.run(asyncio.wait_for(work(), 20))

    test.__name__, test.__doc__ = work.__name__, work.__doc__
    return test


async def settled(models: Models):
    while any(s.state in ("loading", "closing") for s in models.states()) or models._tasks:
        await asyncio.sleep(0.002)


async def until(true):
    while not true():
        await asyncio.sleep(0.002)


def state(models: Models, name: str) -> str:
    return next(s.state for s in models.states() if s.entry.name == name)


@in_loop
async def test_loaded_once_for_all_who_come():
    garage, models = shop("a", "b")
    assert models.ready("a") is None and state(models, "a") == "unloaded"

    async def use(name):
        async with models.lease(name) as engine:
            await asyncio.sleep(0)
            return engine

    found = await asyncio.gather(*[use(name) for name in ("a", "a-alias", "a")])
    assert found[0] is found[1] is found[2] is models.ready("a-alias")
    assert garage.log == ["load a"]


@in_loop
async def test_a_swap_drains_frees_and_then_loads():
    garage, models = shop("a", "b")
    order = []

    async def use(name, word):
        async with models.lease(name) as engine:
            order.append(word)
            return engine.name

    async with models.lease("a"):
        b = asyncio.create_task(use("b", "b"))
        await until(lambda: state(models, "a") == "draining")
        assert models.ready("a") is None
        late = asyncio.create_task(use("a", "a again"))  # waits behind b, or b would never come
        await asyncio.sleep(0.02)
        assert garage.log == ["load a"] and not b.done() and not late.done()
    assert await b == "b" and await late == "a"
    assert order == ["b", "a again"]
    assert garage.log == ["load a", "close a", "load b", "close b", "load a"]


@in_loop
async def test_who_leaves_while_waiting_takes_the_swap_back():
    garage, models = shop("a", "b")

    async def use(name):
        async with models.lease(name) as engine:
            return engine.name

    async with models.lease("a"):
        b = asyncio.create_task(use("b"))
        await until(lambda: state(models, "a") == "draining")
        a = asyncio.create_task(use("a"))
        await asyncio.sleep(0)
        b.cancel()
        assert await a == "a"  # nobody wants b any more: a stays
    assert state(models, "a") == "ready" and garage.log == ["load a"]


@in_loop
async def test_leaving_while_it_loads_keeps_what_was_loaded():
    garage, models = shop("a")
    garage.gate.clear()
    task = asyncio.create_task(models.lease("a").__aenter__())
    await until(lambda: state(models, "a") == "loading")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    garage.gate.set()
    await settled(models)
    found = models.states()[0]
    assert (found.state, found.leases, found.waiting) == ("ready", 0, 0)


@in_loop
async def test_no_more_wait_for_a_model_than_its_queue_holds():
    garage, models = shop(Entry("a", "/a"), Entry("b", "/b", ("bb",), options={"max_queue": 2}))

    async def use(name):
        async with models.lease(name) as engine:
            return engine.name

    async with models.lease("a"):
        waiting = [asyncio.create_task(use(name)) for name in ("b", "bb")]
        await until(lambda: state(models, "a") == "draining")
        with pytest.raises(QueueFull):
            await use("b")
        waiting.pop().cancel()
        await asyncio.sleep(0.01)
        waiting.append(asyncio.create_task(use("b")))  # who left has made room
    assert await asyncio.gather(*waiting) == ["b", "b"]
    assert await use("b") == "b"


@in_loop
async def test_two_fit_and_the_least_used_leaves():
    garage, models = shop("a", "b", "c", max_loaded=2)
    for name in ("a", "b", "a"):
        async with models.lease(name):
            pass
    async with models.lease("c"):
        assert {name for name, _ in models.engines()} == {"a", "c"}
    assert garage.log == ["load a", "load b", "close b", "load c"]


@in_loop
async def test_a_pinned_one_stays():
    garage, models = shop(Entry("a", "/a", pinned=True, ttl=0.0), "b", "c", max_loaded=2)
    await models.preload()
    for name in ("b", "c", "a"):
        async with models.lease(name):
            pass
    models.expire()
    await settled(models)
    assert garage.log == ["load a", "load b", "close b", "load c"]


@in_loop
async def test_the_idle_leave():
    garage, models = shop(Entry("a", "/a", ttl=0.0), Entry("b", "/b", ttl=60.0), "c", max_loaded=3)
    async with models.lease("a"):
        async with models.lease("b"), models.lease("c"):
            pass
        models.expire()
        assert state(models, "a") == "ready"  # in use
    models.expire()
    await settled(models)
    assert [name for name, _ in models.engines()] == ["b", "c"]
    async with models.lease("a"):
        assert garage.log[-2:] == ["close a", "load a"]


@in_loop
async def test_one_that_does_not_load():
    garage, models = shop("a", "b")
    garage.broken = {"b"}
    async with models.lease("a"):
        pass
    for _ in range(3):
        with pytest.raises(ModelError) as refused:
            async with models.lease("b"):
                pass
        assert refused.value.status == 503 and "private" not in str(refused.value)
    assert garage.log.count("failed b") == 1  # not tried at once again: each try costs the others their engine
    assert state(models, "b") == "failed" and models.states()[1].reason
    async with models.lease("a"):
        pass


@in_loop
async def test_one_that_is_not_there_drives_nobody_out():
    garage, models = shop("a", "b")
    garage.missing = {"b"}
    async with models.lease("a"):
        pass

    async def ask():
        async with models.lease("b"):
            pass

    found = await asyncio.gather(*[ask() for _ in range(3)], return_exceptions=True)
    assert all(isinstance(error, ModelError) and error.status == 503 for error in found)
    assert garage.log == ["load a", "missed b"] and state(models, "a") == "ready"
    garage.missing = set()
    models.reload(models.registry, 1)  # forgets what failed
    await ask()
    assert garage.log[-2:] == ["close a", "load b"]


@in_loop
async def test_unknown_names():
    garage, models = shop("a")
    for name in ("", "c", "/models/a", "../a", "a/", "A", "a\0", "~", "a" * 10_000):
        with pytest.raises(ModelError) as refused:
            async with models.lease(name):
                pass
        assert refused.value.status == 404 and refused.value.code == "model_not_found"
        assert len(str(refused.value)) < 400
    assert garage.log == []


@in_loop
async def test_a_reload_keeps_what_did_not_change():
    garage, models = shop("a", Entry("b", "/b"), Entry("c", "/c"), max_loaded=3)
    for name in ("a", "b"):
        async with models.lease(name):
            pass
    async with models.lease("c") as kept:
        models.reload(registry(Entry("a", "/models/a", ttl=5.0), Entry("b", "/b", options={"draft": "off"}), "d"), 3)
        await settled(models)
        assert garage.log[3:] == ["close b"]  # changed and idle; c was removed, and is in use
        assert models.ready("a") is not None and kept is not None
        with pytest.raises(ModelError):
            models.ready("c")
    await settled(models)
    assert garage.log[3:] == ["close b", "close c"]
    assert models._slots["a"].entry.ttl == 5.0
    async with models.lease("b"):
        assert garage.log[-1] == "load b"


@in_loop
async def test_a_reload_that_cannot_work_changes_nothing():
    _, models = shop("a", "b")
    with pytest.raises(ConfigError, match="pinned"):
        models.reload(registry(Entry("a", "/a", pinned=True), "b"), 1)
    assert [s.entry.name for s in models.states()] == ["a", "b"] and not models.registry["a"].pinned


@in_loop
async def test_who_waits_for_a_removed_one_is_told():
    _, models = shop("a", "b")
    async with models.lease("a"):
        b = asyncio.create_task(models.lease("b").__aenter__())
        await until(lambda: state(models, "a") == "draining")
        models.reload(registry("a"), 1)
        with pytest.raises(ModelError, match="removed"):
            await b
        assert state(models, "a") == "ready"


@in_loop
async def test_closing():
    garage, models = shop("a", "b", max_loaded=2)
    async with models.lease("a"):
        pass
    garage.gate.clear()
    b = asyncio.create_task(models.lease("b").__aenter__())
    await until(lambda: state(models, "b") == "loading")
    closing = asyncio.create_task(models.close())
    with pytest.raises(EngineClosed):
        await b
    with pytest.raises(EngineClosed):
        await models.lease("a").__aenter__()
    garage.gate.set()
    await closing
    await models.close()
    assert sorted(garage.log) == ["close a", "close b", "load a", "load b"] and not models.engines()


@in_loop
async def test_closing_does_not_wait_for_what_is_fetched():
    garage, models = shop("a", "b")
    async with models.lease("a"):
        pass
    fetching, fetched = threading.Event(), threading.Event()

    def fetch(entry):
        fetching.set()
        fetched.wait(10)

    models._check_entry = fetch
    b = asyncio.create_task(models.lease("b").__aenter__())
    await until(fetching.is_set)
    assert await models.close() and garage.log == ["load a", "close a"]
    with pytest.raises(EngineClosed):
        await b
    fetched.set()

    garage, models = shop("a")
    garage.gate.clear()
    a = asyncio.create_task(models.lease("a").__aenter__())
    await until(lambda: state(models, "a") == "loading")
    assert not await models.close(patience=0.05)
    with pytest.raises(EngineClosed):
        await a
    garage.gate.set()
    assert await models.close() and garage.log == ["load a", "close a"]


@in_loop
async def test_many_who_come_and_go():
    """Whatever the order, at most two are loaded, everybody who stays is served by the model that was asked for."""
    import random

    rng = random.Random(7)
    garage, models = shop(*"abcde", max_loaded=2)
    most = 0

    async def one():
        nonlocal most
        name = rng.choice("abcde")
        await asyncio.sleep(rng.random() * 0.2)
        async with models.lease(name) as engine:
            assert engine.name == name
            most = max(most, len(models.engines()))
            await asyncio.sleep(rng.random() * 0.003)

    tasks = [asyncio.create_task(one()) for _ in range(200)]
    for task in rng.sample(tasks, 60):
        asyncio.get_running_loop().call_later(rng.random() * 0.25, task.cancel)
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(f) for f in found} <= {type(None), asyncio.CancelledError} and most <= 2
    await settled(models)
    assert all(s.leases == s.waiting == 0 for s in models.states())
    held = 0
    for line in garage.log:
        held += {"load": 1, "close": -1}[line.split()[0]]
        assert 0 <= held <= 2


def test_names(tmp_path, monkeypatch):
    assert names_of("mlx-community/Qwen") == ("mlx-community/Qwen", ("Qwen",))
    folder = tmp_path / "small"
    folder.mkdir()
    assert names_of(str(folder)) == ("small", (str(folder),))
    with pytest.raises(ConfigError, match="'a'"):
        registry("a", "a")
    with pytest.raises(ConfigError, match="'x'"):
        registry(Entry("a", "/a", ("x",)), Entry("b", "/b", ("x",)))
    with pytest.raises(ConfigError, match="pinned"):
        shop(Entry("a", "/a", pinned=True), Entry("b", "/b", pinned=True))


def test_time_passes_and_a_broken_one_is_tried_again(monkeypatch):
    async def run():
        garage, models = shop("a")
        garage.broken = {"a"}
        with pytest.raises(ModelError):
            await models.lease("a").__aenter__()
        garage.broken = set()
        monkeypatch.setattr(module, "RETRY_S", 0.0)
        async with models.lease("a") as engine:
            return engine.name, time.monotonic()

    assert asyncio.run(asyncio.wait_for(run(), 20))[0] == "a"
