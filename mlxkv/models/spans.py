"""Boundaries inside one forward: recurrent layers run sub-span by sub-span and leave their state at each.

Cutting a prompt at a boundary costs a GPU another reading of all weights. Inside one forward only what carries a state
from token to token has to stop there: a layer projects all tokens at once and calls its convolution and its recurrence
once per sub-span, which is what a cut there would have called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import numerics
from .journal import Journals
from .replace import replace


class Left:
    """What layers left behind at the boundaries inside one forward over tokens [start, end), lazily computed."""

    def __init__(self, start: int, end: int, positions: Sequence[int]) -> None:
        #: absolute and rising, start < position < end
        self.positions = tuple(positions)
        self.start, self.end = start, end
        edges = (start, *self.positions, end)
        if not positions or any(a >= b for a, b in pairwise(edges)):
            raise ValueError(f"Boundaries {list(positions)} are not inside [{start}, {end}).")
        #: sub-spans, counted from the forward's first token
        self.pieces = [(a - start, b - start) for a, b in pairwise(edges)]
        # by the cache object, which is held: its id stays its own
        self._kept: dict[tuple[int, int], tuple[Any, dict[int, mx.array]]] = {}

    def keep(self, cache: Any, slots: Sequence[int], offset: int) -> None:
        """``cache`` stands ``offset`` tokens into the forward, as far as these slots go."""
        _, held = self._kept.setdefault((id(cache), self.start + offset), (cache, {}))
        held.update({slot: cache[slot] for slot in slots if cache[slot] is not None})

    def slots(self, cache: Any, position: int) -> dict[int, mx.array]:
        """Slot number -> array as ``cache`` held it at ``position``; empty if its layer left nothing."""
        return dict(self._kept.get((id(cache), position), (cache, {}))[1])


class Spans(Journals):
    """Shared by all layers of a model that can run sub-span by sub-span, or write a journal; inert outside ``inside``
    and ``recording``."""

    def __init__(self, few: bool = False) -> None:
        super().__init__()
        self._left: Left | None = None
        #: layers may take the tokens that they write down all at once, if that is as near to mlx-lm's as ``fast`` asks
        self.few = few

    @contextmanager
    def inside(self, start: int, end: int, positions: Sequence[int]) -> Iterator[Left]:
        """The forward that is built in this block runs over tokens [start, end) of one sequence; its layers leave their
        states at ``positions``. Raises ValueError for positions that are not rising or not inside."""
        self._left = Left(start, end, positions)
        try:
            yield self._left
        finally:
            self._left = None

    def ask(self, inputs: mx.array, mask: mx.array | None, cache: Any) -> bool:
        """Whether a layer called like this must go by ``run``: unpadded rows, exactly the forward that was announced. A
        layer that is called otherwise leaves nothing, and nothing is stored of it or taken back."""
        if mask is not None or cache is None or cache.lengths is not None or cache.left_padding is not None:
            return False
        if self._journal is not None:
            return inputs.shape[1] == self._journal.width
        return self._left is not None and inputs.shape[:2] == (1, self._left.end - self._left.start)

    def run(
        self,
        cache: Any,
        slots: Sequence[int],
        step: Callable[..., mx.array],
        record: Callable[..., mx.array],
        *inputs: mx.array,
    ) -> mx.array:
        """Take ``inputs`` [B, S, ...] through a layer's recurrence; gives back its outputs [B, S, ...]. Either ``step``
        is called with each sub-span of them in turn, or ``record`` with the journal and all of them. Both rebind
        ``slots`` of ``cache``."""
        if self._journal is not None:
            return record(self._journal, *inputs)
        left = self._left
        assert left is not None
        out = []
        for a, b in left.pieces:
            out.append(step(*(x[:, a:b] for x in inputs)))
            if b < left.end - left.start:
                left.keep(cache, slots, b)
        return mx.concatenate(out, axis=1)


def install(model: nn.Module) -> tuple[Spans, list[str]]:
    """Replace, in place, every layer that has a form for sub-spans and journals. Gives back what they share, and what
    was replaced, for the log. Call it once, after ``fast.accelerate``: its layers have such a form too."""
    from .spans_layers import FORMS

    now = numerics.current()
    spans = Spans(few=now.device == "cpu" and now.mode == "fast")
    names = {name: FORMS[type(layer)] for name, layer in model.named_modules() if type(layer) in FORMS}
    done = replace(model, names)
    layers = dict(model.named_modules())
    for name in names:
        layers[name].spans = spans
    return spans, done
