"""One schema for the chunks of every stream in OpenAI's form, chats' and completions': what a client may rely on.

One id, one time, one model; each choice begins with its role (chats), ends with one finish_reason and says nothing
after it; usage is null in every chunk but the last, or nowhere; the terminator comes last and once; after an error
comes nothing but the terminator.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

CHAT, TEXT = "chat.completion.chunk", "text_completion"
FINISH = ("stop", "length", "tool_calls")


@dataclass
class Said:
    """A choice, joined from its chunks."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    mlxkv: dict[str, Any] | None = None
    role: bool = False

    @property
    def message(self) -> dict[str, Any]:
        """As the message of a whole answer has it."""
        made: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        made["refusal"] = None
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
        if self.calls:
            made["tool_calls"] = self.calls
        return made


@dataclass
class Stream:
    """All of a stream that keeps to the schema."""

    id: str
    choices: list[Said]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None
    pings: int
    progress: list[dict[str, Any]]


def blocks(text: str) -> tuple[list[str], int]:
    """The data of each event, and how many comments there were. Each event is one line of data and an empty line."""
    parts = text.split("\n\n")
    assert parts.pop() == "", "the stream ends in the middle of an event"
    data, comments = [], 0
    for part in parts:
        assert "\n" not in part and "\r" not in part, part
        if part.startswith(":"):
            comments += 1
            continue
        assert part.startswith("data: "), part
        data.append(part.removeprefix("data: "))
    return data, comments


def read(text: str, *, n: int = 1, usage: bool = False, kind: str = CHAT, complete: bool = True) -> Stream:
    """Asserts that ``text`` keeps to the schema. usage: it was asked for. complete: the stream was read to its end."""
    data, comments = blocks(text)
    if complete:
        assert data and data[-1] == "[DONE]", data[-1:]
        data.pop()
    assert "[DONE]" not in data
    found = Stream("", [Said() for _ in range(n)], None, None, comments, [])
    heads: set[tuple[Any, ...]] = set()
    for i, line in enumerate(data):
        chunk = json.loads(line)
        last = i == len(data) - 1
        if "error" in chunk:
            assert last, "nothing follows an error"
            _error(chunk, found)
            continue
        head = {"id", "object", "created", "model", "choices"}
        assert head <= chunk.keys() <= head | {"usage", "mlxkv"}, chunk.keys()
        assert chunk["object"] == kind
        assert isinstance(chunk["created"], int) and isinstance(chunk["model"], str)
        heads.add((chunk["id"], chunk["created"], chunk["model"]))
        assert ("usage" in chunk) == usage
        if chunk.get("usage") is not None:
            assert last and chunk["choices"] == [], "usage comes in the last chunk, which has no choice"
            found.usage = chunk["usage"]
        elif not chunk["choices"]:
            found.progress.append(chunk["mlxkv"]["progress"])
        for choice in chunk["choices"]:
            (_chat if kind == CHAT else _text)(choice, chunk, found.choices[choice["index"]])
    assert len(heads) <= 1
    if heads:
        found.id = next(iter(heads))[0]
    if complete and found.error is None:
        assert all(said.finish in FINISH for said in found.choices), "every choice has an end"
        assert (found.usage is not None) == usage
        assert all(json.loads(call["function"]["arguments"]) is not None for s in found.choices for call in s.calls)
    return found


def _error(chunk: dict[str, Any], found: Stream) -> None:
    assert chunk.keys() == {"error"}
    error = chunk["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] and error["type"] and error["code"]
    found.error = error


def _chat(choice: dict[str, Any], chunk: dict[str, Any], said: Said) -> None:
    assert choice.keys() == {"index", "delta", "logprobs", "finish_reason"}
    assert said.finish is None, "nothing follows a finish_reason"
    delta = choice["delta"]
    assert delta.keys() <= {"role", "content", "reasoning_content", "tool_calls"}
    assert ("role" in delta) == (not said.role), "the role comes first and once"
    if "role" in delta:
        assert delta == {"role": "assistant", "content": ""}
        said.role = True
    said.content += delta.get("content", "")
    said.reasoning += delta.get("reasoning_content", "")
    for call in delta.get("tool_calls", ()):
        _call(call, said)
    if choice["logprobs"] is not None:
        assert choice["logprobs"].keys() == {"content", "refusal"}
        said.logprobs += choice["logprobs"]["content"]
    _end(choice, chunk, said)


def _call(call: dict[str, Any], said: Said) -> None:
    if call["index"] == len(said.calls):  # the first piece of a call has its id and name
        assert call.keys() == {"index", "id", "type", "function"} and call["type"] == "function"
        assert call["function"].keys() == {"name", "arguments"}
        said.calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
        return
    assert call.keys() == {"index", "function"} and call["index"] == len(said.calls) - 1
    assert call["function"].keys() == {"arguments"}
    said.calls[-1]["function"]["arguments"] += call["function"]["arguments"]


def _text(choice: dict[str, Any], chunk: dict[str, Any], said: Said) -> None:
    assert choice.keys() == {"index", "text", "logprobs", "finish_reason"}
    assert said.finish is None, "nothing follows a finish_reason"
    said.content += choice["text"]
    _end(choice, chunk, said)


def _end(choice: dict[str, Any], chunk: dict[str, Any], said: Said) -> None:
    said.finish = choice["finish_reason"]
    assert said.finish in (None, *FINISH)
    assert ("mlxkv" in chunk) == (said.finish is not None), "what the server reports comes with the end"
    if said.finish is not None:
        said.mlxkv = chunk["mlxkv"]
        assert {"cache", "timings", "drafts"} <= chunk["mlxkv"].keys()
