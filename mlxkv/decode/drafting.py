"""Whether an engine drafts, and with what: decided once, when it is opened."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..cache.member import UnknownCache
from ..cache.rewind import check_drafts, most_drafts, why_not
from ..cache.ring import with_rings
from ..cache.state import SequenceState, members_of
from ..errors import ConfigError
from ..models.journal import Journal, Journals
from .depth import DEEPEST, Depth, deepest
from .drafters import Drafter
from .drafters.mtp import MTP
from .options import Options

log = logging.getLogger("mlxkv.engine")

Caches = Callable[[], list[Any]]


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


@dataclass(frozen=True)
class Rewinds:
    """What a model can take back. ``most``: drafts at most, None for any number; ``why_not``: why none at all."""

    most: int | None
    why_not: str | None


def examine(model: Any, make_cache: Caches, journals: Journals) -> tuple[Rewinds, SequenceState, Journal | None]:
    """Ask the layers themselves, by a forward that is built and never computed. What they keep is given back too."""
    caches = make_cache()
    try:
        state = SequenceState(caches, members_of(caches))
    except UnknownCache as e:
        return Rewinds(0, e.message), SequenceState(caches, None), None
    # windows are asked as they are, recurrent layers by what they write down
    with journals.recording(2) as journal:
        model(mx.zeros((1, 2), mx.int32), cache=caches)
    limits = [most for m in state.members or () if (most := most_drafts(m, journal)) is not None]
    return Rewinds(min(limits, default=None), why_not(state.members, journal)), state, journal


def choose(options: Options, *, head: str | None, rewinds: str | None) -> tuple[str, str]:
    """Which drafter is used ("off" for none), and why. ``head``, ``rewinds``: why there is no head, and why drafts
    cannot be taken back; None where they are fine. Raises ConfigError where the user asked for what cannot be."""
    wanted = options.draft
    if wanted == "off":
        return "off", "it was switched off"
    if wanted == "auto" and (head or rewinds):
        return "off", f"nothing is drafted: {head or rewinds}"
    if rewinds:
        raise ConfigError(f"Nothing can be drafted with this model: {rewinds}.", "Give --draft off, or leave it out.")
    if wanted == "mtp" and head:
        raise ConfigError(f"The model cannot draft for itself: {head}.", "Give --draft ngram, model or off.")
    return ("mtp" if wanted == "auto" else wanted), ""


def group_size(config: dict[str, Any], device: str) -> int:
    """Query heads of each head of keys and values, which limits drafts on Metal; 0 elsewhere."""
    if device == "cpu" or not mx.metal.is_available():
        return 0
    text = config.get("text_config") or config
    heads = int(text.get("num_attention_heads") or 1)
    return max(1, heads // int(text.get("num_key_value_heads") or heads))
