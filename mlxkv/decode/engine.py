"""The engine: one thread that owns MLX, a queue in front of it, and one request decoded at a time, in order."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import numerics
from ..errors import DeviceError, EngineClosed, EngineError, MlxkvError, ModelError, QueueFull
from .options import EngineInfo, Options
from .request import Request
from .threads import join_fully, leave_device
from .ticket import Ticket

log = logging.getLogger("mlxkv.engine")

#: a second device failure within this many seconds ends the engine
FAILURE_WINDOW = 60.0


@dataclass(frozen=True)
class Health:
    """``ok`` is False once the loop cannot answer any more; ``reason`` says why."""

    ok: bool
    reason: str | None
    active: int
    queued: int


class Engine:
    """Loads ``model`` on a thread of its own and answers requests there until ``close()``.

    model: a folder or a Hugging Face id. dtype: auto | bf16 | fp16 | fp32. cache_dir: where the prefix store lives;
    None or cache=False: no store. cache_budget: bytes that everything in that folder may weigh, None for a tenth of the
    free disk, at most 32 GB. store_bits: 4 or 8 has the store keep rows of keys and values quantised, which takes less
    room and is not exact (None: exact). block_size: the store's grid, tokens. prefill_chunk: tokens of one prefill
    forward, None for what suits the device. split: whether a boundary of the store cuts a forward: always, never where
    the model can do without, or auto (on a GPU only 512 tokens or more after the last cut). max_gap_ms: milliseconds
    that two tokens of an answer should at most be apart while other prompts are read, whose chunks shrink for it;
    None: 250 on a GPU, 500 on a CPU. max_rows: answers that decode at the same time. compile: whether decoding steps
    are compiled: on, off, or auto (where that was measured faster). async_kv_limit: bytes of live state up to which a
    step is submitted early, 0 = never. ram_budget: bytes of the store's records kept in RAM;
    None: 1/16 of memory, at most 2 GiB; 0: none. write_budget: bytes that the store may write a day; None: 100 GB.
    legacy_dirs: cache folders of oMLX's that are read, at most 20 s a request, where the store itself knows nothing
    further; only those that an import was given --assume-same-weights for.
    memory_limit: bytes that weights, live caches and records in RAM may take together: where a request's caches need
    more, RAM keeps less meanwhile; None: what Metal recommends, elsewhere three quarters of memory. wired: bytes to
    wire on Metal (a raised limit can panic a Mac; off by default). max_queue: requests that may wait. progress: told
    (what is done, how much of it, of how much) on the engine's thread while it starts.

    Raises ModelError if the model cannot be loaded, ConfigError for settings that cannot work.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        adapter: str | Path | None = None,
        cache_dir: Path | str | None = None,
        cache: bool = True,
        cache_budget: int | None = None,
        store_bits: int | None = None,
        block_size: int = 256,
        prefill_chunk: int | None = None,
        split: str = "auto",
        max_gap_ms: float | None = None,
        max_rows: int = 16,
        compile: str = "auto",
        async_kv_limit: int = 0,
        wired: int | None = None,
        allow_unprotected: bool = False,
        ram_budget: int | None = None,
        write_budget: int | None = None,
        legacy_dirs: Sequence[Path | str] = (),
        memory_limit: int | None = None,
        max_queue: int = 256,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self._options = Options(
            model=model,
            dtype=dtype,
            adapter=adapter,
            cache_dir=Path(cache_dir).expanduser() if cache and cache_dir is not None else None,
            cache_budget=cache_budget,
            store_bits=store_bits,
            block_size=block_size,
            prefill_chunk=prefill_chunk,
            split=split,
            max_gap_ms=max_gap_ms,
            max_rows=max_rows,
            compile=compile,
            async_kv_limit=async_kv_limit,
            wired=wired,
            allow_unprotected=allow_unprotected,
            ram_budget=ram_budget,
            write_budget=write_budget,
            legacy_dirs=tuple(Path(d).expanduser() for d in legacy_dirs),
            memory_limit=memory_limit,
            progress=progress,
        )
        numerics.prepare()
        self._max_queue = max_queue
        self._queue: deque[Ticket] = deque()
        self._active: Ticket | None = None
        self._closing = False
        self._unhealthy: str | None = None
        self._last_failure = float("-inf")
        self._wake = threading.Condition()
        self._ready = threading.Event()
        self._load_error: BaseException | None = None
        self.info: EngineInfo
        self.tokenizer: Any = None
        self._thread = threading.Thread(target=self._main, name="mlxkv-engine", daemon=True)
        atexit.register(self.close)
        try:
            self._thread.start()
            self._ready.wait()
        except Exception:  # no thread could be started
            atexit.unregister(self.close)
            raise
        except BaseException:  # Ctrl-C: the thread ends once the model is loaded, the process not before
            self._closing = True
            raise
        if self._load_error is not None:
            self.close()
            raise self._load_error

    # any thread

    def submit(self, request: Request) -> Ticket:
        """Queue a request. Raises EngineClosed, QueueFull."""
        ticket = Ticket(request)
        with self._wake:
            if self._unhealthy is not None:
                raise EngineClosed(f"The engine takes no requests: {self._unhealthy}.", "Start it again.")
            if self._closing:
                raise EngineClosed("The engine is closed.")
            if not self._thread.is_alive():  # after a fork, for one
                raise EngineClosed("The engine's thread does not run in this process.", "Start an engine here.")
            if len(self._queue) >= self._max_queue:
                raise QueueFull(f"{len(self._queue)} requests wait already.", "Try again later.")
            self._queue.append(ticket)
            self._wake.notify_all()
        return ticket

    def health(self) -> Health:
        with self._wake:
            reason = self._unhealthy
            if reason is None and self._closing:
                reason = "closed"
            if reason is None and not self._thread.is_alive():
                reason = "the engine's thread has ended"
            return Health(reason is None, reason, int(self._active is not None), len(self._queue))

    def close(self) -> None:
        """Cancel what runs, refuse what waits, write what is pending, and end the thread. Idempotent."""
        with self._wake:
            self._closing = True
            if self._active is not None:
                self._active.cancel()
            self._wake.notify_all()
        if threading.current_thread() is not self._thread:
            join_fully(self._thread)
        atexit.unregister(self.close)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # the engine's thread

    def _main(self) -> None:
        try:
            from .runtime import open_runtime  # imports MLX, which belongs to this thread

            runtime, self.info = open_runtime(self._options)
            self.tokenizer = runtime.tokenizer
        except BaseException as e:
            if isinstance(e, MlxkvError):
                self._load_error = e
            else:
                model = self._options.model
                self._load_error = ModelError(f"{model} cannot be loaded: {type(e).__name__}: {e}", "Run mlxkv doctor.")
                self._load_error.__cause__ = e
            leave_device()
            self._ready.set()
            return
        self._ready.set()
        try:
            self._loop(runtime)
        finally:
            with self._wake:
                waiting, self._queue = list(self._queue), deque()
                self._closing = True
            for ticket in waiting:
                ticket.fail(EngineClosed("The engine was closed before this request was answered."))
            if runtime.store is not None:
                runtime.store.close()
            del runtime
            leave_device()

    def _loop(self, runtime: Any) -> None:
        from .generation import Generation

        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._closing)
                if self._closing:
                    return
                ticket = self._active = self._queue.popleft()
            try:
                if not ticket.cancelled:
                    Generation(runtime, ticket.request, ticket.put, lambda t=ticket: t.cancelled, ticket.received).run()
                else:
                    ticket.fail(EngineError("The request was cancelled before it started."))
            except MlxkvError as e:
                traceback.clear_frames(e.__traceback__)  # they hold the request's state, and callers keep errors
                ticket.fail(e)
            except BaseException as e:
                log.exception("a request failed")
                traceback.clear_frames(e.__traceback__)
                error = EngineError(
                    f"Generation failed: {type(e).__name__}: {e}.", "The engine goes on; the request can be sent again."
                )
                error.__cause__ = e
                if isinstance(e, (RuntimeError, MemoryError)) and self._failed_again():
                    self._give_up(ticket, error)
                    return
                ticket.fail(error)
            finally:
                with self._wake:
                    self._active = None

    def _failed_again(self) -> bool:
        """Give back the memory of the failed request and try the device; True if it cannot be trusted any more."""
        import mlx.core as mx

        again = time.monotonic() - self._last_failure < FAILURE_WINDOW
        self._last_failure = time.monotonic()
        try:
            mx.clear_cache()
            mx.eval(mx.ones((8,)) + 1)
            mx.synchronize()
        except Exception:
            log.exception("the device does not answer")
            return True
        return again

    def _give_up(self, ticket: Ticket, cause: EngineError) -> None:
        with self._wake:
            self._unhealthy = "the device failed twice within a minute"
            waiting, self._queue = [ticket, *self._queue], deque()
        for each in waiting:
            error = DeviceError(
                f"{cause.message} It was the second failure within a minute.", "Start the process again."
            )
            error.__cause__ = cause
            each.fail(error)
