"""Whether an engine drafts, and with what: decided once, when it is opened."""

from __future__ import annotations

from dataclasses import dataclass

from ..models.journal import Journals
from .depth import Depth
from .drafters import Drafter


@dataclass(frozen=True)
class Drafting:
    """``journals``: of the model's layers, all of whose state can be taken back. ``most``: drafts of a cycle, as the
    state and the device allow. ``fixed``: what the user wants always, None where the depth adapts."""

    drafter: Drafter
    journals: Journals
    most: int
    fixed: int | None = None

    def depth(self) -> Depth:
        return Depth(self.most, self.fixed)
