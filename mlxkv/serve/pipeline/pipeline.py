"""One choice's text pipeline: engine's deltas in, parts of the answer out."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from ...decode.request import Delta, FinishReason, Grammar, TokenLogprob
from ...decode.text import Detokenizer
from ...decode.thinking import Marks
from ..parts import Arguments, Call, Finish, Part, Reasoning, Text, Thought, Tools
from .check import check_calls, check_text, held
from .splitter import Segment, Splitter
from .tools import CallFormat, Made


class Pipeline:
    """``feed`` each delta, then ``finish``. Parts carry ``choice``.

    thinking: the prompt ends inside a thought (``Prepared.thinking``). A token's log-probability
    stays with the part that the token's text went to; tokens that are markers, or whose text is not shown, have none.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Tools | None = None,
        reasoning: Reasoning | None = None,
        *,
        thinking: bool = False,
        choice: int = 0,
        response: Grammar | None = None,
    ) -> None:
        """``response``: what the text of an answer without calls must match. Raises RequestError for tools where this
        model's calls cannot be read."""
        calls = CallFormat(tokenizer, tools) if tools is not None and tools.choice != "none" else None
        marks = Marks.of(tokenizer) if reasoning is None or reasoning.split else None
        think = (marks.start, marks.end) if marks is not None else None
        self._splitter = Splitter(
            think, thinking and think is not None, calls, single=bool(tools and not tools.parallel)
        )
        self._tokens = _Tokens(tokenizer)
        self._choice, self._calls = choice, calls
        self._tools = tools if calls is not None else None
        self._response = response
        self._said: list[str] = []  # the text, where it is looked at in the end
        self._made: list[Made] = []
        self._whole = False  # the model ended its answer itself

    @property
    def over(self) -> bool:
        """The one call that is allowed was made: whatever comes will not be shown, and need not be generated."""
        return self._splitter.over

    @property
    def calls(self) -> int:
        """How many calls were made."""
        return len(self._made)

    @property
    def bound(self) -> bool:
        """Whether there is anything to ``verify``."""
        return self._response is not None or (
            self._tools is not None and any(held(tool["function"], self._tools) for tool in self._tools.functions)
        )

    def feed(self, delta: Delta) -> list[Part]:
        self._tokens.add(delta)
        return self._parts(self._splitter.feed(delta.text))

    def finish(self, reason: FinishReason, stop: str | None = None) -> list[Part]:
        """The rest. ``stop``: the stop string that ended the text, if one did."""
        self._whole = reason == "stop" and stop is None
        return self._parts(self._splitter.finish(self._whole))

    def verify(self) -> None:
        """After ``finish``: whether an answer that ended by itself is what was asked for. Any thread; parses it anew,
        which may take a while. Raises GrammarViolated."""
        if not self._whole and not self.over:
            return  # it was cut off; what there is may be only the start of what was asked for
        if self._tools is not None and self._tools.functions:
            check_calls(self._made, self._tools)
        if self._response is not None and not self._made:
            check_text("".join(self._said), self._response)

    def finished(self, reason: FinishReason) -> Finish:
        """Why the choice ended, in OpenAI's words; after ``finish``."""
        if self.calls and (reason == "stop" or self.over):
            return "tool_calls"
        return "length" if reason == "length" else "stop"

    def _once(self, call: Made) -> Made:
        """``call`` with an id that no other of this choice has: models that write ids may write one twice."""
        assert self._calls is not None
        if any(other.id == call.id for other in self._made):
            call = replace(call, id=self._calls.new_id())
        return call

    def _parts(self, segments: list[Segment]) -> list[Part]:
        parts: list[Part] = []
        for segment in segments:
            if segment.kind in ("text", "thought"):
                ids, logprobs = self._tokens.take(segment.length, shown=True)
                made = Text if segment.kind == "text" else Thought
                if self._response is not None and made is Text:
                    self._said.append(segment.text)
                parts.append(made(self._choice, segment.text, logprobs, ids))
                continue
            self._tokens.take(segment.length, shown=False)
            for read in segment.calls:
                call = self._once(read)
                parts.append(Call(self._choice, self.calls, call.id, call.name))
                parts.append(Arguments(self._choice, self.calls, call.arguments))
                self._made.append(call)
        return parts


class _Tokens:
    """Which tokens a stretch of text is made of, in the order in which both come."""

    def __init__(self, tokenizer: Any) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._said = 0  # characters of all tokens
        self._taken = 0  # of the stretches
        #: where a token's text begins and ends, its id, its log-probability
        self._waiting: deque[tuple[int, int, int, TokenLogprob | None]] = deque()

    def add(self, delta: Delta) -> None:
        for i, token in enumerate(delta.token_ids):
            begins = self._said
            self._said += len(self._detokenizer.feed(token))
            self._waiting.append((begins, self._said, token, delta.logprobs[i] if delta.logprobs else None))

    def take(self, length: int, shown: bool) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        """Ids and log-probabilities of the tokens of the next ``length`` characters. A token of which a part is shown
        belongs to the first such part."""
        self._taken += length
        ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        while self._waiting:
            begins, ends, token, logprob = self._waiting[0]
            if begins >= self._taken or (not shown and ends > self._taken):
                break
            self._waiting.popleft()
            ids.append(token)
            if logprob is not None:
                logprobs.append(logprob)
        return tuple(ids), tuple(logprobs)
