"""What can be known of a request before its turn, on any thread: whether its prompt is valid, how long it is, and
whether the model is thinking where it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import MlxkvError, PromptTooLong, RequestError
from ..messages import check_text
from .prompt import Prompt, Rendered, tokenised
from .request import Request
from .text import decode, plain
from .thinking import stand

if TYPE_CHECKING:
    from .grammar import Grammars

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """``text``: the prompt as the model is given it, rendered; of raw ids, their text. token_ids: its ids;
    answers that the store remembers may come to stand as other ids of the same text. thinking: the model is within a
    thought where the prompt ends. max_tokens: tokens that may be sampled: what was asked for or what the context has
    left, whichever is less; None where neither bounds it."""

    text: str
    token_ids: Sequence[int]
    thinking: bool
    max_tokens: int | None
    rendered: Rendered = field(repr=False, compare=False)

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Words:
    """What of a loaded model any thread may use: no array of MLX."""

    tokenizer: Any
    eos: frozenset[int]
    vocab_size: int
    context_length: int | None
    grammars: Grammars
    #: told of prompt and answer tokens; raises RequestTooLarge for what no memory would ever hold
    refuse: Callable[[int, int | None], None] = lambda prompt_tokens, answer_tokens: None

    def prepare(self, request: Request, fits: bool = True) -> Prepared:
        """As Engine.prepare."""
        room = self.context_length if fits else None
        made = _own(lambda: prepare(request, self.tokenizer, self.eos, self.vocab_size, room))
        if fits:
            self.refuse(made.prompt_tokens, made.max_tokens)
        if request.grammar is not None:
            self.grammars.constraint(request.grammar)  # remembered
        return made

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """As Engine.tokenize."""
        check_text(text, "text")
        return _own(lambda: list(plain(self.tokenizer)(text, add_special_tokens=special)["input_ids"]))

    def detokenize(self, ids: list[int]) -> str:
        """As Engine.detokenize."""
        for token in ids:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"{token!r} is not a token id.",
                    f"Ids of this model are whole numbers from 0 to {self.vocab_size - 1}.",
                    param="tokens",
                )
        return _own(lambda: decode(self.tokenizer, ids))


def _own(work: Callable[[], T]) -> T:
    """What a tokenizer makes of a request; whatever it raises is the request's own."""
    try:
        return work()
    except MlxkvError:
        raise
    except Exception as e:
        raise RequestError(f"The prompt cannot be tokenised: {type(e).__name__}: {e}.") from e


def prepare(request: Request, tokenizer: Any, eos: Set[int], vocab_size: int, context_length: int | None) -> Prepared:
    """Render and tokenise. Raises RequestError for messages that the model's template refuses, for ids outside the
    vocabulary and a logit_bias there; PromptTooLong, with both numbers."""
    rendered = Rendered.of(request, tokenizer)
    prompt = tokenised(rendered, eos)
    most = limit(request, prompt, vocab_size, context_length)
    for token in request.sampling.logit_bias:
        if token >= vocab_size:
            raise RequestError(
                f"logit_bias names token {token}.", f"This model has {vocab_size} tokens.", param="logit_bias"
            )
    text = decode(tokenizer, prompt.tokens) if request.tokens is not None else rendered.text
    return Prepared(text, tuple(prompt.tokens), stand(rendered) == "open", most, rendered)


def limit(request: Request, prompt: Prompt, vocab_size: int, context_length: int | None) -> int | None:
    """Tokens that may be sampled; None for any number. Raises RequestError for ids outside the vocabulary,
    PromptTooLong with both numbers."""
    n = len(prompt.tokens)
    if (bad := next((t for t in prompt.tokens if t >= vocab_size), None)) is not None:
        raise RequestError(f"Token id {bad} is outside the vocabulary of {vocab_size}.", param="tokens")
    wanted = request.sampling.max_tokens
    if context_length is None:
        return wanted
    if n >= context_length:
        given = next(name for name in ("messages", "prompt", "tokens") if getattr(request, name) is not None)
        raise PromptTooLong(
            f"The prompt has {n} tokens, the model's context holds {context_length}.",
            f"Shorten it to at most {context_length - 1}.",
            param=given,
        )
    return context_length - n if wanted is None else min(wanted, context_length - n)
