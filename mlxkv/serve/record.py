"""What is told of one request when it is over: its books, without a word of what was said."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..decode.request import Completion
from ..errors import MlxkvError
from .parts import Asked

#: the path of each kind of request
ROUTES = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
#: what is logged for a client that left before its answer was whole (nginx's number)
LEFT = 499
#: upper bounds of the classes of gaps, seconds; one more class has the longer ones
GAP_BOUNDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Gaps:
    """Seconds between the tokens of one choice as they reach the server, counted by class (``GAP_BOUNDS``): cheap
    enough for each token, and of bounded size."""

    def __init__(self) -> None:
        self.counts = [0] * (len(GAP_BOUNDS) + 1)
        self.total = 0.0
        self.longest = 0.0
        self._last: float | None = None

    def tick(self, now: float | None = None) -> None:
        """A part with tokens came. ``now``: ``time.monotonic()``."""
        now = time.monotonic() if now is None else now
        if self._last is not None:
            gap = now - self._last
            self.counts[bisect_left(GAP_BOUNDS, gap)] += 1
            self.total += gap
            self.longest = max(self.longest, gap)
        self._last = now


@dataclass(frozen=True)
class Outcome:
    """One choice that ended by itself or was cut short. Tokens, and seconds except tps (tokens per second after the
    first); the names are those of ``decode.request``. finish: ``stop | length | tool_calls | cancelled``."""

    finish: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    stored_tokens: int
    source: str
    miss_reason: str | None
    miss_position: int | None
    load_s: float
    lookup_s: float
    restore_s: float
    prefill_s: float
    ttft_s: float
    tps: float
    drafted: int
    accepted: int

    @classmethod
    def of(cls, completion: Completion, finish: str | None = None) -> Outcome:
        """``finish``: what the client was told, where that is not the engine's own word ("tool_calls")."""
        usage, cache, timings, drafts = completion.usage, completion.cache, completion.timings, completion.drafts
        return cls(
            finish=finish or completion.finish_reason,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            stored_tokens=cache.stored_tokens,
            source=cache.source,
            miss_reason=cache.miss_reason,
            miss_position=cache.miss_position,
            load_s=timings.load_s,
            lookup_s=timings.lookup_s,
            restore_s=timings.restore_s,
            prefill_s=timings.prefill_s,
            ttft_s=timings.ttft_s,
            tps=timings.decode_tps,
            drafted=drafts.drafted,
            accepted=drafts.accepted,
        )


@dataclass(frozen=True)
class Record:
    """One request that is over.

    id: as the client sees it ("chatcmpl-…"). kind: which API, a key of ``ROUTES``. model: as it was asked for. status:
    the HTTP status, also where it could only be told as an event of a stream whose headers were out; 499 for a client
    that left. error: the code of the error, if one ended it. seconds: from the request to the last byte. outcomes: the
    choices that got as far as an end, cancelled ones too. gaps: between tokens, one for each choice. queued_s: seconds
    until the first choice left the queue; None if none did. ended: seconds since 1970.
    """

    id: str
    kind: str
    model: str
    stream: bool
    status: int
    error: str | None
    seconds: float
    outcomes: tuple[Outcome, ...] = ()
    gaps: tuple[Gaps, ...] = field(default=(), compare=False)
    queued_s: float | None = None
    ended: float = field(default_factory=time.time, compare=False)

    @classmethod
    def of(
        cls,
        id: str,
        asked: Asked,
        outcomes: Sequence[Outcome] = (),
        *,
        began: float,
        error: BaseException | None = None,
        left: bool = False,
        begun: float | None = None,
        gaps: Sequence[Gaps] = (),
    ) -> Record:
        """``began``: ``time.monotonic()`` when the request came; ``begun``: when its first choice left the queue.
        ``left``: the client hung up; ``error``: what it was told instead of (the rest of) an answer."""
        status, code = 200, None
        if isinstance(error, MlxkvError):
            status, code = error.status, error.code
        elif error is not None:
            status, code = 500, "internal_error"
        if left:
            status, code = LEFT, None
        seconds = time.monotonic() - began
        queued = None if begun is None else begun - began
        ends = tuple(outcomes), tuple(gaps)
        return cls(id, asked.kind, asked.model, asked.stream, status, code, seconds, *ends, queued)

    @property
    def route(self) -> str:
        return ROUTES.get(self.kind, self.kind)

    @property
    def finish(self) -> str:
        """Why the first choice ended; ``error`` or ``cancelled`` for a request without an answer."""
        if self.status == LEFT:
            return "cancelled"
        if self.error is not None:
            return "error"
        return self.outcomes[0].finish if self.outcomes else "cancelled"

    def to_json(self) -> dict[str, Any]:
        """The object of ``--log-json``; of several choices the sums, and for the rest the first one's."""
        made: dict[str, Any] = {name: getattr(self, name) for name in ("id", "route", "model", "stream", "status")}
        made |= {"finish": self.finish, "error": self.error, "seconds": round(self.seconds, 6)}
        made["ended"] = round(self.ended, 3)
        if self.queued_s is not None:
            made["queued_s"] = round(self.queued_s, 6)
        if self.outcomes:
            first = asdict(self.outcomes[0])
            del first["finish"]
            for name in ("completion_tokens", "stored_tokens", "drafted", "accepted"):
                first[name] = sum(getattr(o, name) for o in self.outcomes)
            made |= {n: round(v, 6) if isinstance(v, float) else v for n, v in first.items()}
            made["choices"] = len(self.outcomes)
        if self.gaps:
            made["longest_gap_s"] = round(max(g.longest for g in self.gaps), 6)
        return made

    def line(self) -> str:
        """The line of a log: ``name=value`` pairs, the id first."""
        told = self.to_json()
        made = [plain(self.id), f"model={plain(self.model)}", f"route={self.route}", f"status={self.status}"]
        if self.outcomes:
            source = told["source"]
            made += [f"prompt={told['prompt_tokens']}", f"cached={told['cached_tokens']}", f"source={source}"]
            if told["miss_reason"]:
                made.append(f"miss={told['miss_reason']}@{told['miss_position']}")
            made += [f"generated={told['completion_tokens']}", f"prefill_s={told['prefill_s']:.3f}"]
            made += [f"ttft_s={told['ttft_s']:.3f}", f"tok/s={told['tps']:.1f}"]
            if told["drafted"]:
                made.append(f"drafts={told['accepted']}/{told['drafted']}")
            if told["choices"] > 1:
                made.append(f"choices={told['choices']}")
        made.append(f"finish={self.finish}")
        if self.error is not None:
            made.append(f"error={self.error}")
        return " ".join([*made, f"seconds={self.seconds:.3f}"])


def plain(text: str) -> str:
    """A client's word as one word of a log: nothing in it ends a line, and it is short."""
    text = text[:200]
    return text if text.isprintable() and " " not in text and text else ascii(text)
