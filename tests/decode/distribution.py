"""Texts of a few tokens over a tiny vocabulary: how they are distributed, exactly, by plain sampling, and by acceptance
of drafts; thousands at once, each with the random keys of a sampler of its own.

The exact distribution is NumPy's, from the definitions. Samples take their weights and keys from the real Sampler and
the rule from ``acceptance``; ``cycled`` makes one with a real Trial, which must be the same text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlxkv.decode.acceptance import Trial, accepted
from mlxkv.decode.constraint import pack
from mlxkv.decode.request import SamplingParams
from mlxkv.decode.sampling import DRAFT, TOKEN, Sampler, draw
from mlxkv.errors import DeadEnd

VOCAB, LENGTH = 5, 3
PROMPT = [1, 2, 2]
Rule = Callable[[mx.array, mx.array, mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]
PREFIXES = [p for n in range(LENGTH + 1) for p in itertools.product(range(VOCAB), repeat=n)]
PLACE = {p: i for i, p in enumerate(PREFIXES)}


class NoneTwice:
    """Allows what is not the token before; 0 only first."""

    accepting = done = free = False

    def __init__(self, tokens: tuple[int, ...] = ()) -> None:
        self.tokens = list(tokens)

    def allowed(self) -> list[int]:
        return [t for t in range(VOCAB) if t not in self.tokens[-1:] and (t or not self.tokens)]

    def mask(self) -> np.ndarray:
        return pack(self.allowed(), VOCAB)

    def advance(self, token: int) -> None:
        if token not in self.allowed():
            raise DeadEnd("no")
        self.tokens.append(token)

    def fork(self) -> NoneTwice:
        return NoneTwice(tuple(self.tokens))

    def rollback(self, n: int) -> None:
        del self.tokens[len(self.tokens) - n :]


@dataclass(frozen=True)
class Case:
    """``drafter``: "far" (its logits have nothing to do with the target's), "near", "same", "given" (a look-up), or
    "mixed" (the first draft of several is looked up, others are as if far)."""

    params: dict[str, Any] = field(default_factory=dict)
    drafter: str = "near"
    depth: int = 2
    grammar: bool = False

    def sampler(self, own_seed: int) -> Sampler:
        params = SamplingParams(**{"temperature": 1.0, **self.params})
        return Sampler(params, PROMPT, VOCAB, NoneTwice() if self.grammar else None, own_seed)

    def logits(self) -> tuple[np.ndarray, np.ndarray]:
        """Of target and drafter after each of the prefixes, float32 [prefixes, V]."""
        rng = np.random.default_rng(7)
        target, other = (rng.normal(size=(len(PREFIXES), VOCAB)).astype(np.float32) * 1.5 for _ in range(2))
        near = {"near": target + other / 4, "same": target}
        return target, near.get(self.drafter, other * 2)

    def looks_up(self, j: int, k: int) -> bool:
        """Whether draft ``j`` of ``k`` is looked up."""
        return self.drafter == "given" or (self.drafter == "mixed" and j == 0 and k > 1)

    def looked_up(self, prefix: tuple[int, ...]) -> int:
        """What a look-up finds after ``prefix``."""
        return (sum(prefix) * 3 + len(prefix) + 1) % VOCAB


CASES = {
    "temperature": Case({"temperature": 0.7}, "far", depth=3),
    "same": Case(drafter="same"),
    "top_p": Case({"top_p": 0.8}, "far"),
    "top_k, min_p": Case({"temperature": 1.3, "top_k": 3, "min_p": 0.1}, depth=3),
    "penalties": Case(
        {"presence_penalty": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.6, "repetition_context": 2},
        depth=3,
    ),
    "bias, look-up": Case({"logit_bias": {3: 2.0, 0: -1.0}, "top_p": 0.95}, "given"),
    "grammar": Case({"temperature": 1.5, "top_k": 3}, "far", grammar=True),
    "all": Case(
        {"temperature": 0.8, "top_p": 0.9, "min_p": 0.05, "top_k": 4, "logit_bias": {3: 1.0, 1: -0.5}}
        | {"frequency_penalty": 0.5, "repetition_penalty": 1.3, "repetition_context": 4},
        "mixed",
        depth=3,
        grammar=True,
    ),
}


def exact(case: Case) -> np.ndarray:
    """The probability of each text, float64 [V ** LENGTH], in the order of their numbers in base V."""
    p = SamplingParams(**{"temperature": 1.0, **case.params})
    target, _ = case.logits()
    out = np.ones(VOCAB**LENGTH)
    for i, text in enumerate(itertools.product(range(VOCAB), repeat=LENGTH)):
        for n in range(LENGTH):
            out[i] *= _probabilities(p, target[PLACE[text[:n]]].astype(np.float64), text[:n], case.grammar)[text[n]]
    return out


def _probabilities(p: SamplingParams, x: np.ndarray, said: tuple[int, ...], grammar: bool) -> np.ndarray:
    x = x.copy()
    for token, bias in p.logit_bias.items():
        x[token] += bias
    if p.repetition_penalty != 1:
        for token in {*[*PROMPT, *said][-p.repetition_context :]}:
            x[token] = x[token] * p.repetition_penalty if x[token] < 0 else x[token] / p.repetition_penalty
    for token in {*said}:
        x[token] -= p.presence_penalty + p.frequency_penalty * said.count(token)
    if grammar:
        x[[t for t in range(VOCAB) if t not in NoneTwice(said).allowed()]] = -np.inf
    probs = np.exp(x - x.max())
    probs /= probs.sum()
    order = np.argsort(-probs)
    if p.top_p < 1:  # the likeliest tokens until they have top_p together
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= p.top_p]] = 0
    probs[probs < p.min_p * probs.max()] = 0
    if p.top_k:
        probs[order[p.top_k :]] = 0
    probs = probs ** (1 / p.temperature)
    return probs / probs.sum()


@cache
def keys(seeds: tuple[int, ...]) -> np.ndarray:
    """uint32 [n, purposes, LENGTH + 1, 2]: the keys of samplers with these seeds of their own, by purpose and index."""
    rows = [[np.array(s.keys(0, LENGTH + 1, purpose)) for purpose in (TOKEN, DRAFT)] for s in _samplers(seeds)]
    return np.array(rows)


@cache
def chances(seeds: tuple[int, ...]) -> np.ndarray:
    """float32 [n, LENGTH]: the numbers that decide on drafts."""
    return np.array([np.array(s.chances(0, LENGTH)) for s in _samplers(seeds)])


def _samplers(seeds: tuple[int, ...]) -> list[Sampler]:
    return [Sampler(SamplingParams(), [], VOCAB, own_seed=seed) for seed in seeds]


class Texts:
    """Texts of one case, in lockstep; text i of ``seeds[i]``."""

    def __init__(self, case: Case, seeds: list[int]) -> None:
        self.case = case
        sampler = case.sampler(0)
        self.p, self.q = (self._weights(sampler, mx.array(each)) for each in case.logits())
        self.keys, self.chances = keys(tuple(seeds)), chances(tuple(seeds))

    def _weights(self, sampler: Sampler, logits: mx.array) -> mx.array:
        """What is sampled from after each prefix, [prefixes, V]; where none may come, nothing is read."""
        if sampler.stateless:
            return sampler.weights(sampler.processed(logits, sampler.place))
        out = []
        for i, prefix in enumerate(PREFIXES):
            place = sampler.after(list(prefix))
            if place is None:
                out.append(mx.zeros((1, VOCAB)))
            else:
                out.append(sampler.weights(sampler.processed(logits[i : i + 1], place)))
        return mx.concatenate(out)

    def plain(self) -> np.ndarray:
        """int64 [n, LENGTH], by plain sampling."""
        said: list[tuple[int, ...]] = [()] * len(self.keys)
        for i in range(LENGTH):
            weights = self.p[mx.array([PLACE[t] for t in said])]
            drawn = np.array(_draws(weights, mx.array(self.keys[:, TOKEN, i])))
            said = [(*t, int(d)) for t, d in zip(said, drawn, strict=True)]
        return np.array(said)

    def speculative(self, rule: Rule = accepted) -> np.ndarray:
        """int64 [n, LENGTH], by ``rule`` over drafts."""
        said: list[tuple[int, ...]] = [()] * len(self.keys)
        for length in range(LENGTH):  # who stands here has another cycle
            here = [i for i, t in enumerate(said) if len(t) == length]
            if here:
                for i, more in zip(here, self._cycle([said[i] for i in here], here, rule), strict=True):
                    said[i] = (*said[i], *more)[:LENGTH]
        return np.array(said)

    def _cycle(self, said: list[tuple[int, ...]], here: list[int], rule: Rule) -> list[list[int]]:
        at, keys = len(said[0]), self.keys[here]
        k = min(self.case.depth, LENGTH - at)
        paths, q = [said], []
        for j in range(k):
            weights = self.q[mx.array([PLACE[t] for t in paths[-1]])]
            if self.case.looks_up(j, k):
                found = mx.array([self.case.looked_up(t) for t in paths[-1]])
                weights = mx.where(mx.arange(VOCAB) == found[:, None], 0.0, -float("inf"))
            drawn = np.array(_draws(weights, mx.array(keys[:, DRAFT, at + j])))
            q.append(weights)
            paths.append([(*t, int(d)) for t, d in zip(paths[-1], drawn, strict=True)])
        p = mx.stack([self.p[mx.array([PLACE[t] for t in path])] for path in paths], axis=1)
        drafts = mx.array([t[at:] for t in paths[-1]], mx.int32)
        u = mx.array(self.chances[here, at : at + k])
        args = (p, mx.stack(q, axis=1), drafts, u, mx.array(keys[:, TOKEN, at : at + k + 1]))
        kept, last = (each.tolist() for each in mx.vmap(rule)(*args))
        return [[*row[:n], t] for row, n, (t,) in zip(drafts.tolist(), kept, last, strict=True)]


def _draws(weights: mx.array, keys: mx.array) -> mx.array:
    return mx.vmap(lambda w, key: draw(w[None], key)[0])(weights, keys)


def cycled(case: Case, sampler: Sampler) -> list[int]:
    """The text of ``sampler`` by real trials."""
    target, drafter = (mx.array(each) for each in case.logits())
    said: tuple[int, ...] = ()
    while len(said) < LENGTH:
        trial = Trial(sampler)
        path, k = [said], min(case.depth, LENGTH - len(said))
        for j in range(k):
            if case.looks_up(j, k):
                found = case.looked_up(path[-1])
                trial.given([found])
            else:
                found = int(trial.draft(drafter[PLACE[path[-1]]][None]).item())  # type: ignore[arg-type]
            path.append((*path[-1], found))
        verdict = trial.judge(mx.stack([target[PLACE[t]] for t in path]))
        mx.eval(verdict.live())
        for token, _ in verdict.read():
            if len(said) < LENGTH:
                sampler.advance(token)
                said = (*said, token)
    return list(said)


def counted(texts: np.ndarray) -> np.ndarray:
    """How often each text came, in the order of ``exact``."""
    numbers = texts @ (VOCAB ** np.arange(LENGTH)[::-1])
    return np.bincount(numbers, minlength=VOCAB**LENGTH).astype(np.float64)


def surprise(counts: np.ndarray, expected: np.ndarray, of_samples: bool = False) -> float:
    """How many standard deviations a chi-square statistic is too large (Wilson and Hilferty's approximation, 1931): of
    ``counts`` against ``expected`` ones, or (``of_samples``) against another sample's. Rare texts are one class."""
    impossible = expected == 0
    if not of_samples and counts[impossible].any():
        return float("inf")
    rare = (expected + counts < 10) if of_samples else (expected < 5)
    a, b = (np.append(each[~rare], each[rare].sum()) for each in (counts, expected))
    a, b = a[a + b > 0], b[a + b > 0]
    statistic = ((a - b) ** 2 / (a + b if of_samples else b)).sum()
    k = len(a) - 1
    return float(((statistic / k) ** (1 / 3) - 1 + 2 / (9 * k)) / np.sqrt(2 / (9 * k)))


def deviates(case: Case, samples: int, seed: int, at_once: int = 10_000) -> tuple[float, float]:
    """``surprise`` of that many speculative texts, against the exact distribution and against as many plain ones."""
    rng = np.random.default_rng(seed)
    plain, speculative = np.zeros(VOCAB**LENGTH), np.zeros(VOCAB**LENGTH)
    for done in range(0, samples, at_once):
        n = min(at_once, samples - done)
        plain += counted(Texts(case, rng.integers(0, 2**63, n).tolist()).plain())
        speculative += counted(Texts(case, rng.integers(0, 2**63, n).tolist()).speculative())
    return surprise(speculative, samples * exact(case)), surprise(speculative, plain, of_samples=True)
