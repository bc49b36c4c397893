"""``mlxkv cache``: what is remembered on disk."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .options import CACHE_DIR, Flags, command

app = typer.Typer(help="Look at what is remembered on disk.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass


@app.command()
@command(CACHE_DIR)
def stats(
    flags: Flags,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Count entries, records and bytes, for each model and together."""
    settings = flags.settings()
    from ..cache.policy import Policy
    from ..cache.store import stats as count
    from .render import print_json

    found = count(settings.cache_dir)
    if as_json:
        print_json(found)
        return
    typer.echo(f"{settings.cache_dir}: {_line(found)}")
    for model in found["by_model"]:
        typer.echo(f"  {model['model']}: {_line(model)}")
    limit = Policy().daily if settings.write_budget is None else settings.write_budget
    typer.echo(f"  written today: {size(found['written_today'])} of at most {size(limit)}")


def _line(found: dict[str, Any]) -> str:
    return f"{found['entries']:,} entries, {found['records']:,} records, {size(found['bytes'])}"


def size(n: float) -> str:
    """Bytes for people: ``1.5 GB`` (powers of ten, as disks are sold)."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"
