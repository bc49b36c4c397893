"""The engine: one thread that owns MLX and runs the loop, a queue in front of it, and a watch over both."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from .. import numerics
from ..errors import (
    DeviceError,
    EngineBusy,
    EngineClosed,
    EngineError,
    MlxkvError,
    ModelError,
    QueueFull,
    RequestCancelled,
)
from .options import EngineInfo, Options
from .preparing import Prepared, Words
from .request import Request, SamplingParams
from .reservation import warm_up
from .status import Status
from .text import shared
from .threads import join_fully, leave_device
from .ticket import Ticket
from .watchdog import Watchdog

log = logging.getLogger("mlxkv.engine")

#: a second device failure within this many seconds ends the engine
FAILURE_WINDOW = 60.0
#: seconds between two looks at the memory while nothing is to be done
IDLE_S = 1.0
#: seconds between two accounts of what it does, while nobody comes or goes
ACCOUNT_S = 0.02
#: tokens of a warm-up's longer prompt
WARM_TOKENS = 32


T = TypeVar("T")


@dataclass(frozen=True)
class Health:
    """``reason``: why the loop cannot answer, for now or for good; None if it can. active: requests that were admitted,
    queued: those that were not."""

    reason: str | None
    active: int
    queued: int

    @property
    def ok(self) -> bool:
        return self.reason is None


class _Question:
    """Something that is asked of the loop by another thread."""

    def __init__(self, ask: Callable[[Any], Any]) -> None:
        self._ask = ask
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def ask(self, loop: Any) -> None:
        try:
            self._result = self._ask(loop)
        except BaseException as e:
            self._error = e
        self._done.set()

    def refuse(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    def answer(self, timeout: float | None) -> Any:
        if not self._done.wait(timeout):
            raise EngineBusy(f"The engine has not come to the question within {timeout:g} s.", "Try again later.")
        if self._error is not None:
            traceback.clear_frames(self._error.__traceback__)  # they hold the loop, and callers keep errors
            raise self._error
        return self._result


class Engine:
    """Loads ``model`` on a thread of its own and answers requests there until ``close()``.

    model: a folder or a Hugging Face id. dtype: auto | bf16 | fp16 | fp32. cache_dir: where the prefix store lives;
    None or cache=False: no store. cache_budget: bytes that everything in that folder may weigh, None for a tenth of the
    free disk, at most 32 GB. store_bits: 4 or 8 has the store keep rows of keys and values quantised, which takes less
    room and is not exact (None: exact). block_size: the store's grid, tokens. prefill_chunk: tokens of one prefill
    forward, None for what suits the device. split: whether a boundary of the store cuts a forward: always, never where
    the model can do without, or auto (on a GPU only 512 tokens or more after the last cut). max_gap_ms: milliseconds
    that two tokens of an answer should at most be apart while other prompts are read, whose chunks shrink for it;
    None: 250 on a GPU, 500 on a CPU. max_rows: requests that run at the same time. compile: whether decoding steps
    are compiled: on, off, or auto (where that was measured faster). draft: what proposes tokens that one forward then
    checks, several at a time: mtp (the model's own head), model (a smaller one), ngram (what followed the same words
    before), off, or auto: draft_model if one is named, else the head, if the state of every layer can be taken back.
    Text is what it would be without. draft_model: a folder or a Hugging Face id of a model with the same tokenizer.
    draft_depth: tokens proposed at a time, 1 to 8; None: as many as pay, measured while it runs. ring_spare: rows that
    sliding windows keep beside themselves for tokens that are checked: as many can be proposed. async_kv_limit: bytes
    of live state up to which a step is submitted early, 0 = never. ram_budget: bytes of the store's records kept in
    RAM; None: 1/16 of memory, at most 2 GiB; 0: none. write_budget: bytes that the store may write a day; None: 100 GB.
    legacy_dirs: cache folders of oMLX's that are read, at most 20 s a request, where the store itself knows nothing
    further; only those that an import was given --assume-same-weights for. object_store: URL of an object store that
    machines share (s3://bucket/prefix, gs://, az://, file:///folder; docs/object-store.md): what is stored here is sent
    there, and what this folder lacks is looked for there. object_timeout: seconds that a request waits for it at most.
    object_secret: encrypts what is there.
    memory_limit: bytes that weights, live caches and records in RAM may take together: where a request's caches need
    more, RAM keeps less meanwhile; None: what Metal recommends, elsewhere three quarters of memory. wired: bytes to
    wire on Metal (a raised limit can panic a Mac; off by default). max_queue: requests that may wait. watchdog_s:
    seconds after which a turn of the loop (a chunk of a prompt, a step) counts as hung, and the engine as not ready.
    progress: told (what is done, how much of it, of how much) on the engine's thread while it starts.

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
        compile: Literal["auto", "on", "off"] = "auto",
        draft: Literal["auto", "mtp", "ngram", "model", "off"] = "auto",
        draft_model: str | Path | None = None,
        draft_depth: int | None = None,
        ring_spare: int = 8,
        async_kv_limit: int = 0,
        wired: int | None = None,
        allow_unprotected: bool = False,
        ram_budget: int | None = None,
        write_budget: int | None = None,
        legacy_dirs: Sequence[Path | str] = (),
        object_store: str | None = None,
        object_timeout: float = 5.0,
        object_secret: str | None = None,
        memory_limit: int | None = None,
        max_queue: int = 256,
        watchdog_s: float = 300.0,
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
            draft=draft,
            draft_model=draft_model,
            draft_depth=draft_depth,
            ring_spare=ring_spare,
            async_kv_limit=async_kv_limit,
            wired=wired,
            allow_unprotected=allow_unprotected,
            ram_budget=ram_budget,
            write_budget=write_budget,
            legacy_dirs=tuple(Path(d).expanduser() for d in legacy_dirs),
            object_store=object_store,
            object_timeout=object_timeout,
            object_secret=object_secret,
            memory_limit=memory_limit,
            progress=progress,
        )
        numerics.prepare()
        self._max_queue = max_queue
        self._queue: deque[Ticket] = deque()
        self._asked: deque[_Question] = deque()
        self._live: dict[Ticket, None] = {}  # all that have not ended, in order
        self._status = Status()
        self._watchdog = Watchdog(watchdog_s)
        self._closing = False
        self._unhealthy: str | None = None
        self._last_failure = float("-inf")
        self._broken: EngineError | None = None
        self._wake = threading.Condition()
        self._ready = threading.Event()
        self._load_error: BaseException | None = None
        self.info: EngineInfo
        self.tokenizer: Any = None
        self._words: Words
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
        ticket.on_end = self._forget
        with self._wake:
            if self._unhealthy is not None:
                raise EngineClosed(f"The engine takes no requests: {self._unhealthy}.", "Start it again.")
            if self._closing:
                raise EngineClosed("The engine is closed.")
            if not self._thread.is_alive():  # after a fork, for one
                raise EngineClosed("The engine's thread does not run in this process.", "Start an engine here.")
            waiting = len(self._queue) + self._status.queued + self._status.waiting
            if waiting >= self._max_queue:
                waiting -= self._give_way()
            if waiting >= self._max_queue:
                raise QueueFull(f"{waiting} requests wait already.", "Try again later.")
            self._live[ticket] = None
            self._queue.append(ticket)
            self._wake.notify_all()
        return ticket

    def _give_way(self) -> int:
        """Who is queued and wants no answer any more leaves, though the loop may be busy; how many they are."""
        gone = [ticket for ticket in self._queue if ticket.cancelled]
        for ticket in gone:
            self._queue.remove(ticket)
            ticket.fail(RequestCancelled("The request was cancelled before it started."))
        return len(gone)

    def _forget(self, ticket: Ticket) -> None:
        self._live.pop(ticket, None)

    def prepare(self, request: Request, fits: bool = True) -> Prepared:
        """Render, tokenise and check a request and compile its grammar, beside whatever the engine does. ``submit`` it
        with what comes back as its ``prepared``, and that is not done again. fits: context and memory must have room
        for it; what does not fit can be counted only. Raises RequestError for all that is wrong with it."""
        return self._words.prepare(request, fits)

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """Ids of ``text``. special: with what the tokenizer puts around a prompt (a BOS token, for one). Raises
        RequestError for what is no text."""
        return self._words.tokenize(text, special)

    def detokenize(self, ids: list[int]) -> str:
        """The exact text of ``ids``, special tokens included. Raises RequestError for what is no id of this model."""
        return self._words.detokenize(ids)

    def warm_up(self) -> None:
        """Have short requests of no meaning answered together, of which nothing is looked up or stored: the first real
        ones find kernels built, the model asked whether its rows can share a batch, and chunks, steps and, where there
        are drafts, cycles timed. Other shapes are met, and traced where steps are compiled, when a request is admitted.
        Raises EngineError."""
        plan = warm_up(self._options.draft_depth or self.info.drafts if self.info.drafter else 0)
        rows = plan.requests(self._options.max_rows, WARM_TOKENS, 3, 1)
        sampling = SamplingParams(max_tokens=plan.steps * plan.width)
        asked = [  # a chunk, and then a mixed run
            [Request(tokens=[0] * tokens, sampling=sampling, use_cache=False) for _ in range(rows)]
            for tokens in (WARM_TOKENS, plan.prompt)
        ]
        self.inspect(lambda loop: loop.rehearse(True))
        try:
            for requests in asked:
                for ticket in [self.submit(request) for request in requests]:
                    ticket.result()
        finally:
            self.inspect(lambda loop: loop.rehearse(False))

        def cycles(loop: Any) -> None:
            from .rehearsal import rehearse

            rehearse(loop, asked, lambda: self._closing, self._watchdog.turn)

        self.inspect(cycles)

    def health(self) -> Health:
        with self._wake:
            reason = self._unhealthy
            if reason is None and self._closing:
                reason = "closed"
            if reason is None and not self._thread.is_alive():
                reason = "the engine's thread has ended"
            now = self._now()
            return Health(reason or self._watchdog.reason, now.active, now.queued + now.waiting)

    def status(self) -> Status:
        """What it is doing, as of its last turn (of plain steps: of one of the last ``ACCOUNT_S``); ``rows`` as of this
        moment."""
        with self._wake:
            rows = tuple(ticket.row(self._words.context_length) for ticket in list(self._live))
            return replace(self._now(), rows=rows)

    def _now(self) -> Status:
        return replace(self._status, queued=self._status.queued + len(self._queue))

    def inspect(self, ask: Callable[[Any], T], timeout: float | None = None) -> T:
        """What ``ask(loop)`` says, asked between two turns on the engine's thread. Raises what it raises, EngineClosed,
        and EngineBusy after ``timeout`` seconds."""
        question = _Question(ask)
        with self._wake:
            if self._closing or not self._thread.is_alive():
                raise EngineClosed("The engine is closed.")
            self._asked.append(question)
            self._wake.notify_all()
        return question.answer(timeout)

    def close(self) -> None:
        """Cancel what runs, refuse what waits, write what is pending, and end the thread. Idempotent."""
        with self._wake:
            self._closing = True
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
            from .needs import Limits  # imports MLX, which belongs to this thread
            from .runtime import open_runtime

            runtime, self.info = open_runtime(self._options)
            self.tokenizer = runtime.tokenizer
            shared(runtime.tokenizer)
            self._words = Words(
                runtime.tokenizer,
                frozenset(runtime.eos),
                runtime.vocab_size,
                runtime.context_length,
                runtime.grammars,
                Limits.of(runtime).refuse,
            )
            limit = runtime.memory.limit
            self._status = Status(memory=runtime.memory.ledger(), memory_limit=limit)  # there before anybody can ask
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
            self._run(runtime)
        except BaseException:
            log.exception("the engine's loop has failed")
            self._unhealthy = "its loop has failed"
        finally:
            with self._wake:
                waiting, self._queue = list(self._live), deque()  # whatever ended it: all that have not ended are told
                self._closing = True
                questions, self._asked = list(self._asked), deque()
            for ticket in waiting:
                ticket.fail(EngineClosed("The engine was closed before this request was answered."))
            for question in questions:
                question.refuse(EngineClosed("The engine was closed."))
            if runtime.store is not None:
                runtime.store.close()
            self._words = replace(self._words, refuse=lambda prompt_tokens, answer_tokens: None)  # its books go too
            del runtime
            leave_device()

    def _run(self, runtime: Any) -> None:
        from .loop import Loop

        loop = Loop(runtime, self._options, self._failed)

        shown: tuple[int, ...] = ()
        when = 0.0

        def publish() -> None:
            nonlocal shown, when
            with self._wake:
                self._status = loop.status()
            shown, when = loop.shape, time.monotonic()

        def look() -> None:
            if not self._queue:  # between most steps
                return
            with self._wake:
                loop.tickets.extend(self._queue)
                self._queue.clear()
                self._status = replace(self._status, queued=len(loop.tickets))

        loop.changed, loop.look = publish, look
        while True:
            with self._wake:
                if loop.idle:
                    self._watchdog.rest()
                    self._status = loop.status()
                    # now and then a turn all the same: or an idle server would not notice that memory is short
                    if not self._wake.wait_for(lambda: self._queue or self._asked or self._closing, IDLE_S):
                        loop.rest()
                if self._closing:
                    break
                look()
                questions, self._asked = list(self._asked), deque()
            while questions:
                questions.pop(0).ask(loop)
            with self._watchdog.turn():
                try:
                    loop.turn()
                except BaseException as e:  # nobody is left waiting, whatever it was
                    loop.reset(self._failed(e))
            if self._broken is not None:
                self._give_up(loop)
                publish()
                return
            if loop.shape != shown or time.monotonic() - when >= ACCOUNT_S:
                publish()
        with self._watchdog.turn():
            try:
                loop.close()
            except BaseException as e:
                log.exception("the engine was closed, but not in order")
                loop.give_up(EngineClosed(f"The engine was closed: {type(e).__name__}: {e}."))
        publish()

    def _failed(self, e: BaseException) -> EngineError:
        """What a request is told that failed without a reason of our own. Gives back the memory of the failed and tries
        the device, where it may have been that; it is given up after this turn if it does not answer, or failed twice.
        """
        log.error("a request failed", exc_info=e)
        error = EngineError(
            f"Generation failed: {type(e).__name__}: {e}.", "The engine goes on; the request can be sent again."
        )
        error.__cause__ = e
        if isinstance(e, (RuntimeError, MemoryError)) and self._failed_again():
            self._broken = error
            error = self._last_words(error)
        return error

    def _failed_again(self) -> bool:
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

    def _last_words(self, cause: EngineError) -> DeviceError:
        error = DeviceError(f"{cause.message} It was the second failure within a minute.", "Start the process again.")
        error.__cause__ = cause
        return error

    def _give_up(self, loop: Any) -> None:
        with self._wake:
            self._unhealthy = "the device failed twice within a minute"
            waiting, self._queue = list(self._queue), deque()
        assert self._broken is not None
        error = self._last_words(self._broken)
        loop.give_up(error)
        for ticket in waiting:
            ticket.fail(error)
