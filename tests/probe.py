"""Runs of the real pipeline that keep the logits of the last prompt token, for comparing bit by bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxkv.cache.state import SequenceState
from mlxkv.decode.generation import Generation
from mlxkv.decode.options import Options
from mlxkv.decode.request import Completion, Request, SamplingParams
from mlxkv.decode.runtime import Runtime, open_runtime
from mlxkv.decode.solo import Solo

BLOCK = 8
#: largest |Δ logit| / largest |logit| that still counts as equal: bits, but on a GPU sums differ by the batch's shape
TOLERANCE = 1e-3 if os.environ.get("MLXKV_TEST_METAL") else 0.0


def equal(a: np.ndarray, b: np.ndarray, tolerance: float = TOLERANCE) -> bool:
    """Whether two rows of logits are the same, as far as this device promises it."""
    return bool(np.abs(a - b).max() <= tolerance * np.abs(b).max())


def runtime(model: Path, cache_dir: Path | None, **options) -> Runtime:
    """Without a RAM tier unless asked for: what is asked twice comes from disk twice."""
    return open_runtime(Options(model=model, cache_dir=cache_dir, block_size=BLOCK, **{"ram_budget": 0} | options))[0]


class _Watched(Solo):
    """Keeps the logits of its first forward, and the state before it."""

    logits: mx.array | None = None

    def forward(self, inputs, rungs):
        out = super().forward(inputs, rungs)
        if self.logits is None:
            self.logits = out
        return out


class Probe(Generation):
    """A generation that remembers the logits of the last prompt token and the state that it ends with."""

    logits: np.ndarray
    state: SequenceState
    completion: Completion
    keep = True

    def _prefill(self, state):
        self.state = state
        if not self.keep:
            self.sequence.keep = lambda state, reason: None
        return super()._prefill(state)

    def _decode(self, executor):
        watched = _Watched(self.rt.model, executor.state, executor._room)
        reason = super()._decode(watched)
        assert watched.logits is not None
        self.logits = np.array(watched.logits[0].astype(mx.float32))
        return reason


def run(rt: Runtime, tokens: list[int], *, use_cache=True, keep=True, max_tokens=1) -> tuple[np.ndarray, Completion]:
    """(logits of the last prompt token, completion). keep=False: look up and restore, but store nothing."""
    done = probe(rt, tokens, use_cache=use_cache, keep=keep, max_tokens=max_tokens)
    return done.logits, done.completion


def probe(rt: Runtime, tokens: list[int], *, use_cache=True, keep=True, max_tokens=1) -> Probe:
    """The finished generation itself."""
    request = Request(tokens=list(tokens), sampling=SamplingParams(max_tokens=max_tokens), use_cache=use_cache)
    made = Probe(rt, request)
    made.keep = keep
    made.completion = made.run()
    return made


def kept_in_memory(
    rt: Runtime,
    stored: list[int],
    tokens: list[int],
    edges: list[int],
    position: int,
    left: Callable[[SequenceState], None] = lambda state: None,
) -> np.ndarray:
    """Logits of the last of ``tokens`` from a state that never left memory.

    Like the run that stored ``stored``, it is cut at ``edges`` and before the last token of ``stored``; it is left
    (and, where rows alone make up the state, rewound) at ``position``, where ``left`` may change it, and goes on with
    ``tokens``.
    """
    state = SequenceState.new(rt.make_cache())
    state.reserve(256)

    def go(ids: list[int], stops: list[int]) -> None:
        for stop in stops:
            while state.position < stop:
                end = min(stop, state.position + rt.chunk)
                rt.model(mx.array(ids[state.position : end])[None], cache=state.caches)
                state.advance(end - state.position)
                mx.eval(state.live())
            state.settle()
            mx.eval(state.live())

    assert rt.layout is not None
    if rt.layout.growing_only:
        go(stored, [len(stored) - 1])
        for member in state.members or ():
            member.rewind(state.position - position)
        state.position = position
    else:
        go(stored, [e for e in edges if e <= position])
    assert state.position == position
    left(state)
    go(tokens, [e for e in edges if position < e < len(tokens) - 1] + [len(tokens) - 1])
    return np.array(rt.model(mx.array(tokens[-1:])[None], cache=state.caches)[0, -1].astype(mx.float32))
