"""Whether drafts can be taken back, checked when an engine is configured (DESIGN §6, Rings)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..errors import ConfigError
from .compress.check import check_rings
from .member import Member


class Covers(Protocol):
    """Who knows which recurrent layers keep what a replay needs: a journal."""

    def covers(self, cache: Any) -> bool: ...


def most_drafts(member: Member, journal: Covers | None) -> int | None:
    """How many drafts ``member`` can take back; None for any number."""
    if member.kind == "recurrent" and journal is not None and journal.covers(member.cache):
        return None
    return member.most_drafts()


def why_not(members: Sequence[Member] | None, journal: Covers | None = None) -> str | None:
    """Why no draft at all can be taken back, or None."""
    if members is None:
        return "its state has no known kinds"
    for member in members:
        if most_drafts(member, journal) == 0:
            return f"layer {member.label} is {_said(member)}"
    return None


def runs_again(members: Sequence[Member] | None, journal: Covers | None = None) -> bool:
    """Whether tokens can be taken back at the price of another forward: recurrent layers without a journal are put back
    to where they stood before, and all others forget rows. A ring cannot: its root has overwritten a row."""
    stuck = [m for m in members or () if most_drafts(m, journal) == 0]
    rest = [m for m in members or () if m not in stuck]
    return bool(stuck) and all(m.kind == "recurrent" for m in stuck) and all(m.most_drafts() is None for m in rest)


def _said(member: Member) -> str:
    if (ring := member.geometry) is not None:
        return f"compressed at ratio {ring.ratio} out of a ring of {ring.ring} rows, none of them spare"
    if member.record == "window":
        return f"a window of {_window(member)} rows without spare ones, and would have overwritten what comes back"
    if member.kind == "recurrent":
        return "recurrent, and no journal of its inputs is kept from which its state could be made again"
    return f"of a kind ({member.kind}) that takes nothing back"


def _window(member: Member) -> int | None:
    """Rows that its queries see, which may be more than those that must survive."""
    return member.params().get("window", member.window())


def check_drafts(members: Sequence[Member], depth: int, journal: Covers | None = None) -> None:
    """``depth``: the most drafts of a cycle, whatever drafter and depth is used. Raises ConfigError where a layer
    cannot take them back, which names the layer or the compression that can take back the fewest, the drafts, the
    number to use and the flags."""
    limits = [(most, member) for member in members if (most := most_drafts(member, journal)) is not None]
    if not limits:
        return
    most, member = min(limits, key=lambda limit: limit[0])
    if depth <= most:
        return
    if most == 0:
        raise ConfigError(f"Nothing can be drafted: layer {member.label} is {_said(member)}.", "Give --draft off.")
    check_rings([m.geometry for m in members if m.geometry is not None], [depth + 1], others=most)
    raise ConfigError(
        f"{depth} drafts were asked for, and the ring of layer {member.label} (a window of {_window(member)} rows, "
        f"{most} spare) can take back {most} at most.",
        f"Give --draft-depth {most} or less, or --ring-spare {depth} or more.",
    )
