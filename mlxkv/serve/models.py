"""The engines behind the names: loaded on demand, leased to requests, unloaded when idle or in another one's way.

Everything here runs on the event loop; only loading and closing an engine run on threads of their own. One function,
``_arrange``, looks at who waits and who is loaded and decides what happens next; it is called after every change.

A model that has to make room drains first: who holds a lease keeps it, who comes now waits behind the newcomer. Then
its engine is closed, which writes what is pending and frees its memory, and only then is the next one loaded.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..errors import ConfigError, EngineClosed, MlxkvError, ModelError, QueueFull
from .registry import Entry, Registry

if TYPE_CHECKING:
    from ..decode.engine import Engine

log = logging.getLogger("mlxkv.serve")

#: seconds for which a model that could not be loaded is not tried again: each try may have another unloaded first
RETRY_S = 10.0
#: requests that may wait for a model whose entry does not say how many
MOST_WAITING = 256

State = Literal["unloaded", "loading", "ready", "draining", "closing", "failed"]
T = TypeVar("T")


class ModelUnavailable(ModelError):
    """A model of the registry that cannot be loaded now."""

    status = 503
    type = "server_error"
    code = "model_unavailable"


@dataclass
class Slot:
    """An engine's place in memory. leases: requests that use it. used: when the last one ended, ``time.monotonic()``.
    owned: closed with the server."""

    entry: Entry
    engine: Engine | None = None
    state: State = "loading"
    leases: int = 0
    used: float = field(default_factory=time.monotonic)
    owned: bool = True


@dataclass(frozen=True)
class ModelState:
    """One entry as ``/v1/models`` and ``/v1/status`` show it. reason: why it cannot be loaded, if it could not."""

    entry: Entry
    state: State
    leases: int
    waiting: int
    reason: str | None = None


class Models:
    """``load`` makes the engine of an entry, on a thread; ``max_loaded`` engines are held at the same time. ``check``,
    on a thread too, comes before another model is made to leave: it fetches what is not here, and raises ModelError
    for what will not load."""

    def __init__(
        self,
        registry: Registry,
        load: Callable[[Entry], Engine],
        *,
        max_loaded: int = 1,
        check: Callable[[Entry], None] = lambda entry: None,
    ) -> None:
        self._load, self._check_entry = load, check
        self._checking: dict[str, asyncio.Task[None]] = {}
        self._slots: dict[str, Slot] = {}
        self._waiting: dict[str, list[asyncio.Future[Slot]]] = {}  # by name, who came first first
        self._comers: Counter[str] = Counter()  # by name, all who have asked and have no lease yet
        self._failed: dict[str, tuple[float, MlxkvError]] = {}
        self._asked_for: set[str] = set()  # names whose loading is no news in a log
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._check(registry, max_loaded)
        self.registry, self.max_loaded = registry, max_loaded

    @classmethod
    def around(cls, engine: Engine) -> Models:
        """The one model of an engine that the caller closes."""
        info = engine.info
        names = {str(info.path), info.path.name, info.name.rpartition("/")[2]} - {info.name}
        entry = Entry(info.name, str(info.path), tuple(sorted(names)), pinned=True)
        made = cls(Registry([entry]), lambda _: engine)
        made._slots[entry.name] = Slot(entry, engine, "ready", owned=False)
        return made

    @asynccontextmanager
    async def lease(self, name: str, *, bounded: bool = True) -> AsyncIterator[Engine]:
        """The engine of ``name``, which stays while the block runs; loaded first if it is not. Raises ModelError, and
        QueueFull where as many wait for it as may wait for an engine: they all go on to its queue when it comes, and
        are to find room there. ``bounded`` is False for the server's own."""
        entry = self.registry[name]
        most = entry.options.get("max_queue", MOST_WAITING)
        if bounded and self._comers[entry.name] >= most:
            raise QueueFull(f"{most} requests wait for the model {entry.name} already.", "Try again later.")
        self._comers[entry.name] += 1
        try:
            slot = await self._slot(entry)
        finally:
            self._comers[entry.name] -= 1
        assert slot.engine is not None
        try:
            yield slot.engine
        finally:
            self._give_back(slot)

    def ready(self, name: str) -> Engine | None:
        """The engine of ``name`` if it can be leased without waiting, else None. Raises ModelError for an unknown
        name."""
        slot = self._slots.get(self.registry[name].name)
        return slot.engine if slot is not None and slot.state == "ready" else None

    def states(self) -> list[ModelState]:
        """All entries, and what has become of them."""
        made = []
        for entry in self.registry:
            slot, failure = self._slots.get(entry.name), self._failed.get(entry.name)
            state: State = "failed" if failure else "unloaded"
            if slot is not None or entry.name in self._checking:
                state = slot.state if slot else "loading"
            waiting = len(self._waiting.get(entry.name, ()))
            reason = str(failure[1]) if failure else None
            made.append(ModelState(entry, state, slot.leases if slot else 0, waiting, reason))
        return made

    def engines(self) -> list[tuple[str, Engine]]:
        """The engines that are loaded, by name."""
        return [(name, slot.engine) for name, slot in self._slots.items() if slot.engine is not None]

    def first(self) -> list[Entry]:
        """What is to be there from the start: the pinned ones, or else the default."""
        return [entry for entry in self.registry if entry.pinned] or list(self.registry)[:1]

    async def preload(self) -> None:
        """Load ``first()``. Raises ModelError."""
        for entry in self.first():
            self._asked_for.add(entry.name)
            async with self.lease(entry.name, bounded=False):
                pass

    def expire(self) -> None:
        """Unload what nobody has used for its ``ttl``."""
        now = time.monotonic()
        for slot in list(self._slots.values()):
            ttl = slot.entry.ttl
            idle = slot.state == "ready" and not slot.leases and slot.owned and not slot.entry.pinned
            if idle and ttl is not None and now - slot.used >= ttl and slot.entry.name not in self._waiting:
                log.info("model=%s unloaded: idle for %.0f s", slot.entry.name, now - slot.used)
                self._close(slot)

    def reload(self, registry: Registry, max_loaded: int) -> None:
        """Go on with other entries. Engines of entries that did not change stay; others drain and are closed. Raises
        ConfigError, and then nothing has changed."""
        self._check(registry, max_loaded)
        self.registry, self.max_loaded = registry, max_loaded
        self._failed.clear()
        known = {entry.name: entry for entry in registry}
        for name, waiting in list(self._waiting.items()):
            if name not in known:
                del self._waiting[name]
                _fail(waiting, ModelError(f"The model {name!r} was removed.", "Ask /v1/models for what there is."))
        for name, slot in self._slots.items():
            entry = known.get(name)
            if entry is not None and (entry.same_engine(slot.entry) or not slot.owned):
                slot.entry = entry
        self._arrange()

    async def close(self, patience: float | None = None) -> bool:
        """Close every engine: what runs there is told, what is pending is written. Idempotent. A model that is being
        loaded is waited for, but not longer than ``patience`` seconds; False if one still is."""
        self._closed = True
        gone = EngineClosed("The server is stopping.", "Try again once it has started.")
        for waiting in self._waiting.values():
            _fail(waiting, gone)
        self._waiting.clear()
        for slot in list(self._slots.values()):
            if slot.state in ("ready", "draining") and slot.owned:
                self._close(slot)
        for check in self._checking.values():
            check.cancel()  # it may be a download; nothing is lost
        until = None if patience is None else time.monotonic() + patience
        while self._tasks:
            loading = all(slot.state == "loading" for slot in self._slots.values())
            if loading and until is not None and time.monotonic() > until:
                return False
            await asyncio.wait(set(self._tasks), timeout=None if until is None else 0.05)
        return True

    # who waits, and what to do about it

    async def _slot(self, entry: Entry) -> Slot:
        if self._closed:
            raise EngineClosed("The server is stopping.", "Try again once it has started.")
        failed = self._failed.get(entry.name)
        if failed is not None and time.monotonic() - failed[0] < RETRY_S:
            raise failed[1]
        if entry.name not in self._slots and len(self._slots) >= self.max_loaded:
            await self._checked(entry)
            if self._closed:
                raise EngineClosed("The server is stopping.", "Try again once it has started.")
            entry = self.registry[entry.name]  # a reload may have come between
        future: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(entry.name, []).append(future)
        self._arrange()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._give_back(future.result())  # it came in the same moment
            self._arrange()
            raise

    async def _checked(self, entry: Entry) -> None:
        """Wait for the check of an entry; one for all who ask meanwhile, which goes on when they leave."""

        async def check() -> None:
            try:
                await _on_a_thread(lambda: self._check_entry(entry), "mlxkv-check")
            except asyncio.CancelledError:
                pass  # the server stops, and who waits will see that
            except Exception as error:
                self._failed_to_load(entry.name, error)
            finally:
                del self._checking[entry.name]

        if entry.name not in self._checking:
            self._checking[entry.name] = self._spawn(check())
        await asyncio.shield(self._checking[entry.name])
        failed = self._failed.get(entry.name)
        if failed is not None and time.monotonic() - failed[0] < RETRY_S:
            raise failed[1]

    def _failed_to_load(self, name: str, error: Exception) -> MlxkvError:
        log.error("model=%s could not be loaded: %s", name, error)
        told = _told(name, error)
        self._failed[name] = (time.monotonic(), told)
        return told

    def _give_back(self, slot: Slot) -> None:
        slot.leases -= 1
        slot.used = time.monotonic()
        self._arrange()

    def _arrange(self) -> None:
        for name, waiting in list(self._waiting.items()):
            waiting[:] = [future for future in waiting if not future.done()]
            if not waiting:
                del self._waiting[name]
        if self._closed:
            return
        self._grant()  # first: who waited for what is ready now goes before those who want it gone
        blocked = [name for name in self._waiting if name not in self._slots]
        had = len(self._slots)
        for name in blocked[: max(0, self.max_loaded - had)]:
            self._begin(name)
        self._make_room(len(blocked) - (self.max_loaded - had))
        self._grant()  # again: what was to make room may stay after all

    def _grant(self) -> None:
        for name in [name for name in self._waiting if name in self._slots]:
            slot = self._slots[name]
            if slot.state == "ready" and not self._stale(slot):
                for future in self._waiting.pop(name):
                    slot.leases += 1
                    future.set_result(slot)

    def _stale(self, slot: Slot) -> bool:
        """Whether a reload has changed or removed what this engine was made for."""
        if not slot.owned:
            return False
        entry = next((entry for entry in self.registry if entry.name == slot.entry.name), None)
        return entry is None or not entry.same_engine(slot.entry)

    def _make_room(self, needed: int) -> None:
        """Drain the stale, and as many of the least recently used as are in the way of those who wait."""
        leaving = sum(slot.state == "closing" for slot in self._slots.values())
        there = [s for s in self._slots.values() if s.state in ("ready", "draining") and s.owned]
        stale = [slot for slot in there if self._stale(slot)]
        rest = [slot for slot in there if slot not in stale and not slot.entry.pinned]
        rest.sort(key=lambda slot: (slot.state != "draining", slot.leases > 0, slot.used))
        chosen = stale + rest[: max(0, needed - leaving - len(stale))]
        for slot in there:
            slot.state = "draining" if slot in chosen else "ready"
            if slot in chosen and not slot.leases:
                self._close(slot)

    # threads

    def _begin(self, name: str) -> None:
        slot = self._slots[name] = Slot(self.registry[name])
        level = logging.DEBUG if name in self._asked_for else logging.INFO
        self._asked_for.discard(name)
        log.log(level, "model=%s loading", name)

        async def run() -> None:
            try:
                slot.engine = await _on_a_thread(lambda: self._load(slot.entry), "mlxkv-load")
            except Exception as error:
                del self._slots[name]
                _fail(self._waiting.pop(name, []), self._failed_to_load(name, error))
            else:
                self._failed.pop(name, None)
                slot.state, slot.used = "ready", time.monotonic()
                log.log(level, "model=%s loaded in %.1f s", name, slot.engine.info.load_s)
                if self._closed:
                    self._close(slot)
            self._arrange()

        self._spawn(run())

    def _close(self, slot: Slot) -> None:
        slot.state = "closing"
        engine = slot.engine
        assert engine is not None

        async def run() -> None:
            try:
                await _on_a_thread(engine.close, "mlxkv-close")
            except Exception:
                log.exception("model=%s was closed, but not in order", slot.entry.name)
            slot.engine = None
            del self._slots[slot.entry.name]
            self._arrange()

        self._spawn(run())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @staticmethod
    def _check(registry: Registry, max_loaded: int) -> None:
        pinned = [entry.name for entry in registry if entry.pinned]
        if len(pinned) > max_loaded or (len(pinned) == max_loaded and len(registry.entries) > len(pinned)):
            raise ConfigError(
                f"max_loaded is {max_loaded}, and pinned are {', '.join(pinned)}: other models could never be loaded.",
                "Raise max_loaded, or pin fewer.",
            )


def _told(name: str, error: Exception) -> MlxkvError:
    """What a client hears of a model that did not load; the paths of this machine stay in the log."""
    made = ModelUnavailable(f"The model {name} cannot be loaded.", "The server's log says why.")
    made.__cause__ = error
    return made


def _fail(futures: Iterable[asyncio.Future[Slot]], error: MlxkvError) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)


async def _on_a_thread(work: Callable[[], T], name: str) -> T:
    """``work()`` on a daemon thread of its own: the loop's pool is small, and the end of a process waits for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(str(error)))
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as e:
            error = e
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # the loop was closed; nobody listens
            log.debug("%s ended after its loop", name)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future
