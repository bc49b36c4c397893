"""Whether rings serve the widest forward that will be verified: asked before any array exists."""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import ConfigError
from .geometry import Geometry


def check_rings(geometries: Iterable[Geometry], widths: Iterable[int]) -> None:
    """``geometries``: of all layers that compress; ``widths``: rows of one verification (drafts + 1), of every drafter
    and every depth that may be used, none without drafts. Raises ConfigError, about the ring that serves the fewest."""
    widest = max(widths, default=0)
    least = min(geometries, key=lambda g: g.most_width, default=None)
    if least is not None and widest > 1 and widest > least.most_width:
        raise ConfigError(f"{refused(least, widest - 1)}.", advice(least, widest - 1))


def refused(geometry: Geometry, drafts: int) -> str:
    """Why ``drafts`` cannot be served."""
    return (
        f"{drafts} drafts were asked for, and the ring of {geometry.ring} rows that compression at ratio "
        f"{geometry.ratio} keeps serves {geometry.most_drafts} at most"
    )


def advice(geometry: Geometry, drafts: int) -> str:
    """What to do about it. ``--ring-spare n`` makes every ring as long as n drafts need."""
    least = f"Give --draft-depth {geometry.most_drafts} or less" if geometry.most_drafts else "Give --draft off"
    return f"{least}, or --ring-spare {drafts} or more: a ring of {geometry.ring_for(drafts + 1)} rows would do."
