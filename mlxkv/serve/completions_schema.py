"""The body of ``POST /v1/completions``: text that goes on from a prompt, without a chat template."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from ..decode.request import Request
from ..errors import RequestError
from ..messages import check_text
from .fields import limit
from .parts import Asked, Reasoning
from .server import Server
from .structured import FormFields

#: tokens of an answer whose length was left open, as OpenAI's API has it: a base model does not end by itself
DEFAULT_TOKENS = 16
#: alternatives beside a token
MAX_LOGPROBS = 5
#: choices of one prompt, and of all prompts together
MAX_N, MAX_CHOICES = 16, 256


class CompletionRequest(FormFields):
    """``prompt``: a text, a list of texts, a list of token ids, or a list of such lists. ``best_of``: no more than
    ``n``, as nothing here ranks answers. ``max_tokens`` may be 0 with ``echo``: then the prompt alone comes back."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {"suffix": ("",), "service_tier": ("auto", "default")}

    model: str
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def scored(self) -> bool:
        """The prompt's own log-probabilities are wanted."""
        return bool(self.echo) and self.logprobs is not None

    def to_asked(self, server: Server, prompts: list[Any]) -> list[Asked]:
        """What is asked for each of ``prompts``. Raises RequestError."""
        self.check_stream_options()
        n = self._n(len(prompts))
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise RequestError(
                f"logprobs is {self.logprobs}.",
                f"It must be a whole number from 0 to {MAX_LOGPROBS}.",
                param="logprobs",
            )
        most = self.max_tokens
        if most == 0 and not self.echo:
            raise RequestError("max_tokens is 0.", "Only with echo may it be 0.", param="max_tokens")
        sampling = self.sampling(
            server.defaults,
            max_tokens=1 if most == 0 else limit(most, "max_tokens") or server.defaults.max_tokens or DEFAULT_TOKENS,
            logprobs=self.logprobs is not None,
            top_logprobs=self.logprobs or 0,
        )
        grammar, grammar_field = self.grammar()
        request = Request(
            tokens=[0],
            sampling=sampling,
            salt=self.salt(server.cache_salt),
            use_cache=server.use_cache,
            grammar=grammar,
            prompt_logprobs=self.logprobs if self.scored else None,
        )
        asked = Asked(
            self.model,
            request,
            "completions",
            n=n,
            reasoning=Reasoning(split=False),
            stream=bool(self.stream),
            timeout=self.checked_timeout(),
        )
        made = []
        for i, prompt in enumerate(prompts):
            where = self.where(i)
            given: dict[str, Any] = (
                {"prompt": prompt, "tokens": None} if isinstance(prompt, str) else {"tokens": prompt}
            )
            names = {"grammar": grammar_field, "tokens": where, "prompt": where}
            made.append(replace(asked, request=replace(request, **given), names=names))
        return made

    def where(self, i: int) -> str:
        """What the i-th prompt is called in errors."""
        several = isinstance(self.prompt, list) and not (self.prompt and isinstance(self.prompt[0], int))
        return f"prompt[{i}]" if several else "prompt"

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one. Raises RequestError for one that is empty."""
        given = self.prompt
        prompts: list[Any] = given if isinstance(given, list) and not (given and isinstance(given[0], int)) else [given]
        if not prompts:
            raise RequestError("prompt is empty.", "A completion needs at least one token.", param="prompt")
        for i, prompt in enumerate(prompts):
            where = self.where(i)
            if not prompt:
                raise RequestError(f"{where} is empty.", "A completion needs at least one token.", param=where)
            if isinstance(prompt, str):
                check_text(prompt, where)
            elif (bad := next((t for t in prompt if not 0 <= t < 2**31), None)) is not None:
                raise RequestError(f"{where} has {bad}, which is no token id.", param=where)
        return prompts

    def _n(self, prompts: int) -> int:
        n = 1 if self.n is None else self.n
        if not 1 <= n <= MAX_N:
            raise RequestError(f"n is {n}.", f"It must be a whole number from 1 to {MAX_N}.", param="n")
        if self.best_of is not None and self.best_of != n:
            raise RequestError(
                f"best_of is {self.best_of} and n is {n}.",
                "Answers are not ranked here: leave best_of out, or give it the value of n.",
                param="best_of",
            )
        if n * prompts > MAX_CHOICES:
            raise RequestError(
                f"{prompts} prompts with n {n} ask for {n * prompts} choices.",
                f"Ask for {MAX_CHOICES} at most.",
                param="prompt",
            )
        return n
