"""What a caller asks for and what comes back: requests, sampling parameters, events and the final completion.

Plain values without MLX arrays, so that any thread (and the command line, which must start fast) may use them.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..errors import RequestError

if TYPE_CHECKING:
    from .preparing import Prepared

FinishReason = Literal["stop", "length", "cancelled"]
#: alternatives that may be reported beside a sampled token, as OpenAI's limit
MAX_TOP_LOGPROBS = 20
GRAMMARS = ("json_schema", "json_object", "regex", "lark")


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. The defaults are greedy.

    temperature: 0 = argmax; else logits are divided by it. top_p, min_p: probabilities in [0, 1]; a top_p of 0 is
    argmax too. top_k: a count, 0 = off. The filters act on the distribution before the temperature, in mlx-lm's order:
    top_p, min_p, top_k. presence_penalty, frequency_penalty: subtracted from logits of tokens generated so far, as
    OpenAI does. repetition_penalty: divides (multiplies if negative) logits of the last ``repetition_context`` tokens,
    prompt included; 1.0 = off. logit_bias: token id -> added to its logit. seed: 64-bit; the same seed gives the same
    text whatever was cached. stop: strings that end the text and are not part of it. max_tokens: tokens to sample at
    most, the stop token included; None = until the context is full. logprobs: report each sampled token's
    log-probability, and with top_logprobs (0 to 20) that many of the likeliest tokens beside it; both are those of the
    model's own distribution (the softmax of its logits, before penalties, bias, grammar, temperature and filters).
    OpenAI's reference leaves open which distribution its numbers are from; these say what the model thought, whatever
    sampling made of it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    repetition_context: int = 20
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        """Raises RequestError naming the field, its value and the range that is allowed."""

        def check(name: str, ok: bool, allowed: str) -> None:
            if not ok:
                raise RequestError(f"{name} is {getattr(self, name)!r}.", f"It must be {allowed}.", param=name)

        def number(name: str, low: float, high: float, allowed: str) -> None:
            value = getattr(self, name)
            good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            check(name, good and low <= value <= high, allowed)

        def whole(name: str, low: int, high: int, allowed: str) -> None:
            value = getattr(self, name)
            check(name, isinstance(value, int) and not isinstance(value, bool) and low <= value <= high, allowed)

        number("temperature", 0.0, 100.0, "a number from 0 to 100")
        number("top_p", 0.0, 1.0, "a number from 0 to 1")
        number("min_p", 0.0, 1.0, "a number from 0 to 1")
        number("presence_penalty", -2.0, 2.0, "a number from -2 to 2")
        number("frequency_penalty", -2.0, 2.0, "a number from -2 to 2")
        number("repetition_penalty", 1e-3, 1e3, "a number above 0; 1 switches it off")
        whole("top_k", 0, 2**31 - 1, "a whole number, 0 for off")
        whole("repetition_context", 1, 2**31 - 1, "a whole number, at least 1")
        if self.seed is not None:
            whole("seed", -(2**63), 2**64 - 1, "a 64-bit whole number")
        if self.max_tokens is not None:
            whole("max_tokens", 1, 2**63 - 1, "a whole number, at least 1")
        check("logprobs", isinstance(self.logprobs, bool), "true or false")
        whole("top_logprobs", 0, MAX_TOP_LOGPROBS, f"a whole number from 0 to {MAX_TOP_LOGPROBS}")
        check("top_logprobs", self.logprobs or not self.top_logprobs, "0 unless logprobs is true")
        check(
            "stop",
            isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop),
            "non-empty strings",
        )
        for token, bias in self.logit_bias.items():
            good = isinstance(token, int) and token >= 0 and isinstance(bias, (int, float)) and -100 <= bias <= 100
            if not good:
                raise RequestError(
                    f"logit_bias has {token!r}: {bias!r}.",
                    "It maps token ids to numbers from -100 to 100.",
                    param="logit_bias",
                )


@dataclass(frozen=True)
class Grammar:
    """What an answer's text must match from its first character to its last. kind: ``json_schema | json_object | regex
    | lark``. text: the schema as JSON, the regular expression (Rust's syntax), the Lark grammar (llguidance's dialect);
    empty for json_object."""

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in GRAMMARS or not isinstance(self.text, str):
            raise RequestError(f"grammar is {self!r}.", _GRAMMAR_FORMS, param="grammar")

    @staticmethod
    def of(value: Any) -> Grammar:
        """From a mapping with one entry: ``{"json_schema": {...}}``, ``{"json_object": True}``, ``{"regex": "..."}`` or
        ``{"lark": "..."}``. Raises RequestError."""
        if isinstance(value, Grammar):
            return value
        if not isinstance(value, Mapping) or len(value) != 1:
            raise RequestError(f"grammar is {value!r}.", _GRAMMAR_FORMS, param="grammar")
        kind, body = next(iter(value.items()))
        if kind == "json_object" and body is True:
            return Grammar(kind)
        if kind in ("regex", "lark") and isinstance(body, str):
            return Grammar(kind, body)
        if kind == "json_schema" and isinstance(body, (Mapping, bool)):
            try:
                return Grammar(kind, json.dumps(body, allow_nan=False))
            except (TypeError, ValueError, RecursionError) as e:
                raise RequestError(f"grammar has a json_schema that is no JSON: {e}.", param="grammar") from e
        raise RequestError(f"grammar has {kind!r}: {body!r}.", _GRAMMAR_FORMS, param="grammar")


_GRAMMAR_FORMS = (
    'It must be one of {"json_schema": {...}}, {"json_object": true}, {"regex": "..."} and {"lark": "..."}.'
)


@dataclass(frozen=True)
class Request:
    """One thing to generate. Exactly one of ``messages``, ``prompt`` and ``tokens`` is given.

    messages: an OpenAI message list; an assistant message may carry ``token_ids``, the ids it was sampled as, which
    then stand in the prompt instead of its re-tokenised text. prompt: raw text, tokenised without a chat template.
    tokens: raw ids. tools and template_kwargs go to the chat template. salt: requests with different salts never share
    cache entries. use_cache=False: neither look-up nor store (a plain, cold run). grammar: what the answer must match,
    a Grammar or what ``Grammar.of`` takes. The model's end tokens are allowed exactly where the grammar may end, and
    the answer ends by itself ("stop") where nothing else may follow; special tokens never stand for text.
    ``max_tokens`` and stop strings still end the answer wherever it is, so what ended by "length", or by a stop string,
    may be only the start of what the grammar asks for. Lists are copied: what becomes of the caller's while the request
    waits changes nothing.

    continue_final: the last of ``messages`` is the start of the answer, which goes on from its last character; no new
    turn begins. reasoning_budget: tokens that the model may think for, if it is one that thinks between marks; then the
    end mark is forced. 0: it does not think. A grammar holds for the answer, not for thinking before it.
    prompt_logprobs: report the log-probability of each token of the prompt, and of that many of the likeliest in its
    place (0 to 20); the prompt is then computed from its start, and the prefix store has no part in it. deadline: when
    the request fails with RequestTimeout, wherever it is, ``time.monotonic()``. name: what its caller calls it, in
    status and logs. prepared: what ``Engine.prepare`` made of this request, which is then not done again; it is of no
    use for another. share: the store gets the prompt as soon as it is read, for requests that come while this one is
    answered; otherwise at the end, in one group with the answer.
    """

    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    tokens: list[int] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    salt: str = ""
    use_cache: bool = True
    grammar: Grammar | None = None
    continue_final: bool = False
    reasoning_budget: int | None = None
    prompt_logprobs: int | None = None
    deadline: float | None = None
    name: str = ""
    prepared: Prepared | None = field(default=None, repr=False, compare=False)
    share: bool = False

    def __post_init__(self) -> None:
        given = [n for n in ("messages", "prompt", "tokens") if getattr(self, n) is not None]
        if len(given) != 1:
            raise RequestError(
                f"A request was given {' and '.join(given) or 'nothing'} to start from.",
                "Give exactly one of messages, prompt and tokens.",
                param=given[1] if given else "messages",
            )
        if not getattr(self, given[0]):
            raise RequestError(f"{given[0]} is empty.", "A request needs at least one token.", param=given[0])
        if not isinstance(self.salt, str):
            raise RequestError(f"salt is {self.salt!r}.", "It must be a text.", param="salt")
        if self.grammar is not None:
            object.__setattr__(self, "grammar", Grammar.of(self.grammar))
        if self.continue_final and self.messages is None:
            raise RequestError(
                "continue_final has no message to go on from.",
                "Give messages; a raw prompt is always gone on from.",
                param="continue_final",
            )
        for name, most, allowed in (
            ("reasoning_budget", 2**31 - 1, "a whole number, at least 0"),
            ("prompt_logprobs", MAX_TOP_LOGPROBS, f"a whole number from 0 to {MAX_TOP_LOGPROBS}"),
        ):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value <= most):
                raise RequestError(f"{name} is {value!r}.", f"It must be {allowed}.", param=name)
        if self.deadline is not None and not math.isfinite(self.deadline):
            raise RequestError(f"deadline is {self.deadline!r}.", "It must be a moment.", param="deadline")
        object.__setattr__(self, "tokens", copy.copy(self.tokens))
        for name in ("messages", "tools", "template_kwargs"):
            object.__setattr__(self, name, copy.deepcopy(getattr(self, name)))


@dataclass(frozen=True)
class TokenLogprob:
    """A sampled token, its natural log-probability (-9999.0 for less than float32 can say), and the likeliest tokens
    (id, log-probability), likeliest first; the sampled one need not be among them."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """Token counts. ``completion_tokens`` counts the stop token; ``cached_tokens`` were restored, not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class CacheReport:
    """What the prefix store did for a request.

    source: ``none | ram | ssd | object | legacy``, the slowest tier used. miss_reason: null only when everything but
    the last prompt token was restored, else one of ``mlxkv.cache.lookup.REASONS``. miss_position: first prompt token
    that was not restored (null with the reason). stored_tokens: tokens of this request handed to the store for
    keeping.
    """

    source: str
    miss_reason: str | None
    miss_position: int | None
    stored_tokens: int


@dataclass(frozen=True)
class Timings:
    """Seconds, except decode_tps (tokens per second after the first). ttft_s counts from the request, the model
    loaded."""

    load_s: float
    lookup_s: float
    restore_s: float
    prefill_s: float
    ttft_s: float
    decode_tps: float


@dataclass(frozen=True)
class DraftReport:
    """What speculation did for a request: tokens that were proposed, and those of them that were kept and so needed no
    forward of their own. Both 0 where nothing drafted."""

    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Completion:
    """The whole answer. ``token_ids`` are the sampled ids, the stop token included; ``text`` is without it.
    ``logprobs``: one for each of ``token_ids``, or null where they were not asked for. ``prompt_logprobs``: one for
    each token of the prompt, null for the first, which nothing comes before; or null. ``stop``: the stop string that
    ended the text; ``stop_token``: the end token that did; null where it was something else."""

    text: str
    finish_reason: FinishReason
    token_ids: list[int]
    usage: Usage
    cache: CacheReport
    timings: Timings
    drafts: DraftReport = DraftReport()
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    stop: str | None = None
    stop_token: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The stable JSON contract of ``mlxkv run --json``."""
        return asdict(self)


@dataclass(frozen=True)
class Started:
    """The request left the queue and its prompt is valid. cached_tokens: what the look-up restored."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Progress:
    """Prefill has covered ``done`` of ``total`` prompt tokens (restored ones included)."""

    done: int
    total: int


@dataclass(frozen=True)
class Delta:
    """New text, complete characters only, stop strings held back; ``text`` may be empty. token_ids: ids it came
    with. logprobs: theirs, if they were asked for."""

    text: str
    token_ids: list[int]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Finished:
    """The last event of a request that did not fail."""

    completion: Completion


Event = Started | Progress | Delta | Finished
