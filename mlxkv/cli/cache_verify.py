"""``mlxkv cache verify``: read every record, and say what is damaged."""

from __future__ import annotations

from typing import Annotated

import typer

from .cache_text import count, nothing_yet, progress, size, take_in_waiting
from .options import CACHE_DIR, AsJson, Flags, command


@command(CACHE_DIR)
def verify(
    flags: Flags,
    repair: Annotated[
        bool, typer.Option("--repair", help="Quarantine or delete what is damaged; put the index right.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read every record: headers, keys, tokens and checksums. Ends with 1 if something was found."""
    settings = flags.settings()
    from ..cache.verify import ACTIONS
    from ..cache.verify import verify as check
    from .render import print_json

    path = settings.cache_dir
    take_in_waiting(path)
    with progress("reading records", as_bytes=True) as tell:
        found = check(path, repair=repair, progress=tell)
    if repair:
        take_in_waiting(path)  # of an index that was built again
    if as_json:
        print_json(
            {
                "path": str(path),
                "records": found.records,
                "bytes": found.bytes,
                "unreachable": found.unreachable,
                "newer": found.newer,
                "findings": [finding.to_json() for finding in found.findings],
                "repaired": sum(finding.done for finding in found.findings),
            }
        )
    else:
        for finding in found.findings:
            would, did = ACTIONS[finding.action]
            done = did if finding.done else f"--repair {would}" if not repair else "left"
            typer.echo(f"{finding.file}: {finding.reason}: {finding.problem} ({done})")
        if not found.findings and not found.records:
            nothing_yet(path)
        typer.echo(f"{count(found.records, 'record')} whole ({size(found.bytes)}), {len(found.findings):,} found")
        if found.unreachable:
            typer.echo(
                f"{count(found.unreachable, 'entry', 'entries')} cannot be used until what is before them is read"
            )
        if found.newer:
            typer.echo(f"{count(found.newer, 'record')} of a later version of mlxkv: left as they are")
    if found.findings:
        raise typer.Exit(1)
