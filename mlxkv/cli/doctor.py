"""``mlxkv doctor``: what could keep mlxkv from working well here, and what to do about it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .options import DRAFTS, ENGINE, MODEL, AsJson, Flags, command, paint


@command(MODEL, ENGINE, DRAFTS)
def doctor(
    flags: Flags,
    selftest: Annotated[bool, typer.Option("--selftest", help="Also store and restore a tiny model's state.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check this machine, the cache folder and the model. Ends with 1 if a check fails."""
    from dataclasses import asdict

    from .checks import examine
    from .render import print_json

    found = []
    for check in examine(flags, selftest):
        found.append(check)
        if not as_json:
            _show(check)
    ok = all(check.status != "fail" for check in found)
    if as_json:
        print_json({"ok": ok, "checks": [asdict(check) for check in found]})
    if not ok:
        raise typer.Exit(1)


def _show(check: Any) -> None:
    import sys

    colour = {"ok": "32", "warn": "33", "fail": "31"}[check.status]
    status = f"{check.status:<4}"
    typer.echo(f"{paint(status, colour) if sys.stdout.isatty() else status}  {check.name:<16} {check.detail}")
    if check.cure:
        typer.echo(f"      {'':<16} {check.cure}")
