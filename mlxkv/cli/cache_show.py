"""``mlxkv cache show``: one entry, and whether a request could go on from it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .cache_text import ago, decoder, size, take_in_waiting
from .options import CACHE_DIR, MODEL, AsJson, Flags, command


@command({"model": MODEL["model"]}, CACHE_DIR)
def show(
    flags: Flags,
    key: Annotated[str, typer.Argument(help="A key, or the beginning of one.")],
    as_json: AsJson = False,
) -> None:
    """Show one entry: its tokens and tensors, what it hangs on and what hangs on it. --model names a tokenizer."""
    settings = flags.settings()
    from ..cache.catalogue import find, look
    from ..cache.folder import CacheFolder
    from ..cache.inspect import examine
    from .render import print_json

    take_in_waiting(settings.cache_dir)
    with look(settings.cache_dir) as index:
        wanted = find(settings.cache_dir, index, key)
        assert index is not None
        found = examine(CacheFolder(settings.cache_dir), index, wanted)
    decode = decoder(found["model"], settings)
    found["text"] = decode(found["token_ids"]) if decode else None
    if as_json:
        print_json(found)
    else:
        _print(found)


def _print(found: dict[str, Any]) -> None:
    from ..cache.lookup import REASONS
    from .render import printable

    def line(name: str, text: str) -> None:
        typer.echo(f"{name:<10} {printable(text)}")

    line("key", found["key"])
    line("model", f"{found['model']}  (weights {(found['fingerprint'] or '')[:16]})")
    line("tokens", f"{found['start']:,} to {found['tokens']:,}, rows from {found['row_start']:,}")
    line("used", ago(found["used"]))
    line("parent", found["parent"] or "none: it begins the prompt")
    if found["base"]:
        line("base", f"{found['base']} has the rows before {found['row_start']:,}")
    line("chain", f"{len(found['chain']):,} entries, {size(found['chain_bytes'])}")
    for link in found["hanging"]:
        line("hanging", f"{link['key'][:16]}  {link['start']:,} to {link['end']:,} ({link['as']})")
    for start in found["answers_from"]:
        line("answer", f"from {start:,} to {found['tokens']:,}")
    if found["resumable"]:
        line("restore", f"can stand here, at token {found['tokens']:,} (if its records are whole: mlxkv cache verify)")
    else:
        line("restore", f"cannot stand here: {REASONS[found['reason']]} ({found['why']})")
    for record in found["records"]:
        line(record["kind"], f"{size(record['bytes'])}  {record['file']}")
        if record["problem"]:
            line("", record["problem"])
        for t in record["tensors"]:
            line("", f"{t['name']:<20} {t['dtype']:<5} {'×'.join(map(str, t['shape']))}")
    line("ids", " ".join(map(str, found["token_ids"])))
    if found["text"] is None:
        line("text", "the model's tokenizer is not found; name it with --model")
    else:
        typer.echo("text")
        typer.echo(printable(found["text"]))
