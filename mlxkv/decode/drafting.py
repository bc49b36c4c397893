"""Whether an engine drafts, and with what: decided once, when it is opened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..cache.member import UnknownCache
from ..cache.rewind import check_drafts, most_drafts, runs_again, why_not
from ..cache.state import SequenceState, members_of
from ..errors import ConfigError
from ..models import Loaded
from ..models.journal import Journal, Journals
from ..models.mtp import WithHead, find
from .depth import Depth, deepest
from .drafters import Drafter
from .drafters.model import DraftModel, open_draft_model
from .drafters.mtp import MTP
from .drafters.ngram import NGram
from .memory import Memory
from .options import Options

Caches = Callable[[], list[Any]]
NO_HEAD = "the checkpoint has no multi-token-prediction head"


@dataclass(frozen=True)
class Drafting:
    """``journals``: of the model's layers; ``again``: some write none, and accepted tokens are run again. ``most``:
    drafts of a cycle, as the state and the device allow. ``fixed``: what the user wants always, None where the depth
    adapts."""

    drafter: Drafter
    journals: Journals
    most: int
    fixed: int | None = None
    again: bool = False

    @property
    def models(self) -> list[nn.Module]:
        """What is loaded besides the model and its head."""
        return [self.drafter.model] if isinstance(self.drafter, DraftModel) else []

    def charge_to(self, memory: Memory) -> None:
        """From now on caches of the drafter's own are charged to ``memory``."""
        if isinstance(self.drafter, DraftModel):
            self.drafter.memory = memory

    def depth(self) -> Depth:
        return Depth(self.most, self.fixed)


@dataclass(frozen=True)
class Rewinds:
    """What a model can take back. ``most``: drafts at most, None for any number; ``why_not``: why none at all;
    ``again``: all the same, if accepted tokens are run again, which is done only where drafts are asked for."""

    most: int | None
    why_not: str | None
    again: bool = False


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
    reason, again = why_not(state.members, journal), runs_again(state.members, journal)
    return Rewinds(None if again else min(limits, default=None), reason, again), state, journal


def choose(options: Options, *, head: str | None, rewinds: Rewinds) -> tuple[str, str]:
    """Which drafter is used ("off" for none), and why none is. ``head``: why there is none, None if there is. Raises
    ConfigError where the user asked for what cannot be."""
    wanted = "model" if options.draft == "auto" and options.draft_model is not None else options.draft
    if wanted == "off":
        return "off", "it was switched off"
    if wanted == "auto" and (head or rewinds.why_not):
        return "off", head or rewinds.why_not or ""
    if rewinds.why_not and not rewinds.again:
        raise ConfigError(
            f"Nothing can be drafted with this model: {rewinds.why_not}.", "Give --draft off, or leave it out."
        )
    if wanted == "mtp" and head:
        raise ConfigError(f"This model cannot draft for itself: {head}.", "Give --draft ngram, model or off.")
    return ("mtp" if wanted == "auto" else wanted), ""


def prepare(
    options: Options, loaded: Loaded, headed: WithHead | None, make_cache: Caches, journals: Journals
) -> tuple[Drafting | None, str | None]:
    """What drafts for this model, whose layers write ``journals``; or None, and why. ``make_cache``: with rings. Raises
    ConfigError for settings that cannot work."""
    if options.draft == "off":
        return None, "it was switched off"
    rewinds, state, journal = examine(headed or loaded.model, make_cache, journals)
    name, why = choose(options, head=no_head(loaded), rewinds=rewinds)
    if name == "off":
        return None, why
    in_a_row = loaded.head.most_drafts if name == "mtp" and loaded.head is not None else None
    most = max(most_at_a_time(options, loaded.config, rewinds, in_a_row), options.draft_depth or 1)
    if not rewinds.again:
        check_drafts(state.members or [], most, journal)
    drafter = _drafter(name, options, loaded, headed)
    return Drafting(drafter, journals, most, options.draft_depth, rewinds.again), None


def most_at_a_time(options: Options, config: dict[str, Any], rewinds: Rewinds, in_a_row: int | None) -> int:
    """Drafts of a cycle at most, as state, device and head allow; ``in_a_row``: what the head that drafts makes, None
    for any number and for other drafters. Raises ConfigError where the user fixed more than the head makes."""
    most = deepest(_group_size(config), rewinds.most)
    if in_a_row is None:
        return most
    most = min(most, in_a_row)
    if options.draft_depth is not None and options.draft_depth > most:
        raise ConfigError(
            f"{options.draft_depth} drafts were asked for, and this model's head makes {most} in a row.",
            f"Give --draft-depth {most} or less.",
        )
    return most


def no_head(loaded: Loaded) -> str | None:
    """Why the model's own head cannot draft; None if it can."""
    if loaded.head is not None:
        return None
    found = find(loaded.path, loaded.config)
    return found.reason or NO_HEAD


def _drafter(name: str, options: Options, loaded: Loaded, headed: WithHead | None) -> Drafter:
    if name == "mtp":
        assert headed is not None
        return MTP(headed.logits)
    if name == "model":
        assert options.draft_model is not None
        return open_draft_model(options.draft_model, loaded, dtype=options.dtype)
    return NGram()


def _group_size(config: dict[str, Any]) -> int:
    """Query heads of each head of keys and values, which limits drafts on Metal; 0 elsewhere."""
    if not mx.metal.is_available():
        return 0
    text = config.get("text_config") or config
    heads = int(text.get("num_attention_heads") or 1)
    return max(1, heads // int(text.get("num_key_value_heads") or heads))
