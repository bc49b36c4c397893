"""Compiled forwards of a batch's heads: the graph of so small a layer takes as long to build as to compute."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from .head_rows import HeadRowsOfAll

#: compiled functions that live; the least recently used is dropped whole
MOST = 16
Key = tuple[int, int, int]


class TracedHeads:
    """Of one engine, whose batches come and go: a trace is of shapes and keeps no batch. For heads of one layer."""

    def __init__(self) -> None:
        self._made: OrderedDict[Key, tuple[Any, list[HeadRowsOfAll]]] = OrderedDict()
        #: how often a function was traced
        self.traces = 0
        #: so many times drafting begins with a shape (slots, columns) before its forwards are traced
        self.rare = 0
        self._met: dict[tuple[int, int], int] = {}

    def run(
        self,
        rows: HeadRowsOfAll,
        head: Callable[..., mx.array],
        tokens: mx.array,
        hidden: mx.array,
        where: mx.array,
        step: int = 0,
    ) -> mx.array | None:
        """As ``HeadRowsOfAll.run``, over all columns; ``where``: [1, slots] int32, the rows made of each slot. None,
        and nothing was done, where this shape is not to be traced yet."""
        shape = tokens.shape[0], rows.form.columns
        key = (*shape, tokens.shape[1])
        if step == 0:
            self._met[shape] = self._met.get(shape, 0) + 1
        if key not in self._made:
            if self._met.get(shape, 0) <= self.rare:
                return None
            self._made[key] = self._function(head)
        self._made.move_to_end(key)
        while len(self._made) > MOST:
            self._made.popitem(last=False)
        function, cell = self._made[key]
        arrays = rows.arrays()
        cell.append(rows)
        try:
            m, after = function(tokens.astype(mx.int32), hidden, where, arrays)
        finally:
            cell.clear()
            rows.form.bind(arrays)  # a trace leaves its own placeholders there
        rows.form.bind(after)
        return m

    def _function(self, head: Callable[..., mx.array]) -> tuple[Any, list[HeadRowsOfAll]]:
        cell: list[HeadRowsOfAll] = []

        def forward(
            tokens: mx.array, hidden: mx.array, where: mx.array, arrays: list[mx.array]
        ) -> tuple[mx.array, list[mx.array]]:
            self.traces += 1
            rows = cell[0]
            rows.form.bind(arrays)
            return rows.over(head, tokens, hidden, where, None), rows.arrays()

        return mx.compile(forward), cell
