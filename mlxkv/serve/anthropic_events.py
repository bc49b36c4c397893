"""Parts of an answer as the events of Anthropic's Messages API, and the whole message that these events make.

    message_start, then a block at a time: content_block_start, content_block_delta…, content_block_stop; message_delta
    with why it ended and the final counts, message_stop. ``ping`` anywhere after message_start.

The whole message is folded from the very events, so that the two cannot differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..decode.request import Usage
from .anthropic_messages import signature
from .parts import Arguments, Begun, Call, Ended, Part, Ping, Text, Thought
from .reports import extension

Event = dict[str, Any]

PING: Event = {"type": "ping"}


@dataclass
class Events:
    """Makes the events of one message. ``max_tokens``: what was asked for; of 0 there is no answer. ``hidden``: the
    client is not shown what the model thinks. ``unsure``: it asked why a prompt was not found again, which
    ``mlxkv.cache`` answers, in its words."""

    id: str
    model: str
    max_tokens: int
    hidden: bool = False
    unsure: bool = False
    _index: int = -1
    _open: Literal["text", "thinking", "tool_use"] | None = None
    _thought: str = ""
    _thinking_tokens: int = 0
    _blank: str = ""  # white space that may be the start of a text, or nothing
    begun: bool = False

    def of(self, part: Part) -> list[Event]:
        """The events that ``part`` causes; the first part is Begun, the last Ended."""
        if isinstance(part, Begun):
            return self._start(part)
        if self.max_tokens == 0 and isinstance(part, (Text, Thought, Call, Arguments)):
            return []
        if isinstance(part, Text):
            return self._text(part.text)
        if isinstance(part, Thought):
            self._thinking_tokens += len(part.token_ids)
            return self._think(part.text)
        if isinstance(part, Call):
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
            return [*self._close(), *self._begin("tool_use", block)]
        if isinstance(part, Arguments):
            return [self._delta({"type": "input_json_delta", "partial_json": part.text})] if part.text else []
        if isinstance(part, Ended):
            return self._end(part)
        if isinstance(part, Ping):
            return [PING] if self.begun else []
        return []

    def _start(self, part: Begun) -> list[Event]:
        if self.begun:
            return []
        self.begun = True
        usage = usage_object(Usage(part.prompt_tokens, 0, part.cached_tokens))
        message = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        if self.unsure:
            message["diagnostics"] = {"cache_miss_reason": {"type": "unavailable"}}
        return [{"type": "message_start", "message": message}, PING]

    def _text(self, text: str) -> list[Event]:
        if self._open == "text":
            return [self._delta({"type": "text_delta", "text": text})] if text else []
        self._blank += text
        if not self._blank.strip():
            return []
        text, self._blank = self._blank, ""
        begun = [*self._close(), *self._begin("text", {"type": "text", "text": ""})]
        return [*begun, self._delta({"type": "text_delta", "text": text})]

    def _think(self, text: str) -> list[Event]:
        if not text:
            return []
        made: list[Event] = []
        if self._open != "thinking":
            made = [*self._close(), *self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})]
        self._thought += text
        return made if self.hidden else [*made, self._delta({"type": "thinking_delta", "thinking": text})]

    def _end(self, part: Ended) -> list[Event]:
        made: list[Event] = []
        if self._blank and self._index < 0:  # nothing but white space was said: then that is the answer
            delta = {"type": "text_delta", "text": self._blank}
            made = self._begin("text", {"type": "text", "text": ""})
            made.append(self._delta(delta))
        made += self._close()
        usage = part.completion.usage
        reason = "end_turn"
        if self.max_tokens == 0:
            usage, reason = replace(usage, completion_tokens=0), "max_tokens"
        elif part.finish == "tool_calls":
            reason = "tool_use"
        elif part.finish == "length":  # fewer tokens than were asked for: there was no room for more
            full = usage.completion_tokens < self.max_tokens
            reason = "model_context_window_exceeded" if full else "max_tokens"
        elif part.stop is not None:
            reason = "stop_sequence"
        counted = usage_object(usage)
        if self._thinking_tokens:
            counted["output_tokens_details"] = {"thinking_tokens": self._thinking_tokens}
        made.append(
            {
                "type": "message_delta",
                "delta": {"stop_reason": reason, "stop_sequence": part.stop if reason == "stop_sequence" else None},
                "usage": counted,
                "mlxkv": extension(part.completion),
            }
        )
        return [*made, {"type": "message_stop"}]

    def _begin(self, kind: Literal["text", "thinking", "tool_use"], block: dict[str, Any]) -> list[Event]:
        self._index += 1
        self._open = kind
        self._blank = ""
        return [{"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        made: list[Event] = []
        if self._open == "thinking":
            made.append(self._delta({"type": "signature_delta", "signature": signature(self._thought, self.hidden)}))
            self._thought = ""
        self._open = None
        return [*made, {"type": "content_block_stop", "index": self._index}]


def usage_object(usage: Usage) -> dict[str, Any]:
    """Anthropic's ``usage``: ``input_tokens`` are those that had to be read, the cached ones apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,  # nobody pays for what is kept
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def folded(events: Iterable[Event]) -> dict[str, Any]:
    """The whole message of a complete row of events."""
    message: dict[str, Any] = {}
    arguments = ""
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            message = event["message"] | {"content": []}
        elif kind == "content_block_start":
            message["content"].append(dict(event["content_block"]))
            arguments = ""
        elif kind == "content_block_delta":
            delta, block = event["delta"], message["content"][-1]
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
            else:
                (name,) = delta.keys() - {"type"}
                block[name] += delta[name]
        elif kind == "content_block_stop" and message["content"][-1]["type"] == "tool_use":
            message["content"][-1]["input"] = json.loads(arguments or "{}")
        elif kind == "message_delta":
            message |= event["delta"] | {"usage": event["usage"], "mlxkv": event["mlxkv"]}
    return message
