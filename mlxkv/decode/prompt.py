"""From a request to token ids and the boundaries at which state is worth keeping.

Boundaries of messages are the longest common prefixes of renderings: the template renders ``messages[:i]``, and where
that stops agreeing with the whole text, message i ends. Text that a client sends back as an assistant message is
replaced by the very ids it was sampled as, where those are known and decode to exactly that text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError
from ..messages import normalise
from .request import Request
from .text import decode, plain

#: with more messages than this, older ends are kept at doubling distances only: rendering and states stay affordable
RECENT = 48

FindAnswer = Callable[[list[int], str], "list[int] | None"]


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the positions (0 < b < len(tokens), ascending) where a message ends."""

    tokens: list[int]
    boundaries: list[int]


def build(request: Request, tokenizer: Any, eos: set[int], find_answer: FindAnswer) -> Prompt:
    """Tokenise a request. Raises RequestError for messages that the model's template refuses."""
    if request.messages is not None:
        return _from_messages(request, tokenizer, eos, find_answer)
    if request.prompt is not None:
        tokens = _ids(tokenizer, request.prompt, special=True)
        if not tokens:
            raise RequestError("The prompt has no tokens.", "Give some text.", param="prompt")
    else:
        tokens = list(request.tokens or [])
        if bad := next((t for t in tokens if not isinstance(t, int) or isinstance(t, bool) or t < 0), None):
            raise RequestError(f"{bad!r} is not a token id.", "Ids are whole numbers from 0.", param="tokens")
    ends = [i + 1 for i, token in enumerate(tokens[:-1]) if token in eos]
    return Prompt(tokens, [end for i, end in enumerate(ends) if _worth(len(ends) - i)])


def _ids(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    return list(plain(tokenizer)(text, add_special_tokens=special)["input_ids"])


@dataclass
class _Answer:
    """An assistant message whose rendered text spans [start, end) and whose ids are known or may be."""

    start: int
    end: int
    text: str
    ids: list[int] | None


def _from_messages(request: Request, tokenizer: Any, eos: set[int], find_answer: FindAnswer) -> Prompt:
    messages = normalise(request.messages, token_ids=True)
    known = [m.pop("token_ids", None) for m in messages]
    if getattr(tokenizer, "chat_template", None) is None and not getattr(tokenizer, "has_chat_template", False):
        raise RequestError(
            "This model has no chat template, so messages cannot be rendered.",
            "Send a raw prompt (--raw on the command line), or use an instruct model.",
            param="messages",
        )

    def render(some: list[dict[str, Any]], generate: bool) -> str:
        return tokenizer.apply_chat_template(
            some, tools=request.tools, tokenize=False, add_generation_prompt=generate, **request.template_kwargs
        )

    try:
        whole = render(messages, True)
    except Exception as e:  # templates raise what they like
        raise RequestError(f"The model's chat template refuses these messages: {e}", param="messages") from e

    def common(some: list[dict[str, Any]], generate: bool = False) -> int:
        """Characters of ``whole`` that the rendering of ``some`` agrees with; 0 where the template refuses ``some``."""
        try:
            text = render(some, generate)
        except Exception:
            return 0
        return len(text) if whole.startswith(text) else _agreement(text, whole)

    looked_at = [i for i in range(1, len(messages) + 1) if _worth(len(messages) - i)]
    cuts = {common(messages[:i]) for i in looked_at}
    cuts.add(_head(messages, common))
    answers: list[_Answer] = []
    for i, message in enumerate(messages):
        text = message.get("content")
        if message["role"] != "assistant" or not isinstance(text, str) or not text or not _worth(len(messages) - i):
            continue
        start = common(messages[:i], True)
        if start and whole.startswith(text, start):
            answers.append(_Answer(start, start + len(text), text, known[i]))
    tokens, cut_tokens = _tokenise(whole, cuts, answers, tokenizer, eos, find_answer)
    return Prompt(tokens, sorted(b for b in cut_tokens if 0 < b < len(tokens)))


def _worth(distance: int) -> bool:
    return distance <= RECENT or distance & (distance - 1) == 0


def _head(messages: list[dict[str, Any]], common: Callable[[list[dict[str, Any]]], int]) -> int:
    """End of everything that stands before the first user text: system prompt, tools and what the template adds."""
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    if first is None:
        return 0
    other = "B" if str(messages[first]["content"]).startswith("A") else "A"
    return common([*messages[:first], {**messages[first], "content": other}])


def _agreement(a: str, b: str) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _tokenise(
    whole: str, cuts: set[int], answers: list[_Answer], tokenizer: Any, eos: set[int], find_answer: FindAnswer
) -> tuple[list[int], set[int]]:
    """Ids of ``whole`` with known answers' ids in place, and the cuts (characters) as token positions, rounded down."""
    tokens: list[int] = []
    ends: list[int] = []  # for each token, the character at which it ends
    at = 0

    def add(upto: int) -> None:
        nonlocal at
        ids, offsets = _encode(whole[at:upto], tokenizer)
        tokens.extend(ids)
        ends.extend(at + end for end in offsets)
        at = upto

    for answer in answers:
        if answer.start < at:
            continue
        mark = (len(tokens), at)
        add(answer.start)
        ids = answer.ids if answer.ids is not None else find_answer(tokens, answer.text)
        if ids and ids[-1] in eos:
            ids = ids[:-1]
        if ids and decode(tokenizer, ids) == answer.text:
            tokens.extend(ids)
            ends.extend([answer.end] * len(ids))
            at = answer.end
        else:  # not those ids: let the text flow on, so that tokens may span this place
            del tokens[mark[0] :], ends[mark[0] :]
            at = mark[1]
    add(len(whole))
    return tokens, {bisect_right(ends, cut) for cut in cuts}  # a cut inside a token is moved before it


def _encode(text: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids of a piece of rendered text, and the character at which each ends."""
    if not text:
        return [], []
    inner = plain(tokenizer)
    if getattr(inner, "is_fast", False):
        out = inner(text, add_special_tokens=False, return_offsets_mapping=True)
        ends, last = [], 0
        for _, end in out["offset_mapping"]:
            last = max(last, end)
            ends.append(last)
        return list(out["input_ids"]), ends
    ids = list(inner(text, add_special_tokens=False)["input_ids"])
    ends, known = [], 0
    for i in range(len(ids)):  # slow tokenizers: the text of a prefix of ids, as far as it agrees
        known = max(known, _agreement(decode(tokenizer, ids[: i + 1]), text))
        ends.append(known)
    return ids, ends
