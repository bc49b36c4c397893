"""Texts of a few tokens over a tiny vocabulary by a whole engine that drafts, and how likely each of them is by plain
sampling: computed from the model's own logits, and counted from an engine that does not draft."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np

from mlxkv import Engine
from mlxkv.models import load as load_model
from tests import headed, heads, tiny
from tests.decode.distribution import surprise
from tests.decode.many import ask, load

#: tokens that are said, by drafts of a cycle: the longer the texts, the fewer. Two come before the first cycle, and of
#: the last one a token stays for the target
VOCABULARY = {1: 4, 2: 3}
FIRST = 10
PROMPTS = ((5, 6), (7, 9, 8, 4, 21, 17, 90, 33, 52, 60, 19))
TEMPERATURE = 1.5


@dataclass(frozen=True)
class Said:
    """``model``: an architecture, or a layout of heads that drafts for itself. ``rows`` together at most."""

    model: str
    depth: int
    rows: int
    prompt: tuple[int, ...] = (5, 6)

    @property
    def vocabulary(self) -> list[int]:
        return list(range(FIRST, FIRST + VOCABULARY.get(self.depth, 2)))

    @property
    def length(self) -> int:
        return self.depth + 3

    @property
    def texts(self) -> int:
        return len(self.vocabulary) ** self.length

    def made(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        """The folder of the model, and options of an engine that drafts with it."""
        if self.model in heads.KINDS:
            model, options = headed.make(folder / "model", self.model), {"draft": "mtp"}
        else:
            small = tiny.make("llama", folder / "draft", num_hidden_layers=1, hidden_size=32, intermediate_size=32)
            model, options = tiny.make(self.model, folder / "model"), {"draft": "model", "draft_model": small}
        return model, {**options, "draft_depth": self.depth, "max_rows": self.rows}


def exact(case: Said, model: Path) -> np.ndarray:
    """The probability of each text, float64 [texts], in the order of their numbers."""
    loaded: Any = load_model(model).model
    out = np.ones(1)
    for n in range(case.length):
        said = list(itertools.product(case.vocabulary, repeat=n))
        step = 1 if case.model in tiny.OWN_ARCHS else len(said)  # ours take one sequence, where nothing is remembered
        told = mx.array([[*case.prompt, *each] for each in said], mx.int32)
        logits = mx.concatenate([loaded(told[a : a + step])[:, -1] for a in range(0, len(said), step)])
        x = np.array(logits.astype(mx.float32)).astype(np.float64)[:, case.vocabulary] / TEMPERATURE
        p = np.exp(x - x.max(axis=1, keepdims=True))
        out = (out[:, None] * p / p.sum(axis=1, keepdims=True)).reshape(-1)
    return out


def count(case: Said, engine: Engine, samples: int) -> np.ndarray:
    """How often each text came. As many are asked for at once as run together: while somebody waits, none drafts."""
    bias = dict.fromkeys(case.vocabulary, 100.0)  # nothing else is ever said
    request = ask(case.prompt, case.length, temperature=TEMPERATURE, logit_bias=bias)
    counts = np.zeros(case.texts)
    for begun in range(0, samples, case.rows):
        for ticket in [engine.submit(request) for _ in range(min(case.rows, samples - begun))]:
            number = 0
            for token in ticket.result().token_ids:
                number = number * len(case.vocabulary) + case.vocabulary.index(token)
            counts[number] += 1
    return counts


@contextmanager
def seeded(rng: random.Random) -> Iterator[None]:
    """Inside, seeds of requests without one are drawn from ``rng``."""
    with mock.patch("mlxkv.decode.sampling.secrets.randbits", rng.getrandbits):
        yield


@dataclass
class Deviates:
    """Normal deviates by which texts of an engine that drafts are further than chance from what they should be
    (``exact``) and from those of one that does not (``plain``; None where nobody asked)."""

    exact: float
    plain: float | None
    cycles: int
    accepted: int


def deviates(case: Said, folder: Path, samples: int, seed: int, plain: bool = False) -> Deviates:
    model, options = case.made(folder)
    other = None
    with seeded(random.Random(seed)):
        with load(model, None, compile="off", **options) as engine:
            counts, status = count(case, engine, samples), engine.status()
        if plain:
            with load(model, None, compile="off", draft="off", max_rows=case.rows) as engine:
                other = surprise(counts, count(case, engine, samples), of_samples=True)
    return Deviates(surprise(counts, samples * exact(case, model)), other, status.cycles, status.accepted)
