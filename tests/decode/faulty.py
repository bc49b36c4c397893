"""A model that does something wrong when a token passes through it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxkv import Engine
from mlxkv.decode.runtime import Runtime
from tests.decode.many import changed, load

#: a token that only the trapped request has: by a bias that makes it certain, or in its prompt
MARK = 77


class Trap:
    """Runs ``model``; from the ``at``-th forward on over ``MARK`` (``width``: a forward over "one" token a row, or over
    "more"), ``times`` times, ``act`` is asked for other logits: it may raise, wait, or change some.

    ``act`` gets the logits and which rows hold the mark, [rows] of bool. ``rows``: of the forwards it was asked in.
    """

    def __init__(self, act: Callable[[mx.array, np.ndarray], mx.array], *, width: str = "one", at: int = 4, times=1):
        self.act, self.width, self.at, self.times = act, width, at, times
        self.model: Any = None
        self.armed = False
        self.passed = 0
        self.rows: list[int] = []

    @contextlib.contextmanager
    def engine(self, model: Path, cache_dir: Path | None, **options: Any) -> Iterator[Engine]:
        """An engine whose model is in this trap, once it is loaded: what it tries at its start does not count. Steps
        run as they are written: a compiled one would not ask a model of Python."""
        with changed(self._into), load(model, cache_dir, **{"compile": "off"} | options) as engine:
            self.armed = True
            yield engine
            self.armed = False

    def _into(self, runtime: Runtime) -> Runtime:
        self.model = runtime.model
        return dataclasses.replace(runtime, model=self)

    def __call__(self, ids: mx.array, cache: Any = None, **more: Any) -> mx.array:
        logits = self.model(ids, cache=cache, **more)
        if not self.armed:
            return logits
        marked = (np.array(ids) == MARK).any(axis=1)
        if marked.any() and (ids.shape[1] == 1) == (self.width == "one"):
            self.passed += 1
            if self.passed >= self.at and len(self.rows) < self.times:
                self.rows.append(ids.shape[0])
                return self.act(logits, marked)
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def raising(error: Exception) -> Callable[[mx.array, np.ndarray], mx.array]:
    def act(logits: mx.array, marked: np.ndarray) -> mx.array:
        raise error

    return act


def not_a_number(logits: mx.array, marked: np.ndarray) -> mx.array:
    """NaN, in the rows that hold the mark only."""
    return mx.where(mx.array(marked)[:, None, None], mx.array(float("nan"), logits.dtype), logits)
