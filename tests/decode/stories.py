"""Random requests that have much in common: shared beginnings, branches, answers gone on with, every way to sample."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from mlxkv.decode.request import Completion, Grammar, Request, SamplingParams
from tests import tiny

#: token ids that a bias may name: none of them special
_IDS = tiny.VOCAB - len(tiny.SPECIAL)


#: some prompts are longer by so many tokens: more than the rows by which buffers grow
FAR = 260


class Stories:
    """``alone`` answers a request, so that stop strings are texts that come, and answers can be gone on with."""

    def __init__(
        self, rng: random.Random, alone: Callable[[Request], Completion], longest: int = 70, far: int = FAR
    ) -> None:
        """longest: tokens of most prompts; far: by how many a few are longer."""
        self.rng, self.alone, self.longest, self.far = rng, alone, longest, far
        self.pool: list[list[int]] = []

    def take(self, n: int) -> list[Request]:
        """The first ``len(WAYS)`` sample in as many ways, the others as it comes; the first four are longer."""
        ways = [*WAYS, *(self.rng.choice(list(WAYS)) for _ in range(n))][:n]
        return [self.one(way, (12, 20, 30) if number < 4 else (1, 2, 7, 20)) for number, way in enumerate(ways)]

    def one(self, way: str, lengths: Sequence[int]) -> Request:
        rng = self.rng
        tokens = self.prompt()
        sampling: dict[str, Any] = {"max_tokens": rng.choice(lengths)} | WAYS[way](rng)
        grammar = sampling.pop("grammar", None)
        if rng.random() < 0.5:
            sampling |= {"logprobs": True, "top_logprobs": rng.choice((0, 3))}
        if way == "stopped":
            sampling["max_tokens"] = max(12, sampling["max_tokens"])
            text = self.alone(Request(tokens=tokens, sampling=SamplingParams(**sampling))).text
            if len(text) > 6:
                at = rng.randrange(2, len(text) - 2)
                sampling["stop"] = (text[at : at + rng.randint(1, 3)], "never said")
        request = Request(tokens=tokens, sampling=SamplingParams(**sampling), grammar=grammar)
        answer = self.alone(request).token_ids
        self.pool.append([*tokens, *answer] if rng.random() < 0.5 else tokens)
        return request

    def prompt(self) -> list[int]:
        """New, seen before, cut and continued, or gone on with; messages end here and there; a few are long."""
        rng = self.rng
        base = rng.choice(self.pool) if self.pool and rng.random() < 0.6 else []
        if base and rng.random() < 0.5:
            base = base[: rng.randint(1, len(base))]
        tail = tiny.ids(rng.randint(0 if len(base) > 3 else 4, 40), seed=rng.randrange(1 << 30))
        for i in range(len(tail)):
            if rng.random() < 0.06:
                tail[i] = tiny.EOS
        tokens = [*base, *tail][: self.longest]
        return tokens if rng.random() < 0.92 else [*tokens, *tiny.ids(self.far, seed=rng.randrange(1 << 30))]


#: small enough to be met or left unmet within an answer
GRAMMARS = (
    Grammar("regex", "[a-z]{2,9}( [a-z]{2,9})*"),
    Grammar("json_object"),
    Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
)


def _biased(rng: random.Random) -> dict[str, Any]:
    """Some tokens more, some less likely; the end of text too, so that answers end by themselves."""
    bias = {rng.randrange(_IDS): rng.uniform(-5, 5) for _ in range(8)}
    return {"logit_bias": bias | {tiny.EOS: rng.uniform(2, 8)}}


#: name -> fields of SamplingParams, and a grammar
WAYS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "greedy": lambda rng: {},
    "drawn": lambda rng: {
        "temperature": rng.uniform(0.5, 1.5),
        "seed": rng.randrange(1 << 62),
        "top_p": rng.choice((1.0, 0.9, 0.6)),
        "top_k": rng.choice((0, 5, 40)),
        "min_p": rng.choice((0.0, 0.05)),
    },
    "stopped": lambda rng: {},
    "penalised": lambda rng: {
        "presence_penalty": rng.uniform(0, 2),
        "frequency_penalty": rng.uniform(0, 2),
        "repetition_penalty": rng.uniform(1.05, 1.5),
        "repetition_context": rng.choice((4, 20)),
    },
    "biased": _biased,
    "by a grammar": lambda rng: {
        "grammar": rng.choice(GRAMMARS),
        "temperature": rng.choice((0.0, 1.0)),
        "seed": rng.randrange(1 << 62),
    },
    "all of it": lambda rng: {
        "temperature": rng.uniform(0.7, 1.3),
        "seed": rng.randrange(1 << 62),
        "top_p": 0.95,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
        **_biased(rng),
    },
}
