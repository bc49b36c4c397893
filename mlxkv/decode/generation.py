"""One request from its prompt to its answer, on the calling thread, with nothing beside it: what the loop does for
many, in its simplest form. For tools that look at one request (``cache explain``) and as the plain run that others are
compared with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from ..cache.lookup import Lookup
from ..cache.planner import Plan
from ..cache.state import SequenceState
from ..cache.store import PrefixStore
from .group import Group, Row
from .prefill import Prefill
from .request import Completion, Event, FinishReason, Request
from .reservation import OPEN_END, reserve
from .runtime import Runtime
from .sequence import Sequence
from .solo import Allotment, Solo
from .speculation import Speculation


@dataclass
class Direct:
    """The caller's end of a request that runs on the caller's thread; see ``ticket``."""

    request: Request
    emit: Callable[[Event], None]
    asked: Callable[[], bool]
    received: float

    @property
    def cancelled(self) -> bool:
        return self.asked()

    def put(self, event: Event) -> None:
        self.emit(event)

    def fail(self, error: BaseException) -> None:
        raise error


class Generation:
    """``emit`` takes events; ``cancelled`` is asked at every step edge. Raises RequestError for a bad request."""

    def __init__(
        self,
        runtime: Runtime,
        request: Request,
        emit: Callable[[Event], None] = lambda event: None,
        cancelled: Callable[[], bool] = lambda: False,
        received: float | None = None,
    ) -> None:
        """``received``: when the request came, ``time.monotonic()``."""
        self.rt = runtime
        self.sequence = Sequence(
            runtime, Direct(request, emit, cancelled, time.monotonic() if received is None else received)
        )

    def run(self) -> Completion:
        """Emit events up to Finished. Raises what goes wrong; finished boundaries of a cancelled request are kept,
        those of a failed one are not."""
        sequence = self.sequence
        try:
            state, lookup, plan, allotment = self.resume(sequence.store)
            sequence.begin(state, lookup, plan)
            reason = self._prefill(state) or self._decode(self._solo(state, allotment))
        except BaseException:
            sequence.drop()
            raise
        finally:
            self.rt.memory.release(sequence)
        return sequence.finish(reason)

    def resume(self, store: PrefixStore | None) -> tuple[SequenceState, Lookup, Plan, Allotment]:
        """The state that ``store`` has of the prompt, or a fresh one."""
        sequence, rt = self.sequence, self.rt
        tokens = sequence.prompt.tokens
        answer = min(sequence.limit, OPEN_END)
        rows = reserve(len(tokens) + answer, lookahead=rt.lookahead, max_len=rt.context_length)
        allotment = Allotment(rt, sequence, rows)
        fresh = allotment.fresh
        if store is None:
            return fresh(), Lookup(0, "none", "off", 0), Plan(), allotment
        started = time.monotonic()
        plan = store.lookup(tokens, sequence.request.salt)
        sequence.lookup_s = time.monotonic() - started
        started = time.monotonic()
        state, lookup, plan = store.restore(plan, tokens, fresh, allotment.rows, sequence.request.salt)
        sequence.restore_s = time.monotonic() - started
        return state, lookup, plan, allotment

    def _prefill(self, state: SequenceState) -> FinishReason | None:
        """Up to the last prompt token but one; why it ended there, if it did."""
        prefill = Prefill(self.sequence, state)
        while prefill.remaining:
            if self.sequence.cancelled():
                mx.eval(state.live())
                self.sequence.keep(state, "cancelled")
                return "cancelled"
            prefill.chunk(self.rt.chunk)
        return None

    def _solo(self, state: SequenceState, allotment: Allotment) -> Solo:
        return Solo(self.rt.model, state, allotment.need, self.rt.drafting, self.rt.context_length)

    def _decode(self, executor: Solo) -> FinishReason:
        drafting = self.rt.drafting
        speculation = None if drafting is None else Speculation(drafting.drafter, drafting.depth())
        group = Group(executor, self.rt.async_kv_limit, speculation=speculation)
        group.add(0, Row(self.sequence, executor.state.position))
        try:
            while True:
                for end in group.step():
                    if end.error is not None:
                        raise end.error
                    assert end.reason is not None
                    return end.reason
        finally:  # also where it failed: the drafter outlives it
            if speculation is not None:
                speculation.forget(self.sequence)
