"""Sampling: from logits to the next token, with a random key that depends on the seed and the token's index only.

So a request's text does not depend on what was cached, what ran beside it, or how often a step was thrown away. A step
is sampled once every earlier token is known on the host: sampling only reads a sampler, ``Sampler.advance`` moves it
on. The order is bias, repetition penalty, presence and frequency penalties, grammar, then argmax or filters and a draw.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..errors import RequestError
from .constraint import Constraint, Scout, apply
from .counts import Counts, Seen
from .filters import min_p, top_k, top_p
from .request import SamplingParams, TokenLogprob

_MASK = 2**64 - 1
#: what a random key is for: a token, a draft of it, whether the draft is taken
TOKEN, DRAFT, ACCEPT = range(3)
#: stands for a log-probability of minus infinity, which JSON cannot say; OpenAI's number
UNLIKELY = -9999.0


#: distinct tokens up to which a penalty is scattered into the logits; a scatter of more costs more than a whole row
FEW = 1024


def _mix(seed: int, index: int) -> int:
    """A 64-bit key for one token (SplitMix64, Steele et al. 2014)."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@dataclass(frozen=True)
class Place:
    """What the token of an index depends on besides the logits: which tokens came before it, as far as penalties look
    back; which may come, packed. None: of no interest to this sampler."""

    index: int
    recent: Seen | None = None
    generated: Seen | None = None
    allowed: np.ndarray | None = None


class Sampler:
    """Samples one sequence. ``prompt`` are the prompt's ids; repetition penalties look back into them. ``constraint``
    belongs to this sampler from now on.

    All that it remembers is on the host, so no array outlives a step.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: list[int],
        vocab_size: int,
        constraint: Constraint | None = None,
        own_seed: int | None = None,
    ) -> None:
        """``own_seed``: used where the request has no seed (a random one unless given). Raises RequestError if
        logit_bias names an id outside the vocabulary, DeadEnd if the constraint allows no first token."""
        self.params = params
        self.vocab_size = vocab_size
        for token in params.logit_bias:
            if token >= vocab_size:
                raise RequestError(
                    f"logit_bias names token {token}.", f"This model has {vocab_size} tokens.", param="logit_bias"
                )
        #: the text follows from a seed of the user's
        self.seeded = params.seed is not None
        seed = params.seed if params.seed is not None else own_seed
        seed = (secrets.randbits(64) if seed is None else seed) & _MASK
        self._seeds = (seed, _mix(~seed, DRAFT), _mix(~seed, ACCEPT))
        self._top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        #: takes the likeliest token, of whatever the processors leave
        self.likeliest = params.temperature == 0 or params.top_p == 0
        self._index = 0
        self._bias: tuple[mx.array, mx.array] | None = None
        if params.logit_bias:
            values = [float(v) for v in params.logit_bias.values()]
            self._bias = mx.array(list(params.logit_bias), mx.int32), mx.array(values, mx.float32)
        self._recent = None if params.repetition_penalty == 1.0 else Counts(prompt, params.repetition_context)
        # OpenAI's two penalties count what was generated, not the prompt
        self._generated = Counts([]) if params.presence_penalty or params.frequency_penalty else None
        self._scout = Scout(constraint) if constraint is not None else None
        self._counts = self._recent is not None or self._generated is not None

    @property
    def stateless(self) -> bool:
        """What it makes of the logits of the next tokens, as many as a cycle has, does not depend on those before."""
        return not self._counts and (self._scout is None or self._scout.free)

    @property
    def plain(self) -> bool:
        """It takes nothing but the likeliest token of the model's own logits, for as many tokens."""
        return self.likeliest and self._bias is None and self.stateless

    @property
    def done(self) -> bool:
        """The constraint has all it asked for and nothing may follow: the answer ends here, by "stop"."""
        return self._scout is not None and self._scout.done

    def __call__(self, logits: mx.array) -> mx.array:
        """The next token's id, int32 [1], lazy; ``logits``: [1, vocabulary]. Changes nothing: the same step may be
        sampled again."""
        if self.plain:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        logits = self.processed(logits.astype(mx.float32), self.place)
        if self.likeliest:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        return draw(self.weights(logits), self.keys(self._index)[0])

    def advance(self, token: int) -> None:
        """``token`` was sampled and the sequence goes on; to be called once for each, before the next is sampled.
        Host work only: the device may be at work meanwhile. Raises DeadEnd if the constraint cannot go on."""
        self._index += 1
        if self._recent is not None:
            self._recent.add(token)
        if self._generated is not None:
            self._generated.add(token)
        if self._scout is not None:
            self._scout.advance(token)

    @property
    def place(self) -> Place:
        """Of the next token; good until the next ``advance``."""
        return self._place([], None if self._scout is None or self._scout.free else self._scout.mask)

    def after(self, drafts: list[int]) -> Place | None:
        """Of the token after ``drafts``, if these were the next ones; None where none may follow them: they are not
        allowed, or end what the constraint asks for, or lead nowhere. Leaves this sampler where it is. A ``stateless``
        one does not look at them. Good until the next ``advance``."""
        allowed = None
        if self._scout is not None and (allowed := self._scout.look(drafts)) is None:
            return None
        return self._place(drafts, allowed)

    def _place(self, drafts: list[int], allowed: np.ndarray | None) -> Place:
        return Place(
            self._index + len(drafts),
            None if self._recent is None else self._recent.seen(drafts),
            None if self._generated is None else self._generated.seen(drafts),
            allowed,
        )

    def keys(self, index: int, n: int = 1, purpose: int = TOKEN) -> mx.array:
        """The random keys of ``n`` tokens from ``index`` on, uint32 [n, 2]; those of different purposes are
        independent."""
        numbers = [_mix(self._seeds[purpose], i) for i in range(index, index + n)]
        return mx.array([[x >> 32, x & 0xFFFFFFFF] for x in numbers], mx.uint32)

    def chances(self, index: int, n: int) -> mx.array:
        """Uniform numbers in [0, 1), one for the draft of each of ``n`` tokens from ``index`` on; float32 [n]."""
        numbers = [_mix(self._seeds[ACCEPT], i) for i in range(index, index + n)]
        return mx.array([(x >> 40) * 2.0**-24 for x in numbers], mx.float32)

    def processed(self, logits: mx.array, place: Place) -> mx.array:
        """``logits`` [n, vocabulary], float32, after bias, penalties and grammar as at ``place``."""
        p = self.params
        if self._bias is not None:
            ids, values = self._bias
            logits = logits.at[:, ids].add(values)
        if place.recent:
            ids = place.recent.ids
            if len(ids) > FEW:
                seen = mx.array(_spread(ids, np.ones(len(ids), np.bool_), logits.shape[-1]))
                logits = mx.where(seen, _repeated(logits, p.repetition_penalty), logits)
            else:
                places = mx.array(ids)
                logits[:, places] = _repeated(logits[:, places], p.repetition_penalty)
        if place.generated:
            ids = place.generated.ids
            paid = place.generated.counts * np.float32(p.frequency_penalty) + np.float32(p.presence_penalty)
            if len(ids) > FEW:
                logits = logits - mx.array(_spread(ids, paid, logits.shape[-1]))
            else:
                logits = logits.at[:, mx.array(ids)].subtract(mx.array(paid))
        return logits if place.allowed is None else apply(logits, place.allowed)

    def weights(self, logits: mx.array) -> mx.array:
        """[n, vocabulary] of processed ``logits``: unnormalised log-probabilities after filters and temperature, -inf
        for what was filtered out."""
        p = self.params
        if p.top_p < 1:
            logits = top_p(logits, p.top_p)
        if p.min_p:
            logits = min_p(logits, p.min_p)
        if self._top_k:
            logits = top_k(logits, self._top_k)
        return logits * (1.0 / p.temperature)


def draw(weights: mx.array, key: mx.array) -> mx.array:
    """A token of ``weights`` [1, vocabulary] (Sampler.weights), int32 [1]."""
    return drawn(weights, _bounded(mx.random.gumbel(weights.shape, key=key)))


def gumbel(keys: mx.array, size: int) -> mx.array:
    """What ``draw`` adds to weights, for each of ``keys`` [n, 2] by itself, float32 [n, size]; in one go, for on a CPU
    it is a dozen operations."""
    return _bounded(mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(keys))


def drawn(weights: mx.array, noise: mx.array) -> mx.array:
    """A token of each row of ``weights`` [n, vocabulary] with ``noise`` of the same shape, int32 [n].

    The Gumbel-max trick: each token's weight and a random number of its own, which depends on the key alone, and the
    largest sum wins. So one key mostly draws the same token from two distributions that are alike (Maddison et al.
    2014); MLX's ``categorical`` inverts the cumulative sum of a single row, where it hardly ever does.
    """
    return mx.argmax(weights + noise, axis=-1).astype(mx.int32)


def _bounded(noise: mx.array) -> mx.array:
    """One in 2**32 is -inf, which would be no better than a token that may not come."""
    return mx.maximum(noise, -100.0)


def _repeated(logits: mx.array, penalty: float) -> mx.array:
    return mx.where(logits < 0, logits * penalty, logits / penalty)


def _spread(ids: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """[size], ``values`` at ``ids``, nothing elsewhere."""
    out = np.zeros(size, values.dtype)
    out[ids] = values
    return out


@dataclass(frozen=True)
class Report:
    """One row's log-probabilities, lazy: of the token, float32 [1]; of the likeliest, ids int32 and float32 [n]."""

    logprob: mx.array
    top: tuple[mx.array, mx.array] | None


@dataclass(frozen=True)
class Sampled:
    """One step's tokens, int32 [n], lazy, and the reports of the rows that asked for them."""

    tokens: mx.array
    reports: dict[int, Report]

    def live(self) -> list[mx.array]:
        """What is to be evaluated with the step."""
        out = [self.tokens]
        for report in self.reports.values():
            out += [report.logprob, *(report.top or ())]
        return out

    def read(self) -> list[tuple[int, TokenLogprob | None]]:
        """Token and report of each row; waits for the step."""
        out: list[tuple[int, TokenLogprob | None]] = []
        for row, token in enumerate(self.tokens.tolist()):  # type: ignore[arg-type]
            report = self.reports.get(row)
            out.append((token, None if report is None else told(token, report)))
        return out


def sample(samplers: Sequence[Sampler | None], logits: mx.array) -> Sampled:
    """The next token of each row, lazy; ``logits``: [n, vocabulary], row i for ``samplers[i]``. None: a row that nobody
    reads. Plain rows share one argmax; any other is computed from its own row alone, so no row depends on its
    neighbours."""
    plain = [s is None or s.plain for s in samplers]
    likeliest = mx.argmax(logits, axis=-1).astype(mx.int32) if any(plain) else None
    if likeliest is not None and all(plain):
        tokens = likeliest
    else:
        rows = []
        for i, sampler in enumerate(samplers):
            if sampler is None or sampler.plain:
                assert likeliest is not None
                rows.append(likeliest[i : i + 1])
            else:
                rows.append(sampler(logits[i : i + 1]))
        tokens = rows[0] if len(rows) == 1 else mx.concatenate(rows)
    reports = {
        i: report(logits[i : i + 1], tokens[i : i + 1], sampler.params.top_logprobs)
        for i, sampler in enumerate(samplers)
        if sampler is not None and sampler.params.logprobs
    }
    return Sampled(tokens, reports)


def report(logits: mx.array, token: mx.array, n: int) -> Report:
    """``logits``: [1, vocabulary], as the model gave them; ``token``: [1]."""
    row = logits[0].astype(mx.float32)
    total = mx.logsumexp(row, axis=-1, keepdims=True)
    n = min(n, row.size)
    top = None
    if n:
        ids = mx.argpartition(-row, kth=n - 1)[:n].astype(mx.int32)
        top = ids, row[ids] - total
    return Report(row[token] - total, top)


def told(token: int, report: Report) -> TokenLogprob:
    top = () if report.top is None else likeliest(*(a.tolist() for a in report.top))  # type: ignore[arg-type]
    return TokenLogprob(token, finite(report.logprob.item()), top)  # type: ignore[arg-type]


def likeliest(ids: list[int], values: list[float]) -> tuple[tuple[int, float], ...]:
    """Tokens and log-probabilities as TokenLogprob.top has them, of those in any order."""
    return tuple((i, finite(v)) for v, i in sorted(zip(values, ids, strict=True), key=lambda t: (-t[0], t[1])))


def finite(value: float) -> float:
    return value if math.isfinite(value) else UNLIKELY
