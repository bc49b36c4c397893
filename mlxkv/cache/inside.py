"""States at boundaries inside a forward: who can tell them, found by asking once with a model that runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import mlx.core as mx

from .layout import DTYPE_NAME, Layout, tensor_name
from .state import SequenceState, members_of


class Inside(Protocol):
    """What a model's layers left behind at ``positions``, absolute and rising, inside its last forward."""

    positions: tuple[int, ...]

    def slots(self, cache: Any, position: int) -> dict[int, mx.array]:
        """Slot number -> array as ``cache`` held it at ``position``; empty if its layer left nothing."""
        ...


class Replay(Protocol):
    """What a model's layers wrote down of its last forward, of which a part is taken back."""

    def covers(self, cache: Any) -> bool:
        """Whether all slots of ``cache`` can be told."""
        ...

    def slots(self, cache: Any, rows: int) -> dict[int, mx.array]:
        """Slot number -> array of ``cache`` after the first ``rows`` tokens of that forward; lazy."""
        ...


#: (start, end, positions): announces a forward over tokens [start, end), which is built while the context is open
Announce = Callable[[int, int, tuple[int, ...]], AbstractContextManager[Inside]]


def obstacle(
    model: Callable[..., mx.array], make_cache: Callable[[], list[Any]], layout: Layout, announce: Announce
) -> str | None:
    """Why this model's forward must be split at boundaries, or None if every member tells its state inside of one.

    A forward is built, on a throw-away cache, and never computed: shapes and dtypes are enough.
    """
    caches = make_cache()
    state = SequenceState(caches, members_of(caches))
    with announce(0, 3, (1, 2)) as inside:
        model(mx.zeros((1, 3), dtype=mx.int32), cache=caches)
    state.advance(3)
    for member, spec in zip(state.members or (), layout.members, strict=True):
        if member.record != "state":
            continue  # rows are cut by position
        known = {(t.name, t.dtype, t.shape) for t in spec.tensors}
        for position in inside.positions:
            told = member.state_at(position, inside)
            if {(tensor_name(member, name), DTYPE_NAME.get(a.dtype), a.shape) for name, a in told.items()} != known:
                return f"member {member.label} ({member.kind}) cannot tell its state inside a forward"
    return None
