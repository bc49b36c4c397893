"""How an answer looks while it comes: plain text, Markdown on a terminal, or nothing; and the numbers after it."""

from __future__ import annotations

import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any

from .options import paint

if TYPE_CHECKING:
    from ..decode.engine import Engine, Ticket
    from ..decode.request import Completion, Request
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

    def finish(self) -> None:
        if self._last != "\n":
            sys.stdout.write("\n")
            sys.stdout.flush()


class Markdown:
    """Markdown on a terminal. Finished blocks are printed for good, only the last one is redrawn."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, redirect_stderr=False)
        self._live.start()
        self._tail = ""
        self._drawn = 0.0

    def write(self, text: str) -> None:
        from rich.markdown import Markdown as Block

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

    def finish(self) -> None:
        from rich.markdown import Markdown as Block

        self._live.update(Block(self._tail), refresh=True)
        self._live.stop()


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


def view(json: bool = False) -> Silent | Plain | Markdown:
    """The view that suits stdout."""
    if json:
        return Silent()
    if sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown", "", None):
        return Markdown()
    return Plain()


def answer(
    engine: Engine, request: Request, shown: Silent | Plain | Markdown, interrupt: Interrupt
) -> Completion | None:
    """Submit, show the answer as it comes, and give back the completion; None if it was cancelled in the queue."""
    from ..decode.request import Delta, Finished, Progress, Started
    from ..errors import EngineError

    status = Status(not isinstance(shown, Silent))
    ticket: Ticket = engine.submit(request)
    interrupt.watch(ticket)
    completion = None
    started = False
    to_read = 0
    try:
        for event in ticket:
            if isinstance(event, Started):
                started, to_read = True, event.prompt_tokens - event.cached_tokens
            elif isinstance(event, Progress) and to_read > LONG_PROMPT and event.done < event.total:
                status.show(f"reading the prompt: {event.done:,} of {event.total:,} tokens")
            elif isinstance(event, Delta):
                status.clear()
                shown.write(event.text)
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
