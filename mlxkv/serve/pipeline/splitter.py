"""A model's text, cut into thoughts, text and calls. Cut-invariant: however it arrives, the joined pieces are the same.

What may be the start of a marker is held back, and so is white space that is not part of what is said: around markers,
templates put line breaks of their own, and they put them there again when the answer comes back in a history.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .tools import CallFormat, Made, Malformed

#: characters of an answer that may turn out to be no call; beyond them it makes none. A model that repeats itself
#: writes markers without end, and each of them is looked at
PATIENCE = 300_000

Kind = Literal["text", "thought", "calls", "nothing"]


@dataclass(frozen=True)
class Segment:
    """The next ``length`` characters of the model's text are of this kind; segments leave none out. ``text`` is shown;
    "nothing" are markers and white space around them."""

    kind: Kind
    text: str
    length: int
    calls: tuple[Made, ...] = ()


class Splitter:
    """``thinking``: the markers of thinking, or None where it is not to be told apart. inside: the text begins in a
    thought. calls: how calls are written, or None where there are none. single: the first call is the last."""

    def __init__(
        self, thinking: tuple[str, str] | None, inside: bool, calls: CallFormat | None, *, single: bool = False
    ) -> None:
        self._think = thinking
        self._calls = calls
        self._single = single
        self._mode: Literal["text", "thought", "call", "call in thought", "over"] = (
            "thought" if thinking and inside else "text"
        )
        self._text = ""  # what is not decided yet
        self._fresh = True  # in text: nothing but white space since the answer or what is not text began or ended
        self._seam = inside  # text, or a thought, begins right behind a marker
        self._lead = 0  # white space before the marker of the call that is being read
        self._looked = 0  # where to look for its end
        self._until: tuple[str, ...] | None = None  # what must come before anything can be decided
        self._more: list[str] = []  # what came since
        self._tail = ""  # its end, which may be the start of such a mark
        self._out: list[Segment] = []
        self._patience = PATIENCE
        self._read_before: tuple[str, list[Made]] | None = None

    @property
    def over(self) -> bool:
        """Nothing that comes will be shown."""
        return self._mode == "over"

    def feed(self, text: str) -> list[Segment]:
        if self._until is not None:  # do not copy a long call for each of its tokens
            self._more.append(text)
            self._tail += text
            if not any(mark in self._tail for mark in self._until):
                keep = max(map(len, self._until), default=0)
                self._tail = self._tail[-keep:] if keep else ""
                return []
        else:
            self._text += text
        self._gather()
        return self._run(final=False, whole=False)

    def finish(self, whole: bool) -> list[Segment]:
        """``whole``: the model ended its answer itself; else it was cut off, and what is half there is no call."""
        self._gather()
        return self._run(final=True, whole=whole)

    def _gather(self) -> None:
        if self._until is not None:
            self._text += "".join(self._more)
            self._more, self._tail, self._until = [], "", None

    def _run(self, final: bool, whole: bool) -> list[Segment]:
        steps = {
            "text": self._in_text,
            "thought": self._in_thought,
            "call": lambda final: self._in_call(final, whole),
            "call in thought": lambda final: self._in_call_in_thought(final, whole),
            "over": self._in_nothing,
        }
        while self._text and steps[self._mode](final):
            pass
        out, self._out = self._out, []
        return out

    # each step decides something at the start of what is held, or says that it must wait

    def _in_text(self, final: bool) -> bool:
        if self._fresh:
            return self._begin_text(final)
        if self._calls is None:
            return self._say("text", len(self._text))
        start = self._calls.start
        at = self._text.find(start)
        if at >= 0:
            before = self._text[:at].rstrip("\n")
            self._say("text", len(before))
            return self._enter_call("call", at - len(before))
        keep = 0 if final else self._held((start,))
        return self._say("text", len(self._text) - keep)

    def _begin_text(self, final: bool) -> bool:
        if self._seam and self._text.startswith("\n"):
            return self._say("nothing", len(self._text) - len(self._text.lstrip("\n")))
        rest = self._text.lstrip()
        space = len(self._text) - len(rest)
        if self._think is not None and rest.startswith(self._think[0]):
            self._say("nothing", space + len(self._think[0]))
            self._mode, self._seam = "thought", True
            return True
        if self._calls is not None and rest.startswith(self._calls.start):
            return self._enter_call("call", space)
        starts = ([self._think[0]] if self._think else []) + ([self._calls.start] if self._calls else [])
        waits = any(start.startswith(rest) for start in starts) or (self._seam and not rest)
        if waits and not final:
            return False
        if self._seam and not rest:
            self._say("nothing", space)
        self._fresh = self._seam = False
        return True

    def _in_thought(self, final: bool) -> bool:
        assert self._think is not None
        end = self._think[1]
        if self._seam:
            rest = self._text.lstrip("\n")
            self._say("nothing", len(self._text) - len(rest))
            self._seam = not rest
            return True
        calls = self._calls.start if self._calls is not None and self._calls.end else None
        closes, opens = self._text.find(end), self._text.find(calls) if calls else -1
        if opens >= 0 and not 0 <= closes < opens:
            before = self._text[:opens].rstrip("\n")
            self._say("thought", len(before))
            return self._enter_call("call in thought", opens - len(before))
        if closes >= 0:
            self._say("thought", len(self._text[:closes].rstrip("\n")))
            self._say("nothing", self._text.find(end) + len(end))
            self._mode, self._fresh, self._seam = "text", True, True
            return True
        keep = 0 if final else self._held((end, calls) if calls else (end,))
        return self._say("thought", len(self._text) - keep)

    def _enter_call(self, mode: Literal["call", "call in thought"], lead: int) -> bool:
        assert self._calls is not None
        self._mode, self._lead, self._looked = mode, lead, lead + len(self._calls.start)
        return True

    def _in_call(self, final: bool, whole: bool) -> bool:
        assert self._calls is not None
        form, begins = self._calls, self._lead + len(self._calls.start)
        at = self._text.find(form.end, self._looked) if form.end else -1
        if at < 0:
            if not final:
                return self._wait((form.end,) if form.end else (), self._looked)
            at = len(self._text)
            if not whole or not form.ends_itself:
                self._patience -= at - begins
                return self._no_call("text", begins)
        try:
            found = self._read(self._text[begins:at])
        except Malformed as e:
            if e.open and at < len(self._text) and self._patience > 0:
                self._looked = at + len(form.end)
                return True
            last = self._text.rfind(form.start, begins, at)  # what is before it is no call
            return self._no_call("text", max(begins, len(self._text[: max(last, 0)].rstrip("\n"))))
        return self._call(found, min(at + len(form.end), len(self._text)))

    def _in_call_in_thought(self, final: bool, whole: bool) -> bool:
        """Some models forget to end their thought before they call; others try calls out in it. It was a call if the
        answer ends with it."""
        assert self._calls is not None and self._think is not None
        form, at = self._calls, self._lead
        found: list[Made] = []
        while self._text.startswith(form.start, at):
            begins = at + len(form.start)
            ends, closes = self._text.find(form.end, begins), self._text.find(self._think[1], begins)
            if closes >= 0 and (ends < 0 or closes < ends):
                break
            if ends < 0:
                if not final:
                    return self._wait((form.end, self._think[1]), begins)
                self._patience -= len(self._text) - begins
                break
            try:
                found += self._read(self._text[begins:ends])
            except Malformed:
                break
            behind = self._text[ends + len(form.end) :]
            at = len(self._text) - len(behind.lstrip())
            if not final and form.start.startswith(self._text[at:]):
                return False
            if final and whole and at == len(self._text):
                return self._call(found, at)
        return self._no_call("thought", self._lead + len(form.start))

    def _wait(self, marks: tuple[str, ...], begins: int) -> Literal[False]:
        """Nothing can be decided before one of ``marks`` has come; none of them is in the text from ``begins`` on."""
        self._until = marks
        keep = max(map(len, marks), default=0)
        self._tail = self._text[begins:][-keep:] if keep else ""
        return False

    def _read(self, text: str) -> list[Made]:
        """The calls in a text between markers. Raises Malformed."""
        assert self._calls is not None
        if self._read_before is None or self._read_before[0] != text:
            try:
                self._read_before = text, self._calls.parse(text)
            except Malformed as e:
                self._patience -= len(text) // 10 if e.open else len(text) + 1
                raise
        return self._read_before[1]

    def _call(self, found: list[Made], length: int) -> bool:
        self._out.append(Segment("calls", "", length, tuple(found[:1] if self._single else found)))
        self._text = self._text[length:]
        self._read_before = None  # the same text again is another call
        self._mode = "over" if self._single else "text"
        self._fresh = self._seam = True
        return True

    def _no_call(self, kind: Literal["text", "thought"], length: int) -> bool:
        """The start marker was only text; what is behind it is looked at again."""
        self._mode = kind
        if self._patience < 0:
            self._calls = None
        self._fresh = self._seam = False
        return self._say(kind, length)

    def _in_nothing(self, final: bool) -> bool:
        return self._say("nothing", len(self._text))

    def _say(self, kind: Kind, length: int) -> bool:
        if length:
            said, self._text = self._text[:length], self._text[length:]
            self._out.append(Segment(kind, said if kind != "nothing" else "", length))
        return length > 0

    def _held(self, marks: tuple[str, ...]) -> int:
        """Characters at the end that may be the start of a marker, with the line breaks before it."""
        text = self._text
        part = max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
        rest = text[: len(text) - part]
        return part + len(rest) - len(rest.rstrip("\n"))
