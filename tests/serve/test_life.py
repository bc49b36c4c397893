"""The life of a serving process, with engines that only remember: ready, idle, reloaded, failed, stopped."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import asynccontextmanager

import httpx
import pytest

from mlxkv.errors import ConfigError, DeviceError, ModelError
from mlxkv.serve import Limits, Server, life
from mlxkv.serve.life import Life
from mlxkv.serve.models import Models
from mlxkv.serve.registry import Entry, Registry
from tests.serve.test_models import Garage, in_loop, until


@asynccontextmanager
async def living(models: Models, **more):
    """A server that runs: (its life, the task of it, a client)."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(models, limits=Limits(grace_s=0.2))
    alive = Life(server, listener, **more)
    task = asyncio.create_task(alive.run())
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=20) as http:
        try:
            yield alive, task, http
        finally:
            alive.stop()
            await asyncio.gather(task, return_exceptions=True)
            listener.close()


def one(garage: Garage, **more) -> Models:
    return Models(Registry([Entry("a", "/a", **more)]), garage.load)


@in_loop
async def test_it_listens_at_once_and_says_when_it_is_ready():
    garage, said = Garage(), []
    garage.gate.clear()
    async with living(one(garage), on_ready=lambda: said.append("ready")) as (alive, task, http):
        found = await http.get("/ready")
        assert found.status_code == 503 and found.json()["status"] == "loading" and "a" in found.json()["reason"]
        assert (await http.get("/health")).status_code == 200
        alive.reload()  # waits for its turn
        garage.gate.set()
        await until(lambda: said)
        assert alive.server.loading is None
        alive.stop()
        await task
    assert garage.log == ["load a", "close a"]


@in_loop
async def test_a_model_that_does_not_load_is_why_it_ends():
    garage = Garage()
    garage.broken = {"a"}
    async with living(one(garage)) as (_, task, _):
        with pytest.raises(ModelError, match="/private/path is broken"):  # the one at the keyboard may know
            await task


@in_loop
async def test_a_failed_device_ends_it():
    garage, ready = Garage(), threading.Event()
    async with living(one(garage), on_ready=ready.set) as (alive, task, _):
        await until(ready.is_set)
        threading.Thread(target=alive.stop, args=(DeviceError("twice"),)).start()
        with pytest.raises(DeviceError):
            await task
    assert garage.log == ["load a", "close a"]


def test_idle_models_leave_by_themselves(monkeypatch):
    monkeypatch.setattr(life, "TICK_S", 0.01)

    async def run():
        garage = Garage()
        async with living(one(garage, ttl=0.0)):
            await until(lambda: garage.log == ["load a", "close a"])

    asyncio.run(asyncio.wait_for(run(), 20))


@in_loop
async def test_a_reload_loads_what_is_to_be_there():
    garage, ready = Garage(), threading.Event()
    models = one(garage)
    wrong = []

    def reloaded():
        if wrong:
            raise ConfigError("no")
        models.reload(Registry([Entry("b", "/b", pinned=True)]), 1)

    async with living(models, on_ready=ready.set, reloaded=reloaded) as (alive, _, _):
        await until(ready.is_set)
        wrong.append(True)
        alive.reload()
        assert models.ready("a") is not None
        wrong.clear()
        alive.reload()
        await until(lambda: garage.log == ["load a", "close a", "load b"])
        garage.broken = {"c"}
        models.registry = Registry([Entry("c", "/c")])
        assert not alive._stop.is_set()  # a model that fails later ends nothing
