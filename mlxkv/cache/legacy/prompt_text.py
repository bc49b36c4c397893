"""The token ids that a prompt-cache file may have been made of, for what the user says that its prompt was.

``mlx_lm.cache_prompt`` renders its prompt as one user message that goes on (no end of message, no generation prompt) if
the tokenizer has a chat template; up to 0.19.2 it rendered a whole turn, cut the template's tail off by characters and
encoded the text, with the special tokens that encoding adds. Who calls ``save_prompt_cache`` may have encoded the text
as it is. Which of them it was is found by the proof, never by guessing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Candidate:
    """``how`` the ids came about, for people."""

    how: str
    tokens: tuple[int, ...]


def candidates(
    tokenizer: Any,
    *,
    prompt: str | None = None,
    messages: list[dict[str, Any]] | None = None,
    text: str | None = None,
) -> list[Candidate]:
    """The readings of what was given, likeliest first, each list of ids once: ``prompt`` may have been a user's message
    or text as it is, ``text`` is text as it is. A reading that the template refuses is left out."""
    found: list[Candidate] = []
    for how, make in _readings(tokenizer, prompt, messages, text):
        try:
            tokens = tuple(int(t) for t in make())
        except Exception:  # whatever a template or tokenizer raises: this reading is none
            continue
        if tokens and tokens not in [c.tokens for c in found]:
            found.append(Candidate(how, tokens))
    return found


def _readings(
    tokenizer: Any, prompt: str | None, messages: list[dict[str, Any]] | None, text: str | None
) -> Iterator[tuple[str, Callable[[], Any]]]:
    def render(some: list[dict[str, Any]], **options: Any) -> Any:
        return tokenizer.apply_chat_template(some, **options)

    def bare(some: str) -> Any:
        return tokenizer.encode(some, add_special_tokens=False)

    going_on = {"add_generation_prompt": False, "continue_final_message": True}
    if prompt is not None:
        turn = [{"role": "user", "content": prompt}]
        yield "the prompt as a user message that goes on", lambda: render(turn, **going_on)
    for plain in (prompt, text):
        if plain is not None:
            yield "the text as it is", partial(tokenizer.encode, plain)
            yield "the text as it is, no special tokens", partial(bare, plain)
    if prompt is not None:
        yield "the prompt as mlx-lm rendered it up to 0.19", lambda: tokenizer.encode(_cut(render, prompt))
    if messages is not None:
        yield "the messages, before an answer", lambda: render(messages, add_generation_prompt=True)
        yield "the messages", lambda: render(messages, add_generation_prompt=False)
        yield "the messages, the last of which goes on", lambda: render(messages, **going_on)


def _cut(render: Callable[..., str], prompt: str) -> str:
    """A user's turn without what the template puts behind its text."""
    mark = "<query>"
    options = {"tokenize": False, "add_generation_prompt": True}
    empty = render([{"role": "user", "content": mark}], **options)
    tail = len(empty) - empty.index(mark) - len(mark)
    whole = render([{"role": "user", "content": prompt}], **options)
    return whole[: len(whole) - tail] if tail else ""  # a template without a tail cut everything off
