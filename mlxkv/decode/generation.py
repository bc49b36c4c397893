"""One request, from prompt to answer: look-up, restore, prefill in segments, decode, record.

The decoding loop builds the graph of step t+1 while t runs, reads token t, lets go of the kept references, and only
then submits t+1 (DESIGN §6): a second reference to a cache buffer would cost a copy of it each step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx

from ..cache.inside import Inside
from ..cache.lookup import Lookup
from ..cache.planner import Plan
from ..cache.policy import ladder
from ..cache.recorder import Recorder
from ..cache.state import SequenceState
from ..cache.store import PrefixStore
from ..errors import MlxkvError, PromptTooLong, RequestError
from .prompt import Prompt, build
from .request import (
    CacheReport,
    Completion,
    Delta,
    Event,
    Finished,
    FinishReason,
    Progress,
    Request,
    Started,
    Timings,
    Usage,
)
from .reservation import OPEN_END, reserve
from .runtime import Runtime
from .sampling import Sampler
from .text import Detokenizer, StopStrings


class Cancelled(Exception):
    """The caller no longer wants the answer."""


class Generation:
    """Runs on the engine's thread. ``emit`` takes events; ``cancelled`` is asked at every step edge."""

    def __init__(
        self,
        runtime: Runtime,
        request: Request,
        emit: Callable[[Event], None],
        cancelled: Callable[[], bool],
        received: float,
    ) -> None:
        """``received``: when the request came, ``time.monotonic()``."""
        self.rt, self.request, self.emit, self.cancelled = runtime, request, emit, cancelled
        self.received = received
        self.tokens: list[int] = []
        self.sampled: list[int] = []
        self.recorder: Recorder | None = None
        self.text = ""
        self._capacity = self._rows = 0  # rows by which buffers grow, and that they have
        self._cut = False  # a stop string ended the text, which is therefore not all that the tokens say
        self._lookup_s = self._restore_s = self._prefill_s = self._ttft_s = 0.0
        self._first_at = 0.0

    def run(self) -> Completion:
        """Emit events up to Finished. Raises RequestError for a bad request, anything else for a failure; finished
        boundaries of a cancelled request are kept, those of a failed one are not."""
        try:
            completion = self._run()
        except BaseException:
            if self.recorder is not None:
                self.recorder.drop()
            raise
        finally:
            self._hold_rows(0)
        self.emit(Finished(completion))
        return completion

    def _run(self) -> Completion:
        rt = self.rt
        store = rt.store if self.request.use_cache else None
        prompt = self._prompt(store)
        limit = self._limit(prompt)
        sampler = Sampler(self.request.sampling, prompt.tokens, rt.vocab_size)
        state, lookup, plan = self._resume(prompt, store, limit)
        self.tokens = list(prompt.tokens)
        if store is not None:
            self.recorder = store.recorder(
                state, self.tokens, plan, rt.barrier, self.request.salt, roles=self._roles(prompt), turn=prompt.turn
            )
        self.emit(Started(len(prompt.tokens), lookup.tokens))
        reason: FinishReason
        try:
            logits = self._prefill(state, prompt)
            reason = self._decode(state, sampler, logits, limit)
        except Cancelled:
            reason = "cancelled"
        self._keep(state, prompt, reason)
        return self._completion(prompt, lookup, reason)

    def _prompt(self, store: PrefixStore | None) -> Prompt:
        """The request's prompt, in which answers that ``store`` remembers stand as their own ids. Raises
        RequestError."""
        salt = self.request.salt
        find = (lambda ids, text: store.answer_ids(ids, text, salt)) if store else (lambda ids, text: None)
        try:
            return build(self.request, self.rt.tokenizer, self.rt.eos, find)
        except MlxkvError:
            raise
        except Exception as e:  # whatever a tokenizer raises is no failure of the device
            raise RequestError(f"The prompt cannot be tokenised: {type(e).__name__}: {e}.") from e

    def _limit(self, prompt: Prompt) -> int:
        """How many tokens may be sampled. Raises PromptTooLong, RequestError."""
        n, context = len(prompt.tokens), self.rt.context_length
        if bad := next((t for t in prompt.tokens if t >= self.rt.vocab_size), None):
            raise RequestError(f"Token id {bad} is outside the vocabulary of {self.rt.vocab_size}.", param="tokens")
        wanted = self.request.sampling.max_tokens
        if context is None:
            return wanted if wanted is not None else 2**31 - 1
        if n >= context:
            raise PromptTooLong(
                f"The prompt has {n} tokens, the model's context holds {context}.",
                f"Shorten it to at most {context - 1}.",
                param="messages" if self.request.messages is not None else "prompt",
            )
        return context - n if wanted is None else min(wanted, context - n)

    def _resume(self, prompt: Prompt, store: PrefixStore | None, limit: int) -> tuple[SequenceState, Lookup, Plan]:
        rt = self.rt
        n = len(prompt.tokens)
        capacity = self._capacity = reserve(n + min(limit, OPEN_END), max_len=rt.context_length)

        def fresh() -> SequenceState:
            self._hold_rows(capacity)
            caches = rt.make_cache()
            # members that did not pass the probe are not asked: the model runs, nothing is kept
            state = SequenceState.new(caches) if rt.layout is not None else SequenceState(caches, None)
            state.reserve(capacity)
            return state

        if store is None:
            return fresh(), Lookup(0, "none", "off", 0), Plan()
        started = time.monotonic()
        plan = store.lookup(prompt.tokens, self.request.salt)
        self._lookup_s = time.monotonic() - started
        started = time.monotonic()
        out = store.restore(plan, prompt.tokens, fresh, capacity, self.request.salt)
        self._restore_s = time.monotonic() - started
        return out

    def _hold_rows(self, rows: int) -> None:
        """Caches of so many rows are live, or about to be: 0 once the request is over."""
        self._rows = rows
        self.rt.memory.make_room(rows, self.rt.store.ram if self.rt.store is not None else None)

    def _forward(self, state: SequenceState, ids: mx.array) -> mx.array:
        if state.position + ids.size > self._rows:
            self._hold_rows(self._rows + self._capacity)
        logits = self.rt.model(ids[None], cache=state.caches)
        state.advance(ids.size)
        return logits

    def _prefill(self, state: SequenceState, prompt: Prompt) -> mx.array:
        """Run [position, n−1) in segments, capture at their boundaries, then the last token; its logits."""
        started = time.monotonic()
        try:
            return self._read(state, prompt)
        finally:
            self._prefill_s = time.monotonic() - started

    def _read(self, state: SequenceState, prompt: Prompt) -> mx.array:
        n = len(prompt.tokens)
        roles = self._roles(prompt)
        ids = mx.array(prompt.tokens, mx.int32)
        self.emit(Progress(state.position, n))
        edges = sorted({*roles, n - 1})
        while state.position < n - 1:
            self._check()
            end, inside = self.rt.split.segment(state.position, edges, self.rt.chunk)
            left = self._segment(state, ids[state.position : end], inside)
            mx.eval(state.live())
            if self.recorder is not None:
                self.recorder.flush(left, roles)
            left = None
            if state.position in roles:
                self._boundary(state, roles[state.position])
            if self.recorder is not None:
                self.recorder.commit()
            mx.clear_cache()
            self.emit(Progress(state.position, n))
        self._check()
        return self._forward(state, ids[n - 1 :])[:, -1, :]

    def _segment(self, state: SequenceState, ids: mx.array, inside: tuple[int, ...]) -> Inside | None:
        """One forward over ``ids``, and what its layers left at the boundaries ``inside`` it."""
        if not inside:
            self._forward(state, ids)
            return None
        with self.rt.spans.inside(state.position, state.position + ids.size, inside) as left:
            self._forward(state, ids)
        return left

    def _roles(self, prompt: Prompt) -> dict[int, str]:
        """Where the prefill is cut and state is kept. A function of tokens and configuration only."""
        layout = self.rt.layout
        end = len(prompt.tokens) - 1
        # where members can stand anywhere, or nowhere, a boundary is not worth a cut of its own
        if layout is None or layout.growing_only:
            return {end: "tip"}
        return prompt.roles(ladder(self.rt.ladder, end, prompt.boundaries))

    def _boundary(self, state: SequenceState, role: str) -> None:
        if self.recorder is not None:
            self.recorder.boundary(role=role)
        state.settle()
        mx.eval(state.live())

    def _check(self) -> None:
        if self.cancelled():
            raise Cancelled

    def _decode(self, state: SequenceState, sampler: Sampler, logits: mx.array, limit: int) -> FinishReason:
        """Sample until a stop. The state ends at committed − 1: the last token is not processed."""
        detokenizer, stops = Detokenizer(self.rt.tokenizer), StopStrings(self.request.sampling.stop)
        token = sampler(logits)
        mx.async_eval(token, *state.live(), *sampler.live())
        flushed = state.position
        early = self.rt.async_kv_limit
        while True:
            reach = self.recorder.reach if self.recorder is not None else 0
            if reach and state.position - flushed >= reach - 1:
                mx.eval(token, state.live())  # no newer step is built: rows may be copied out
                assert self.recorder is not None
                self.recorder.flush()
                self.recorder.commit()
                flushed = state.position
            last_possible = len(self.sampled) + 1 >= limit
            held = None if last_possible else state.hold()
            following = None
            if held is not None:
                following = sampler(self._forward(state, token)[:, -1, :])
                if early and sum(a.nbytes for a in state.live()) <= early:
                    mx.async_eval(following, *state.live(), *sampler.live())
            value: int = token.tolist()[0]  # type: ignore[index]
            self.sampled.append(value)
            if len(self.sampled) == 1:
                self._first_at = time.monotonic()
                self._ttft_s = self._first_at - self.received
            ended = value in self.rt.eos
            reason: FinishReason | None = None
            piece = ""
            if not ended:
                piece = stops.feed(detokenizer.feed(value))
            self._cut = stops.hit
            if ended or stops.hit:
                reason = "stop"
            elif last_possible:
                reason = "length"
            elif self.cancelled():
                reason = "cancelled"
            if reason is not None:
                if held is not None:
                    state.put_back(held)  # step t+1 never was: drop its graph
                if not stops.hit:
                    piece += stops.feed(detokenizer.finish())
                    piece += stops.finish()
                    self._cut = stops.hit
                self._say(piece, value)
                return reason
            held = None
            assert following is not None
            token = following
            mx.async_eval(token, *state.live(), *sampler.live())
            self.tokens.append(value)
            self._say(piece, value)

    def _say(self, piece: str, token: int) -> None:
        self.text += piece
        self.emit(Delta(piece, [token]))

    def _keep(self, state: SequenceState, prompt: Prompt, reason: FinishReason) -> None:
        """Record the end of the answer and hand everything over. Raises what the barrier raises."""
        if self.recorder is None:
            return
        mx.eval(state.live())
        # tokens that the state has processed: all but the last sampled one
        del self.tokens[state.position :]
        answer = None
        if reason in ("stop", "length") and self.text and not self._cut:
            last = None if self.sampled[-1] in self.rt.eos else self.sampled[-1]
            answer = (len(prompt.tokens), self.text, last)
        decoded = state.position > len(prompt.tokens) - 1
        if decoded or reason == "cancelled":
            self.recorder.boundary(answer, role="answer" if decoded else "tip")
        self.recorder.commit(everything=True)

    def _completion(self, prompt: Prompt, lookup: Lookup, reason: FinishReason) -> Completion:
        decode_s = time.monotonic() - self._first_at if self._first_at else 0.0
        stored = self.recorder.stored_tokens if self.recorder is not None else 0
        return Completion(
            text=self.text,
            finish_reason=reason,
            token_ids=list(self.sampled),
            usage=Usage(len(prompt.tokens), len(self.sampled), lookup.tokens),
            cache=CacheReport(lookup.source, lookup.reason, lookup.position, stored),
            timings=Timings(
                load_s=self.rt.load_s,
                lookup_s=self._lookup_s,
                restore_s=self._restore_s,
                prefill_s=self._prefill_s,
                ttft_s=self._ttft_s,
                decode_tps=(len(self.sampled) - 1) / decode_s if decode_s > 0 and len(self.sampled) > 1 else 0.0,
            ),
        )
