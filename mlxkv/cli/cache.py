"""``mlxkv cache``: what is remembered on disk. Only ``explain`` and ``import`` load a model, or MLX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cache_explain import explain
from .cache_import import import_
from .cache_remove import prune, rm
from .cache_show import show
from .cache_text import ago, choose_model, count, decoder, nothing_yet, size, take_in_waiting
from .cache_upgrade import upgrade
from .cache_verify import verify
from .options import CACHE_DIR, MODEL, AsJson, Flags, command, warn

if TYPE_CHECKING:
    from ..cache.catalogue import Catalogue
    from ..config import Settings

app = typer.Typer(help="Look at what is remembered on disk, check it and remove it.", no_args_is_help=True)

#: conversations that ``ls`` shows to people unless told otherwise
SHOWN = 20


@app.callback()
def _group() -> None:
    pass


@app.command()
@command(CACHE_DIR)
def stats(flags: Flags, as_json: AsJson = False) -> None:
    """Count entries, records and bytes, for each model and together."""
    settings = flags.settings()
    from ..cache.catalogue import look
    from ..cache.inspect import stats as count_all
    from ..cache.policy import Policy
    from .render import print_json

    take_in_waiting(settings.cache_dir)
    with look(settings.cache_dir):  # an index that cannot be read is said, and not taken for an empty one
        found = count_all(settings.cache_dir)
    if as_json:
        print_json(found)
        return
    typer.echo(f"{settings.cache_dir}: {_line(found)}")
    for model in found["by_model"]:
        typer.echo(f"  {model['model']}: {_line(model)}")
    if found["waiting"]:
        typer.echo(f"  {count(found['waiting'], 'record')} not yet in the index; a run takes them in behind")
    limit = Policy().daily if settings.write_budget is None else settings.write_budget
    typer.echo(f"  written today: {size(found['written_today'])} of at most {size(limit)}")
    if found["merged_today"]:
        typer.echo(f"  of that, to merge the pieces of blocks: {size(found['merged_today'])}")


def _line(found: dict[str, Any]) -> str:
    return f"{count(found['entries'], 'entry', 'entries')}, {count(found['records'], 'record')}, {size(found['bytes'])}"


@app.command("dir")
@command(CACHE_DIR)
def folder(flags: Flags, as_json: AsJson = False) -> None:
    """Print the cache folder's path."""
    settings = flags.settings()
    from .render import print_json

    if as_json:
        there = settings.cache_dir.is_dir()
        print_json({"path": str(settings.cache_dir), "exists": there, "from": str(settings.source("cache_dir"))})
    else:
        typer.echo(settings.cache_dir)


@app.command()
@command({"model": MODEL["model"]}, CACHE_DIR)
def ls(
    flags: Flags,
    everything: Annotated[
        bool, typer.Option("--all", help="List every entry, not only ends of conversations.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=0, help=f"How many; 0 for all ({SHOWN}; with --json all).", show_default=False),
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Show last words, where a tokenizer is found.")] = False,
    as_json: AsJson = False,
) -> None:
    """List conversations, the one used last first. --model shows those of one model only."""
    settings = flags.settings()
    from ..cache.catalogue import look
    from .render import print_json

    take_in_waiting(settings.cache_dir)
    most = limit if limit is not None else 0 if as_json else SHOWN
    with look(settings.cache_dir) as index:
        found = _listing(index, settings, flags["model"], everything, most, text) if index else None
    if as_json:
        print_json(found or {"total": 0, "entries": []})
    elif found is None:
        nothing_yet(settings.cache_dir)
    else:
        _print_listing(found, everything)


def _listing(
    index: Catalogue, settings: Settings, model: str | None, everything: bool, most: int, text: bool
) -> dict[str, Any]:
    from ..cache.catalogue import Forest
    from ..cache.inspect import describe
    from ..cache.keys import unpack

    forest, spaces = Forest(index.items()), index.spaces()
    names = {key: space.model for key, space in spaces.items()}
    wanted = choose_model(model, set(names.values()))
    items = list(forest.items.values()) if everything else forest.ends()
    items = [item for item in items if wanted is None or names.get(item.root) == wanted]
    items.sort(key=lambda item: (-item.used, -item.end, item.key))
    shown = []
    decoders: dict[str, Any] = {}
    for item in items[: most or None]:
        line = describe(item, forest, spaces)
        if text:
            name = line["model"]
            if name not in decoders:
                decoders[name] = decoder(name, settings)
                if decoders[name] is None:
                    warn(f"the tokenizer of {name or 'an unknown model'} is not found; name it with --model FOLDER.")
            entry = index.entry(item.key)
            line["text"] = decoders[name](unpack(entry.tokens)[-48:]) if entry and decoders[name] else None
        shown.append(line)
    return {"total": len(items), "entries": shown}


def _print_listing(found: dict[str, Any], everything: bool) -> None:
    from .render import printable

    what = ("entry", "entries") if everything else ("conversation", "conversations")
    by_model: dict[str, list[dict[str, Any]]] = {}
    for line in found["entries"]:
        by_model.setdefault(line["model"], []).append(line)
    for model, lines in by_model.items():
        typer.echo(printable(model) or "(unknown model)")
        typer.echo(f"  {'key':<12}  {'tokens':>9}  {'size':>8}  {'with all before':>15}  used")
        for line in lines:
            note = "" if line["resumable"] else "  (no place to resume from)"
            typer.echo(
                f"  {line['key'][:12]}  {line['tokens']:>9,}  {size(line['bytes']):>8}  "
                f"{size(line['chain_bytes']):>15}  {ago(line['used'])}{note}"
            )
            if line.get("text"):
                typer.echo(f"    …{printable(' '.join(line['text'].split()))[-100:]}")
    hidden = found["total"] - len(found["entries"])
    typer.echo(count(found["total"], *what) + (f", {hidden:,} not shown (--limit 0)" if hidden else ""))


@app.command()
@command(CACHE_DIR)
def info(flags: Flags, as_json: AsJson = False) -> None:
    """Describe the folder: sizes by kind, models with their numerics and layout, what does not belong there."""
    settings = flags.settings()
    from ..cache.catalogue import look
    from ..cache.inspect import report
    from .render import print_json

    take_in_waiting(settings.cache_dir)
    with look(settings.cache_dir) as index:
        found = report(settings.cache_dir, index)
    if as_json:
        print_json(found)
    else:
        _print_report(found)
        if not found["exists"]:
            nothing_yet(settings.cache_dir)


def _print_report(found: dict[str, Any]) -> None:
    from .render import printable

    def line(name: str, text: str) -> None:
        typer.echo(f"{name:<12} {text}")

    line("folder", f"{found['path']}{'' if found['exists'] else ' (made at first use)'}")
    line("size", f"{size(found['bytes'])}; {size(found['free_disk_bytes'])} free on this disk")
    line("last used", ago(found["used"]))
    for kind, part in found["records"].items():
        line(kind, f"{count(part['count'], 'record')}, {size(part['bytes'])}")
    line("index", size(found["index_bytes"]))
    line("notes", f"{size(found['notes_bytes'])} (imports, written today, weights)")
    for kind in ("temporaries", "quarantine", "foreign"):
        part = found[kind]
        left = f", {part['left_over']:,} left over by processes that ended" if part.get("left_over") else ""
        line(kind, f"{count(part['count'], 'file')}, {size(part['bytes'])}{left}")
    if found["rows_without_file"] or found["files_without_row"]:
        line("out of step", f"{found['rows_without_file']:,} rows without file, {found['files_without_row']:,} files")
        line("", "without row; the next run puts that right")
    for model in found["models"]:
        typer.echo("")
        typer.echo(printable(model["model"]) or "(unknown model)")
        typer.echo(f"  {_line(model)}; used {ago(model['used'])}")
        typer.echo(
            f"  weights {model['fingerprint'][:16]}, layout {model['layout'][:16]}, blocks of {model['block']:,}"
            + (f", rows in {model['store_bits']} bits" if model["store_bits"] else "")
        )
        compute = sorted(model["compute"].items())
        typer.echo("  " + printable(", ".join(f"{name} {value}" for name, value in compute)))
        for kind, tensors in model["tensors"].items():
            dtypes = sorted({t["dtype"] for t in tensors})
            typer.echo(f"  {kind}: {count(len(tensors), 'tensor')} {' '.join(dtypes)}")


app.command()(show)
app.command()(verify)
app.command()(prune)
app.command()(rm)
app.command()(explain)
app.command("import")(import_)
app.command()(upgrade)
