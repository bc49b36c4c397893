"""``mlxkv cache prune`` and ``rm``: remove entries, children first, while other processes may go on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError
from .cache_text import (
    DryRun,
    Yes,
    ask,
    choose_model,
    count,
    nothing_yet,
    parse_duration,
    progress,
    size,
    take_in_waiting,
)
from .options import CACHE_DIR, AsJson, Flags, command

if TYPE_CHECKING:
    from ..cache.catalogue import Catalogue, Item


@command(CACHE_DIR)
def prune(
    flags: Flags,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="SIZE", help="Until the folder is this small: 20GB.", show_default=False),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="TIME", help="What was not used for so long: 30d.", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Only what is stored for this model.", show_default=False)
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove what was not used for longest. --model alone removes all that is stored for a model."""
    from ..cache.catalogue import look, take
    from ..cache.folder import CacheFolder
    from ..cache.removal import Pruning, plan_pruning
    from ..cache.removal import prune as carry_out
    from ..config import parse_size

    settings = flags.settings()
    path = settings.cache_dir
    if to is None and older_than is None and model is None:
        raise ConfigError("There is nothing to go by.", "Give --to SIZE, --older-than TIME or --model NAME.")
    try:
        target = None if to is None else parse_size(to)
    except ValueError:
        raise ConfigError(f"--to is {to!r}.", "It must be a size such as 512MB or 20GiB.") from None
    before = None if older_than is None else time.time() - parse_duration(older_than)
    folder = CacheFolder(path)

    chosen: str | None = None

    def plan(index: Catalogue, with_log: bool = True) -> Pruning:
        return plan_pruning(folder, index, to=target, before=before, model=chosen, with_log=with_log)

    take_in_waiting(path)
    with look(path) as index:
        if index is not None:
            chosen = choose_model(model, {space.model for space in index.spaces().values()})
        planned = plan(index, with_log=False) if index else Pruning([], [], [], [], 0)

    def tell(of: Pruning) -> None:
        report(of.entries, len(of.files), of.bytes, of.kept, of.states)

    report = _Report(path, dry_run, as_json, target)
    if dry_run:
        return tell(planned)
    nothing = not (planned.files or planned.units)
    if nothing or not ask(_question(planned.entries, planned.files, planned.bytes, len(planned.states)), yes):
        return report([])
    with take(path) as index:
        assert index is not None
        with progress("removing entries", as_bytes=True) as told:
            done = carry_out(folder, index, lambda: plan(index), progress=told)
    tell(done)


@command(CACHE_DIR)
def rm(
    flags: Flags,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="Keys, or beginnings of keys.")],
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove entries and all that hangs on them."""
    from ..cache.catalogue import Forest, find, look, take
    from ..cache.folder import CacheFolder
    from ..cache.removal import remove

    settings = flags.settings()
    path = settings.cache_dir

    take_in_waiting(path)
    with look(path) as index:
        wanted = [find(path, index, key) for key in keys]
        assert index is not None
        items = Forest(index.items()).above(wanted)
    bytes_ = sum(item.bytes for item in items)
    report = _Report(path, dry_run, as_json)
    if dry_run:
        return report(items, 0, bytes_)
    if not ask(_question(items, [], bytes_), yes):
        return report([])
    with take(path) as index:
        assert index is not None
        forest = Forest(index.items())
        items = forest.above([key for key in wanted if key in forest.items])
        with progress("removing entries") as tell:
            gone = remove(CacheFolder(path), index, items, progress=tell)
    report(gone, 0, sum(item.bytes for item in gone), len(items) - len(gone))


def _what(items: int, files: int, states: int) -> str:
    parts = [count(items, "entry", "entries")] if items or not states else []
    parts += [f"the states of {count(states, 'entry', 'entries')}"] if states else []
    parts += [f"{count(files, 'file')} that serve nobody"] if files else []
    return ", ".join(parts[:-1]) + (" and " if parts[1:] else "") + parts[-1]


def _question(items: list[Item], files: list[Path], bytes_: int, states: int = 0) -> str:
    return f"Remove {_what(len(items), len(files), states)} ({size(bytes_)})?"


@dataclass(frozen=True)
class _Report:
    """Says what was removed, or would be. ``target``: bytes that the folder was to come down to."""

    path: Path
    dry_run: bool
    as_json: bool
    target: int | None = None

    def __call__(
        self, items: list[Item], files: int = 0, bytes_: int = 0, kept: int = 0, states: Sequence[bytes] = ()
    ) -> None:
        """``items`` are whole entries, ``states`` the keys of entries that lost, or would lose, their state alone."""
        from ..cache.folder import CacheFolder
        from .render import print_json

        left = CacheFolder(self.path).size()
        if self.as_json:
            found = {
                "dry_run": self.dry_run,
                "removed": [item.key.hex() for item in items],
                "removed_states": [key.hex() for key in states],
                "removed_files": files,
            }
            print_json(found | {"bytes": bytes_, "kept": kept, "folder_bytes": left})
            return
        if not self.path.is_dir():
            nothing_yet(self.path)
        if self.dry_run:
            for item in items:
                typer.echo(f"{item.key.hex()[:12]}  {item.row_start:,} to {item.end:,}  {size(item.bytes)}")
            for key in states:
                typer.echo(f"{key.hex()[:12]}  its state")
        verb = "would be removed" if self.dry_run else "removed"
        typer.echo(f"{_what(len(items), files, len(states))}, {size(bytes_)}: {verb}.")
        if kept:
            typer.echo(f"{kept:,} of them stayed: used meanwhile, or something new hangs on them.")
        left -= bytes_ if self.dry_run else 0
        if self.target is not None and left > self.target:
            typer.echo(f"{size(left)} are left: the index, and what may not be removed.")
