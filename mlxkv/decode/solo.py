"""One sequence on its own caches, as the only row of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from ..cache.inside import Inside
from ..cache.state import SequenceState


class Solo:
    """``room`` is told how many rows the caches need before they grow. Who stands at a rung keeps the state: nothing
    is captured while a step runs."""

    slots = 1
    tracks = False

    def __init__(self, model: Any, state: SequenceState, room: Callable[[int], None]) -> None:
        self._model, self.state, self._room = model, state, room

    def forward(self, inputs: mx.array, rungs: Mapping[int, int]) -> mx.array:
        self._room(self.state.position + 1)
        logits = self._model(inputs[None], cache=self.state.caches)
        self.state.advance(1)
        return logits[:, -1, :]

    def hold(self) -> Any:
        return self.state.hold()

    def put_back(self, held: Any) -> None:
        self.state.put_back(held)

    def live(self) -> list[mx.array]:
        return self.state.live()

    def row(self, slot: int) -> SequenceState:
        return self.state

    def position(self, slot: int) -> int:
        return self.state.position

    def rung(self, slot: int) -> int:
        return 0

    def captured(self, slot: int) -> Inside | None:
        return None

    def stored(self, slot: int) -> None:
        """Nothing ever waits."""

    def leave(self, slot: int) -> None:
        """Its caches go with this object."""
