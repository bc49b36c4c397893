"""``mlxkv cache upgrade``: bring what older versions of mlxkv stored up to date, at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cache_text import count, nothing_yet, progress, size
from .options import CACHE_DIR, AsJson, Flags, command

if TYPE_CHECKING:
    from ..cache.legacy.own import Outdated


@command(CACHE_DIR)
def upgrade(
    flags: Flags,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what is outdated, and change nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Bring what older versions of mlxkv stored up to date. A run does the same when it opens the folder."""
    settings = flags.settings()
    from ..cache.legacy.own import survey
    from ..cache.legacy.own import upgrade as carry_out
    from ..cache.tables import VERSION
    from .render import print_json

    path = settings.cache_dir
    found = survey(path)
    told: dict[str, Any] = {"path": str(path), "dry_run": dry_run, "version": VERSION, "before": _json(found)}
    if found is None or found.nothing_to_do or dry_run:
        if as_json:
            print_json(told | {"after": _json(found), "records": None, "bytes": None, "set_aside": 0})
        elif found is None:
            nothing_yet(path)
        else:
            typer.echo("There is nothing to do." if found.nothing_to_do else _outdated(found, VERSION))
            _newer(found)
        return
    with progress("reading records") as tell:
        done = carry_out(path, tell)
    assert done is not None
    if as_json:
        after = {"after": _json(done.after), "records": done.records, "bytes": done.bytes}
        print_json(told | after | {"set_aside": done.set_aside})
        return
    typer.echo(f"{_outdated(found, VERSION)} Now it knows {count(done.records, 'record')} ({size(done.bytes)}).")
    if done.set_aside:
        typer.echo(f"{count(done.set_aside, 'file')} turned out damaged and will not be used (see quarantine/).")
    _newer(done.after)


def _json(found: Outdated | None) -> dict[str, Any] | None:
    if found is None:
        return None
    parts = {"index": found.index, "unknown": found.unknown, "gone": found.gone, "newer": found.newer}
    return parts | {"nothing_to_do": found.nothing_to_do}


def _outdated(found: Outdated, version: int) -> str:
    if found.index == version:
        return f"The index did not know {count(found.unknown, 'record')}, and had {found.gone:,} that are gone."
    none = "There was no index that can be read"
    what = none if found.index is None else f"The index had version {found.index}, not {version}"
    return f"{what}; {count(found.unknown, 'record')} to read."


def _newer(found: Outdated) -> None:
    if found.newer:
        typer.echo(f"{count(found.newer, 'record')} of a later version of mlxkv stay as they are.")
