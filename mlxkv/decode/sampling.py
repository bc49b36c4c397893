"""Sampling: from logits to the next token, with a random key that depends on the seed and the token's index only.

So a request's text does not depend on what was cached, what ran beside it, or how often a step was thrown away. Filters
and penalties are mlx-lm's own.
"""

from __future__ import annotations

import secrets

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from ..errors import RequestError
from .request import SamplingParams

_MASK = 2**64 - 1


def _mix(seed: int, index: int) -> int:
    """A 64-bit key for one token (SplitMix64, Steele et al. 2014)."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class Sampler:
    """Samples one sequence. ``prompt`` are the prompt's ids; repetition penalties look back into them."""

    def __init__(self, params: SamplingParams, prompt: list[int], vocab_size: int) -> None:
        """Raises RequestError if logit_bias names an id outside the vocabulary."""
        self.params = params
        for token in params.logit_bias:
            if token >= vocab_size:
                raise RequestError(
                    f"logit_bias names token {token}.", f"This model has {vocab_size} tokens.", param="logit_bias"
                )
        self._seed = (secrets.randbits(64) if params.seed is None else params.seed) & _MASK
        self._top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        self._index = 0
        far = 2**31 - 1
        self._bias = make_logits_processors(logit_bias=params.logit_bias or None)
        repetition = None if params.repetition_penalty == 1.0 else params.repetition_penalty
        self._repetition = make_logits_processors(
            repetition_penalty=repetition, repetition_context_size=params.repetition_context
        )
        # OpenAI's two penalties count what was generated, not the prompt
        self._generated = make_logits_processors(
            presence_penalty=params.presence_penalty or None,
            presence_context_size=far,
            frequency_penalty=params.frequency_penalty or None,
            frequency_context_size=far,
        )
        self._tail = mx.array(prompt[-params.repetition_context :], mx.int32) if self._repetition else None
        self._sampled: mx.array | None = None

    def __call__(self, logits: mx.array) -> mx.array:
        """Token id, shape [1], int; ``logits``: [1, vocabulary]. Lazy: may be called before earlier tokens are
        known."""
        logits = logits.astype(mx.float32) if logits.dtype != mx.float32 else logits
        for process in self._bias:
            logits = process(mx.zeros((0,), mx.int32), logits)
        if self._tail is not None:
            for process in self._repetition:
                logits = process(self._tail, logits)
        if self._sampled is not None:
            for process in self._generated:
                logits = process(self._sampled, logits)
        likeliest = self.params.temperature == 0 or self.params.top_p == 0
        token = mx.argmax(logits, axis=-1) if likeliest else self._draw(logits)
        self._index += 1
        if self._tail is not None:
            self._tail = mx.concatenate([self._tail, token.astype(mx.int32)])[-self.params.repetition_context :]
        if self._generated:
            ids = token.astype(mx.int32)
            self._sampled = ids if self._sampled is None else mx.concatenate([self._sampled, ids])
        return token

    def live(self) -> list[mx.array]:
        """Arrays that each step must evaluate, or their graphs would grow."""
        return [a for a in (self._tail, self._sampled) if a is not None]

    def _draw(self, logits: mx.array) -> mx.array:
        p = self.params
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if p.top_p < 1:
            logprobs = apply_top_p(logprobs, p.top_p)
        if p.min_p:
            logprobs = apply_min_p(logprobs, p.min_p)
        if self._top_k:
            logprobs = apply_top_k(logprobs, self._top_k)
        key = mx.random.key(_mix(self._seed, self._index))
        return mx.random.categorical(logprobs * (1.0 / p.temperature), key=key)
