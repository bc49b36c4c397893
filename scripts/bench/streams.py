"""Several requests at once, on our engine and on mlx-lm's ``BatchGenerator``, behind one interface.

A side is told to ``send`` prompts and then ``poll``ed; it notes when each token came to whoever asked for it. Both are
driven by one thread: ``BatchGenerator`` computes inside ``poll`` (its ``next()``), our engine has a thread of its own,
whose events ``poll`` takes. Neither side is given a stop token or a bias: prompts are such whose greedy text goes on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import BatchGenerator

from mlxkv.decode.engine import Engine
from mlxkv.decode.request import Delta, Finished, Request, SamplingParams
from mlxkv.errors import EngineError

#: seconds that ``Ours.poll`` waits for one stream before it looks at the others
_WAIT = 0.004
#: seconds after which what is waited for does not come any more
PATIENCE = 300.0


@dataclass
class Stream:
    """One request. ``sent``: when it arrived; ``times``: when each of its tokens came, ``time.monotonic()``."""

    sent: float
    times: list[float] = field(default_factory=list)
    ended: bool = False

    def within(self, begin: float, end: float) -> list[float]:
        return [t for t in self.times if begin <= t <= end]

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between tokens, of those gaps that lie in [begin, end] at least in part."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False) if b > begin and a < end]


class Ours:
    """Requests of an engine, without its store."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._open: list[tuple[Stream, Any]] = []

    def send(self, tokens: list[int], max_tokens: int, at: float | None = None) -> Stream:
        """``at``: when the request arrived, if not now."""
        stream = Stream(time.monotonic() if at is None else at)
        sampling = SamplingParams(max_tokens=max_tokens)
        self._open.append((stream, self.engine.submit(Request(tokens=tokens, sampling=sampling, use_cache=False))))
        return stream

    def poll(self) -> None:
        """Take every event that is there; if there is none, wait a moment for the stream that is longest under way."""
        if not any([self._take(stream, ticket, 0.0) for stream, ticket in self._open]) and self._open:
            # the events of one step come together, so that waiting for one stream is waiting for all
            emitting = [pair for pair in self._open if pair[0].times] or self._open
            self._take(*emitting[0], _WAIT)
        self._open = [pair for pair in self._open if not pair[0].ended]

    def _take(self, stream: Stream, ticket: Any, wait: float) -> bool:
        """Whether there was an event."""
        took = False
        while not stream.ended:
            try:
                event = ticket.next_event(0.0 if took else wait)
            except TimeoutError:
                return took
            took = True
            if isinstance(event, Delta):
                stream.times += [time.monotonic()] * len(event.token_ids)
            elif isinstance(event, Finished):
                stream.ended = True
        return took

    def cancel(self) -> None:
        """Have everything end, and wait until it has."""
        for _, ticket in self._open:
            ticket.cancel()
        for stream, ticket in self._open:
            with contextlib.suppress(EngineError):  # cancelled before it started
                ticket.result()
            stream.ended = True
        self._open = []

    def step_seconds(self) -> float | None:
        """Seconds of decoding steps so far, where the engine tells."""
        status = getattr(self.engine, "status", None)
        return None if status is None else getattr(status(), "step_s", None)


class Theirs:
    """Requests of a ``BatchGenerator`` with its defaults, and no stop tokens."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._generator = BatchGenerator(model)
        self._open: dict[int, Stream] = {}

    def send(self, tokens: list[int], max_tokens: int, at: float | None = None) -> Stream:
        stream = Stream(time.monotonic() if at is None else at)
        (uid,) = self._generator.insert([tokens], [max_tokens])
        self._open[uid] = stream
        return stream

    def poll(self) -> None:
        _, responses = self._generator.next()
        now = time.monotonic()
        for response in responses:
            stream = self._open[response.uid]
            stream.times.append(now)
            if response.finish_reason is not None:
                stream.ended = True
                del self._open[response.uid]

    def cancel(self) -> None:
        self._generator.remove(list(self._open))
        for stream in self._open.values():
            stream.ended = True
        self._generator.close()
        self._generator, self._open = BatchGenerator(self._model), {}

    def step_seconds(self) -> float | None:
        return None


Side = Ours | Theirs


def wait(side: Side, until: Callable[[], bool]) -> None:
    """Poll until something is so. Ends the program if it never is."""
    deadline = time.monotonic() + PATIENCE
    while not until():
        if time.monotonic() > deadline:
            raise SystemExit(f"{type(side).__name__}: nothing more came within {PATIENCE:.0f} s")
        side.poll()


def rate(streams: list[Stream], begin: float, end: float) -> float:
    """Tokens a second of all together in [begin, end]: the sum of what each of them makes between its first and last
    token there, so that it does not matter where in a step the ends lie. 0 if one makes none."""
    each = []
    for stream in streams:
        times = stream.within(begin, end)
        if len(times) < 2 or times[-1] <= times[0]:
            return 0.0
        each.append((len(times) - 1) / (times[-1] - times[0]))
    return sum(each)


def aggregate(streams: list[Stream]) -> tuple[float, bool]:
    """Tokens a second from when all emit until the first ends, and True. Where the streams were never under way at the
    same time: those of all from the first token to the last, and False."""
    together = rate(streams, max(s.times[0] for s in streams), min(s.times[-1] for s in streams))
    if together:
        return together, True
    first, last = min(s.times[0] for s in streams), max(s.times[-1] for s in streams)
    return (sum(len(s.times) for s in streams) - 1) / (last - first), False


@dataclass
class Crowd:
    """What happened while one long prompt was read beside running streams. Seconds; ``long``: from its arrival to its
    first token, ``short`` the same of the short prompt that arrived meanwhile (None: none did). ``decoding``: of that
    time, what decoding steps took, by what the streams made before; ``told``: by what the engine says (None: nothing).
    ``tokens``: how many the streams made meanwhile; ``gaps``: of all streams, those that lie in that time at least in
    part. ``together`` is False where the streams did not run at the same time: then nothing of it holds."""

    together: bool
    long: float = 0.0
    short: float | None = None
    decoding: float = 0.0
    told: float | None = None
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)


def crowd(
    side: Side,
    prompts: list[list[int]],
    long: list[int],
    short: list[int],
    *,
    settle: int,
    most: int,
    arrives: float | None,
) -> Crowd:
    """Start a stream for each of ``prompts``, let each make ``settle`` tokens, then send ``long``, and ``short`` as
    soon as that is ``arrives`` seconds old; both are asked for one token. ``most``: tokens that a stream may make."""
    running = [side.send(prompt, most) for prompt in prompts]
    wait(side, lambda: all(len(s.times) > settle for s in running) or any(s.ended for s in running))
    if any(s.ended for s in running):
        side.cancel()
        return Crowd(together=False)
    told = side.step_seconds()
    asked = side.send(long, 1)
    before = rate(running, max(s.times[0] for s in running), asked.sent)
    late: Stream | None = None

    def step() -> bool:
        nonlocal late
        if late is None and arrives is not None and time.monotonic() - asked.sent >= arrives:
            late = side.send(short, 1, at=asked.sent + arrives)
        return asked.ended

    wait(side, step)
    if told is not None:
        told = (side.step_seconds() or 0.0) - told
    first = asked.times[0]
    if arrives is not None and late is None:
        raise SystemExit(f"{type(side).__name__}: a prompt was read in less than a quarter of the time it takes alone")
    kept = [len(s.times) for s in running]

    def over() -> bool:
        """Each stream made one more token: so the gaps that were open are known."""
        if any(s.ended for s in running):
            raise SystemExit(f"{type(side).__name__}: a stream ended while the prompt was read beside it")
        return (late is None or late.ended) and all(len(s.times) > n for s, n in zip(running, kept, strict=True))

    wait(side, over)
    side.cancel()
    made = sum(len([t for t in s.times if asked.sent < t <= first]) for s in running)
    return Crowd(
        together=True,
        long=first - asked.sent,
        short=late.times[0] - late.sent if late is not None else None,
        decoding=made / before,
        told=told,
        tokens=made,
        gaps=[gap for s in running for gap in s.gaps(asked.sent, first)],
    )
