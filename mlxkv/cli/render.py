"""How an answer looks while it comes: plain text, Markdown on a terminal, or nothing; and the numbers after it."""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .options import paint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.live import Live

    from ..decode.request import Completion
    from .interrupt import Interrupt

#: prompt tokens to read from which on the terminal shows how far reading is
LONG_PROMPT = 256

# What a model may not send to a terminal: C0 and C1 controls (but tab and line feed), among them escape sequences.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """``text`` without what could steer a terminal."""
    return _CONTROLS.sub("", text)


class Status:
    """One line on stderr that comes and goes; silent where stderr is no terminal."""

    def __init__(self, enabled: bool = True) -> None:
        self._on = enabled and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._shown = False

    def show(self, text: str) -> None:
        if self._on:
            sys.stderr.write(f"\r\x1b[K{paint(text, '2')}")
            sys.stderr.flush()
            self._shown = True

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False


class Silent:
    """Shows nothing: ``--json`` prints the whole object at the end."""

    def write(self, text: str) -> None:
        pass

    def think(self, text: str) -> None:
        pass

    def finish(self) -> None:
        pass


class Plain:
    """Text as it comes, to stdout."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._last = "\n"

    def write(self, text: str) -> None:
        if text:
            sys.stdout.write(_CONTROLS.sub("", text) if self._terminal else text)
            sys.stdout.flush()
            self._last = text[-1]

    def think(self, text: str) -> None:
        """Nothing: what is not the answer does not belong on stdout."""

    def finish(self) -> None:
        if self._last != "\n":
            sys.stdout.write("\n")
            sys.stdout.flush()


class Markdown:
    """Markdown on a terminal. Finished blocks are printed for good, only the last one is redrawn. Reasoning comes dim,
    as plain text."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console()
        self._live: Live | None = None
        self._thinking = False
        self._tail = ""
        self._drawn = 0.0

    def write(self, text: str) -> None:
        from rich.live import Live
        from rich.markdown import Markdown as Block

        self._answer()
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, redirect_stderr=False)
            self._live.start()
        self._tail += _CONTROLS.sub("", text)
        done, self._tail = split_blocks(self._tail)
        if done:
            self._live.update("")
            self._console.print(Block(done))
            self._console.print()
        now = time.monotonic()
        if done or now - self._drawn > 0.08:
            self._live.update(Block(self._tail), refresh=True)
            self._drawn = now

    def think(self, text: str) -> None:
        self._end_block()
        self._thinking = True
        sys.stdout.write(paint(_CONTROLS.sub("", text), "2"))
        sys.stdout.flush()

    def finish(self) -> None:
        self._answer()
        self._end_block()

    def _answer(self) -> None:
        """What follows is no reasoning."""
        if self._thinking:
            self._thinking = False
            sys.stdout.write("\n\n")
            sys.stdout.flush()

    def _end_block(self) -> None:
        from rich.markdown import Markdown as Block

        if self._live is not None:
            self._live.update(Block(self._tail), refresh=True)
            self._live.stop()
            self._live, self._tail = None, ""


def split_blocks(text: str) -> tuple[str, str]:
    """(whole Markdown blocks, the rest). A block ends at an empty line outside a code fence and outside a list."""
    lines = text.split("\n")
    fence, cut = "", 0
    for i, line in enumerate(lines[:-1]):
        mark = re.match(r" {0,3}(```+|~~~+)", line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
            fence = ""
        elif not fence and not line.strip():
            following = lines[i + 1]
            # A list or an indented part may go on after the empty line; numbering would start again. One character
            # of a line that is still coming does not tell.
            told = len(following) > 1 or (following and i + 2 < len(lines))
            if told and not re.match(r"\s|[-*+](\s|$)|\d", following):
                cut = i + 1
    return "\n".join(lines[:cut]).strip("\n"), "\n".join(lines[cut:])


View = Silent | Plain | Markdown


def view(json: bool = False) -> View:
    """The view that suits stdout."""
    if json:
        return Silent()
    if sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown", "", None):
        return Markdown()
    return Plain()


@dataclass(frozen=True)
class Thought:
    """An event: text of the model's reasoning, told apart from its answer."""

    text: str


@dataclass(frozen=True)
class Waiting:
    """An event: nothing has come for ``seconds`` since the question was sent."""

    seconds: float


class Events(Protocol):
    """A ticket of the engine's or of a server's."""

    @property
    def cancelled(self) -> bool: ...

    def cancel(self) -> None: ...

    def __iter__(self) -> Iterator[Any]: ...


def answer(ticket: Events, shown: View, interrupt: Interrupt, thoughts: list[str] | None = None) -> Completion | None:
    """Show the answer of ``ticket`` as it comes, and give back the completion; None if it was cancelled in the queue.
    Reasoning that is told apart from it is added to ``thoughts``."""
    from ..decode.request import Delta, Finished, Progress, Started
    from ..errors import EngineError

    status = Status(not isinstance(shown, Silent))
    interrupt.watch(ticket)
    completion = None
    started = False
    to_read = 0
    reading = "waiting for the answer"
    try:
        for event in ticket:
            if isinstance(event, Started):
                started, to_read = True, event.prompt_tokens - event.cached_tokens
            elif isinstance(event, Progress) and to_read > LONG_PROMPT and event.done < event.total:
                reading = f"reading the prompt: {event.done:,} of {event.total:,} tokens"
                status.show(reading)
            elif isinstance(event, Waiting):
                status.show(f"{reading} · {event.seconds:.0f} s")
            elif isinstance(event, Delta):
                status.clear()
                shown.write(event.text)
            elif isinstance(event, Thought):
                status.clear()
                shown.think(event.text)
                if thoughts is not None:
                    thoughts.append(event.text)
            elif isinstance(event, Finished):
                completion = event.completion
    except BaseException as error:
        if isinstance(error, EngineError) and ticket.cancelled and not started:
            return None
        ticket.cancel()
        raise
    finally:
        status.clear()
        shown.finish()
    return completion


def stats_line(completion: Completion) -> str:
    """Speed, token counts and what the cache did: ``16 tok/s · 34 prompt + 5 answer tokens · 30 cached (ssd; …) …``."""
    usage, cache, timings = completion.usage, completion.cache, completion.timings
    why = [cache.source] if cache.source != "none" else []
    if cache.miss_reason:
        why.append(cache.miss_reason + (f" from {cache.miss_position:,}" if cache.miss_position is not None else ""))
    parts = [f"{timings.decode_tps:.1f} tok/s"] if usage.completion_tokens > 1 else []  # one token has no speed
    if usage.prompt_tokens:  # a server that was hung up on has told nothing
        parts += [
            f"{usage.prompt_tokens:,} prompt + {usage.completion_tokens:,} answer tokens",
            f"{usage.cached_tokens:,} cached" + (f" ({'; '.join(why)})" if why else ""),
        ]
    if usage.completion_tokens:
        parts.append(f"first token after {timings.ttft_s:.2f} s")
    if completion.drafts.drafted:
        parts.append(f"{completion.drafts.accepted:,} of {completion.drafts.drafted:,} drafts accepted")
    if completion.finish_reason == "length":
        parts.append("stopped at the token limit")
    elif completion.finish_reason == "cancelled":
        parts.append("cancelled")
    return " · ".join(parts)


@dataclass
class Totals:
    """What the answers of a chat took, added up. Tokens, and seconds of decoding."""

    prompt: int = 0
    cached: int = 0
    answered: int = 0
    decoded: int = 0  # of these, the ones that came after the first of an answer
    decode_s: float = 0.0

    def add(self, completion: Completion) -> None:
        usage, speed = completion.usage, completion.timings.decode_tps
        self.prompt += usage.prompt_tokens
        self.cached += usage.cached_tokens
        self.answered += usage.completion_tokens
        if usage.completion_tokens > 1 and speed > 0:
            self.decoded += usage.completion_tokens - 1
            self.decode_s += (usage.completion_tokens - 1) / speed

    def facts(self) -> dict[str, str]:
        """In words, for people."""
        if not self.prompt:
            return {}
        made = {"prompts": f"{self.prompt:,} tokens, {self.cached:,} of them cached ({self.cached / self.prompt:.0%})"}
        speed = f", {self.decoded / self.decode_s:.1f} tok/s" if self.decode_s else ""
        return made | {"answers": f"{self.answered:,} tokens{speed}"}


def show_stats(completion: Completion) -> None:
    """The line of numbers, dim, on stderr."""
    sys.stderr.write(paint(stats_line(completion), "2") + "\n")
    sys.stderr.flush()


def print_json(value: Any) -> None:
    """One line of JSON on stdout, UTF-8 whatever the locale says."""
    import json

    sys.stdout.flush()
    sys.stdout.buffer.write(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
    sys.stdout.buffer.flush()
