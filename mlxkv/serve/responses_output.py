"""A response of ``/v1/responses`` as it grows: its output items, and the event for each step of them.

What is whole and what is streamed come from the same object, so they cannot differ. The order of events is OpenAI's:
``response.created``, ``response.in_progress``, then for each item ``output_item.added``, its parts and deltas,
``output_item.done``, and at the end ``response.completed``, ``.incomplete`` or ``.failed``.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from ..decode.request import Completion, TokenLogprob
from ..errors import MlxkvError
from .parts import Arguments, Call, Ended, Part, Ping, Text, Thought

#: what a reasoning item's ``encrypted_content`` starts with; what follows is its text in base64
_SEALED = "mlxkv1:"

Event = dict[str, Any]


def new_id(kind: str) -> str:
    """An id that nobody can guess: ``resp_…``, ``msg_…``, ``fc_…``, ``rs_…``."""
    return f"{kind}_{secrets.token_hex(24)}"


def seal(text: str) -> str:
    """The text of a reasoning item as ``encrypted_content``: opaque to clients, but no secret."""
    return _SEALED + base64.b64encode(text.encode()).decode()


def unseal(sealed: str) -> str | None:
    """The text that ``seal`` was given, or None where it was another server's."""
    if not sealed.startswith(_SEALED):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, ValueError):
        return None


@dataclass
class _Held:
    """White space that would begin an item: it does only if something follows it."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, part: Text | Thought) -> None:
        self.text += part.text
        self.logprobs += part.logprobs


class Output:
    """Takes the parts of one answer and gives the events; ``response`` is the object as it stands.

    response: the fields that do not change. summary: reasoning goes into a ``summary`` instead of ``content``; it is
    the reasoning itself, as no second model shortens it. sealed: reasoning items carry ``encrypted_content`` too.
    logprobs: OpenAI's objects for tokens; None where none are asked for. extension: the object under ``mlxkv``.
    """

    def __init__(
        self,
        response: dict[str, Any],
        *,
        summary: bool = False,
        sealed: bool = False,
        logprobs: Callable[[Sequence[TokenLogprob]], list[dict[str, Any]]] | None = None,
        extension: Callable[[Completion], dict[str, Any]] | None = None,
    ) -> None:
        self.response = response | {"status": "in_progress", "output": [], "usage": None}
        self.done = False
        self._summary = summary
        self._sealed = sealed
        self._logprobs = logprobs
        self._extension = extension
        self._item: dict[str, Any] | None = None  # the open one, the last of output
        self._call = -1  # the index of the open call
        self._held: dict[type, _Held] = {Text: _Held(), Thought: _Held()}
        self._thought_tokens = 0
        self._sequence = 0

    def begin(self) -> list[Event]:
        """The first two events."""
        return [self._event(f"response.{name}", response=self._snapshot()) for name in ("created", "in_progress")]

    def ping(self) -> Event:
        """An event that says nothing new."""
        return self._event("response.in_progress", response=self._snapshot())

    def feed(self, part: Part) -> list[Event]:
        """The events of a part, if it has any."""
        if isinstance(part, Text):
            return self._said(part)
        if isinstance(part, Thought):
            self._thought_tokens += len(part.token_ids)
            return self._said(part)
        if isinstance(part, Call):
            return self._called(part)
        if isinstance(part, Arguments):
            return self._argued(part)
        if isinstance(part, Ended):
            return self._ended(part)
        return [self.ping()] if isinstance(part, Ping) else []

    def fail(self, error: BaseException, message: str) -> list[Event]:
        """The last event of an answer that failed; ``message`` is what may be told of ``error``."""
        if isinstance(error, MlxkvError) and error.status == 429:
            code = "rate_limit_exceeded"
        elif isinstance(error, MlxkvError) and 400 <= error.status < 500:
            code = "invalid_prompt"
        else:
            code = "server_error"
        if self._item is not None:
            self._item["status"] = "incomplete"
        self.done = True
        self.response |= {"status": "failed", "error": {"code": code, "message": message}}
        return [self._event("response.failed", response=self._snapshot())]

    # text and reasoning

    def _said(self, part: Text | Thought) -> list[Event]:
        kind = "message" if isinstance(part, Text) else "reasoning"
        if self._item is not None and self._item["type"] == kind:
            return self._more(part.text, part.logprobs)
        held = self._held[type(part)]
        held.add(part)
        return self._open_said(kind, held) if held.text.strip() else []

    def _open_said(self, kind: str, held: _Held) -> list[Event]:
        if kind == "message":
            item = {"id": new_id("msg"), "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        else:
            item = {"id": new_id("rs"), "type": "reasoning", "status": "in_progress", "summary": []}
            if not self._summary:
                item["content"] = []
            if self._sealed:
                item["encrypted_content"] = None
        events = self._open(item)
        self._parts().append(self._part(""))
        events.append(self._part_event("added"))
        text, logprobs = held.text, tuple(held.logprobs)
        held.text, held.logprobs = "", []
        return events + self._more(text, logprobs)

    def _more(self, text: str, logprobs: Sequence[TokenLogprob]) -> list[Event]:
        part = self._parts()[0]
        made = self._logprobs(logprobs) if self._logprobs and logprobs and part["type"] == "output_text" else []
        if not text and not made:
            return []
        part["text"] += text
        if part["type"] == "output_text":
            part["logprobs"] += made
            return [self._at("response.output_text.delta", content_index=0, delta=text, logprobs=made)]
        if self._summary:
            return [self._at("response.reasoning_summary_text.delta", summary_index=0, delta=text)]
        return [self._at("response.reasoning_text.delta", content_index=0, delta=text)]

    def _close_said(self) -> list[Event]:
        part = self._parts()[0]
        if part["type"] == "output_text":
            done = self._at(
                "response.output_text.done", content_index=0, text=part["text"], logprobs=list(part["logprobs"])
            )
        elif self._summary:
            done = self._at("response.reasoning_summary_text.done", summary_index=0, text=part["text"])
        else:
            done = self._at("response.reasoning_text.done", content_index=0, text=part["text"])
        if self._open_item["type"] == "reasoning" and self._sealed:
            self._open_item["encrypted_content"] = seal(part["text"])
        return [done, self._part_event("done")]

    def _parts(self) -> list[dict[str, Any]]:
        item = self._open_item
        return item["summary"] if item["type"] == "reasoning" and self._summary else item["content"]

    def _part(self, text: str) -> dict[str, Any]:
        if self._open_item["type"] == "message":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "summary_text" if self._summary else "reasoning_text", "text": text}

    def _part_event(self, what: str) -> Event:
        part = deepcopy(self._parts()[0])
        if self._open_item["type"] == "reasoning" and self._summary:
            return self._at(f"response.reasoning_summary_part.{what}", summary_index=0, part=part)
        return self._at(f"response.content_part.{what}", content_index=0, part=part)

    # calls

    def _called(self, part: Call) -> list[Event]:
        self._held[Text] = _Held()  # white space before a call is no message
        item = {
            "id": new_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": part.id,
            "name": part.name,
            "arguments": "",
        }
        events = self._open(item)
        self._call = part.index
        return events

    def _argued(self, part: Arguments) -> list[Event]:
        if part.index != self._call:
            raise RuntimeError(f"arguments of call {part.index} came while call {self._call} was open")
        self._open_item["arguments"] += part.text
        return [self._at("response.function_call_arguments.delta", delta=part.text)] if part.text else []

    # items

    @property
    def _open_item(self) -> dict[str, Any]:
        assert self._item is not None
        return self._item

    def _open(self, item: dict[str, Any]) -> list[Event]:
        events = self._close("completed")
        self._item = item
        self.response["output"].append(item)
        events.append(self._event("response.output_item.added", output_index=self._index, item=deepcopy(item)))
        return events

    def _close(self, status: str) -> list[Event]:
        item = self._item
        if item is None:
            return []
        if item["type"] == "function_call":
            events = [self._at("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])]
        else:
            events = self._close_said()
        item["status"] = status
        events.append(self._event("response.output_item.done", output_index=self._index, item=deepcopy(item)))
        self._item, self._call = None, -1
        return events

    def _ended(self, part: Ended) -> list[Event]:
        completion, output = part.completion, self.response["output"]
        whole = part.finish != "length"
        events: list[Event] = []
        said = any(item["type"] in ("message", "function_call") for item in output)
        if not said and (whole or self._held[Text].text):  # an answer without a word is a message still
            events += self._open_said("message", self._held[Text])
        events += self._close("completed" if whole else "incomplete")
        self.done = True
        self.response |= {
            "status": "completed" if whole else "incomplete",
            "completed_at": int(time.time()) if whole else None,
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "usage": usage_object(completion, self._thought_tokens),
        }
        if self._extension is not None:
            self.response["mlxkv"] = self._extension(completion)
        events.append(self._event(f"response.{self.response['status']}", response=self._snapshot()))
        return events

    # events

    @property
    def _index(self) -> int:
        return len(self.response["output"]) - 1

    def _at(self, type: str, **fields: Any) -> Event:
        return self._event(type, item_id=self._open_item["id"], output_index=self._index, **fields)

    def _event(self, type: str, **fields: Any) -> Event:
        made = {"type": type, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return made

    def _snapshot(self) -> dict[str, Any]:
        return self.response | {"output": deepcopy(self.response["output"])}  # later deltas change no event


def usage_object(completion: Completion, thought_tokens: int) -> dict[str, Any]:
    """OpenAI's ``usage`` of a response. cache_write_tokens: tokens of the prompt that were handed to the store."""
    usage = completion.usage
    fresh = usage.prompt_tokens - usage.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": min(completion.cache.stored_tokens, fresh),
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": thought_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
