"""A sequence: one request in the house, from its prompt to its completion. It knows what it has said and remembered,
not when it runs: ``prefill``, and the groups of ``seats``, bring its state forward."""

from __future__ import annotations

import time

import mlx.core as mx

from ..cache.lookup import Lookup
from ..cache.planner import Plan
from ..cache.policy import LADDER_GAP, ladder
from ..cache.recorder import Followed, Recorder
from ..cache.state import SequenceState
from ..cache.store import PrefixStore
from ..errors import MlxkvError, RequestError
from .preparing import limit
from .prompt import Prompt, Rendered, tokenised
from .prompt_logprobs import told
from .request import (
    CacheReport,
    Completion,
    Delta,
    DraftReport,
    Finished,
    FinishReason,
    Progress,
    Started,
    Timings,
    TokenLogprob,
    Usage,
)
from .runtime import Runtime
from .sampling import Sampler
from .text import Detokenizer, StopStrings
from .thinking import bounded
from .ticket import Caller
from .tracking import Marks


class Sequence:
    """Its events go to ``ticket``, which is asked at every step edge whether they are still wanted. Raises RequestError
    for a bad request.

    Its life: made (the prompt is built), ``begin`` with a state, prefill up to n−1, then a token at a time: ``accept``
    and ``say``; ``keep`` and ``finish``, or ``drop`` and ``fail``.
    """

    def __init__(self, runtime: Runtime, ticket: Caller) -> None:
        self.rt, self.ticket, self.request = runtime, ticket, ticket.request
        # a restored prompt has no logits, and a part of it would have the wrong ones
        stored = self.request.use_cache and self.request.prompt_logprobs is None
        self.store: PrefixStore | None = runtime.store if stored else None
        self.prompt, rendered = self._prompt()
        most = limit(self.request, self.prompt, runtime.vocab_size, runtime.context_length)
        #: tokens that may be sampled
        self.limit = 2**31 - 1 if most is None else most
        grammar = self.request.grammar
        constraint = runtime.grammars.constraint(grammar) if grammar is not None else None
        constraint = bounded(self.request, rendered, constraint, runtime.vocab_size, runtime.eos)
        self.sampler = Sampler(self.request.sampling, self.prompt.tokens, runtime.vocab_size, constraint)
        #: the prompt, then sampled tokens that were or will be processed
        self.tokens = list(self.prompt.tokens)
        self.sampled: list[int] = []
        self.logprobs: list[TokenLogprob] | None = [] if self.request.sampling.logprobs else None
        #: of the prompt's tokens that were read so far
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        if self.request.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
        self.text = ""
        self.recorder: Recorder | None = None
        self.over = False
        self.lookup = Lookup(0, "none", "off", 0)
        self.drafts = DraftReport()
        self.lookup_s = self.restore_s = self.prefill_s = 0.0
        self.restoring_since = self._first_at = self._last_at = self._ttft_s = 0.0
        self._cut = False  # a stop string ended the text, which is therefore not all that the tokens say
        self._detokenizer, self._stops = Detokenizer(runtime.tokenizer), StopStrings(self.request.sampling.stop)

    # the prompt

    def _prompt(self) -> tuple[Prompt, Rendered]:
        """The request's prompt, in which answers that the store remembers stand as their own ids, and its text."""
        store, salt = self.store, self.request.salt
        find = (lambda ids, text: store.answer_ids(ids, text, salt)) if store else (lambda ids, text: None)
        try:
            rendered = Rendered.of(self.request, self.rt.tokenizer)
            return tokenised(rendered, self.rt.eos, find), rendered
        except MlxkvError:
            raise
        except Exception as e:  # whatever a tokenizer raises is no failure of the device
            raise RequestError(f"The prompt cannot be tokenised: {type(e).__name__}: {e}.") from e

    @property
    def end(self) -> int:
        """Where the prefill ends: before the last prompt token, which is the first step's input."""
        return len(self.prompt.tokens) - 1

    @property
    def roles(self) -> dict[int, str]:
        """Where the prefill is cut and state is kept. A function of tokens and configuration only."""
        layout = self.rt.layout
        # where members can stand anywhere, or nowhere, a boundary is not worth a cut of its own
        if layout is None or layout.growing_only:
            return {self.end: "tip"}
        return self.prompt.roles(ladder(self.rt.ladder, self.end, self.prompt.boundaries))

    def is_rung(self, position: int) -> bool:
        """Whether an answer that has come this far is worth a state: the ladder of a long prefill goes on in it."""
        layout = self.rt.layout
        if self.recorder is None or layout is None or not layout.needs_state:
            return False
        first = self.rt.ladder
        return position == Marks(first).last(position) and position - self.end >= min(LADDER_GAP, first)

    # its way

    def tell_prompt(self, logits: mx.array) -> None:
        """``logits``: [n, V], of the n prompt tokens that come next."""
        assert self.prompt_logprobs is not None and self.request.prompt_logprobs is not None
        at = len(self.prompt_logprobs)
        tokens = self.prompt.tokens[at : at + logits.shape[0]]
        self.prompt_logprobs += told(logits, tokens, self.request.prompt_logprobs)

    def begin(self, state: SequenceState, lookup: Lookup, plan: Plan) -> None:
        """The state that the look-up found, or a fresh one, is there."""
        self.lookup = lookup
        if self.store is not None:
            self.recorder = self.store.recorder(
                state,
                self.tokens,
                plan,
                self.rt.barrier,
                self.request.salt,
                roles=self.roles,
                turn=self.prompt.turn,
            )
        self.ticket.put(Started(len(self.prompt.tokens), lookup.tokens))
        self.ticket.put(Progress(state.position, len(self.prompt.tokens)))

    def moved(self, state: Followed) -> None:
        """Its state lives elsewhere from now on: in a batch, or alone again."""
        if self.recorder is not None:
            self.recorder.state = state

    @property
    def next_token(self) -> int:
        """The input of the next step: the one committed token that is not processed yet."""
        return self.tokens[-1]

    @property
    def last_possible(self) -> bool:
        """The token that is being made is the last one that it may sample."""
        return len(self.sampled) + 1 >= self.limit

    @property
    def full_length(self) -> int:
        """Rows that it will have at most."""
        return len(self.prompt.tokens) + self.limit

    def accept(self, token: int, logprob: TokenLogprob | None = None) -> tuple[str, FinishReason | None]:
        """``token`` was sampled: the text that may be shown now, and why the sequence ends here, if it does. Raises
        EngineError where its grammar cannot go on."""
        self.sampled.append(token)
        if logprob is not None and self.logprobs is not None:
            self.logprobs.append(logprob)
        self._last_at = time.monotonic()
        if len(self.sampled) == 1:
            self._first_at = self._last_at
            self._ttft_s = self._first_at - self.ticket.received
        ended = token in self.rt.eos
        last = len(self.sampled) >= self.limit
        if not ended and not last:
            self.sampler.advance(token)
        reason: FinishReason | None = None
        piece = "" if ended else self._stops.feed(self._detokenizer.feed(token))
        self._cut = self._stops.hit is not None
        if ended or self._cut or self.sampler.done:
            reason = "stop"
        elif last:
            reason = "length"
        elif self.cancelled():
            reason = "cancelled"
        if reason is None:
            self.tokens.append(token)
        elif not self._cut:
            piece += self._stops.feed(self._detokenizer.finish())
            piece += self._stops.finish()
            self._cut = self._stops.hit is not None
        self.text += piece
        return piece, reason

    def drafted(self, proposed: int, accepted: int) -> None:
        """In a cycle so many tokens were proposed for it, and so many of them kept."""
        self.drafts = DraftReport(self.drafts.drafted + proposed, self.drafts.accepted + accepted)

    def say(self, piece: str, token: int, logprob: TokenLogprob | None = None) -> None:
        self.ticket.put(Delta(piece, [token], () if logprob is None else (logprob,)))

    def cancelled(self) -> bool:
        return self.ticket.cancelled

    # its end

    def keep(self, state: Followed, reason: FinishReason) -> None:
        """Record where it ends and hand everything over; ``state`` is evaluated. Raises what the barrier raises."""
        if self.recorder is None:
            return
        # tokens that the state has processed: all but the last sampled one
        del self.tokens[state.position :]
        answer = None
        if reason in ("stop", "length") and self.text and not self._cut:
            last = None if self.sampled[-1] in self.rt.eos else self.sampled[-1]
            answer = (len(self.prompt.tokens), self.text, last)
        decoded = state.position > self.end
        if decoded or reason == "cancelled":
            self.recorder.boundary(answer, role="answer" if decoded else "tip")
        self.recorder.commit(everything=True)

    def drop(self) -> None:
        """It failed: what no barrier has confirmed is not stored."""
        if self.recorder is not None:
            self.recorder.drop()

    def fail(self, error: BaseException) -> None:
        """Tell whoever waits, unless they were told of an end already."""
        if not self.over:
            self.over = True
            self.ticket.fail(error)

    def finish(self, reason: FinishReason) -> Completion:
        completion = self._completion(reason)
        self.over = True
        self.ticket.put(Finished(completion))
        return completion

    def _completion(self, reason: FinishReason) -> Completion:
        decode_s = self._last_at - self._first_at  # what is stored afterwards is not decoding
        n = len(self.sampled)
        return Completion(
            text=self.text,
            finish_reason=reason,
            token_ids=list(self.sampled),
            usage=Usage(len(self.prompt.tokens), n, self.lookup.tokens),
            cache=CacheReport(
                self.lookup.source,
                self.lookup.reason,
                self.lookup.position,
                self.recorder.stored_tokens if self.recorder is not None else 0,
            ),
            timings=Timings(
                load_s=self.rt.load_s,
                lookup_s=self.lookup_s,
                restore_s=self.restore_s,
                prefill_s=self.prefill_s,
                ttft_s=self._ttft_s,
                decode_tps=(n - 1) / decode_s if decode_s > 0 and n > 1 else 0.0,
            ),
            drafts=self.drafts,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            stop=self._stops.hit if reason == "stop" else None,
            stop_token=self.sampled[-1] if reason == "stop" and self.sampled[-1] in self.rt.eos else None,
        )
