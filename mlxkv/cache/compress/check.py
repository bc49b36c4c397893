"""Whether rings serve the widest forward that will be verified: asked before any array exists."""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import ConfigError
from .geometry import Geometry


def check_rings(geometries: Iterable[Geometry], widths: Iterable[int], others: int | None = None) -> None:
    """``geometries``: of all layers that compress; ``widths``: rows of one verification (drafts + 1), of every drafter
    and every depth that may be used, none without drafts. ``others``: drafts that all other layers can take back, None
    for any number. Raises ConfigError about the ring that serves the fewest, with the drafts that everything serves."""
    width = max(widths, default=0)
    ring = min(geometries, key=lambda g: g.most_width, default=None)
    if ring is None or width <= ring.most_width:
        return
    drafts, most = width - 1, ring.most_drafts if others is None else min(others, ring.most_drafts)
    raise ConfigError(
        f"{drafts} drafts were asked for, and the ring of {ring.ring} rows that compression at ratio {ring.ratio} "
        f"keeps serves {ring.most_drafts} at most.",
        f"Give {f'--draft-depth {most} or less' if most else '--draft off'}, or --ring-spare {drafts} or more, which "
        f"makes a ring of {ring.ring_for(width)} rows.",
    )
