"""``mlxkv cache import``: take over what another tool has stored."""

from __future__ import annotations

import os
import sqlite3
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, MlxkvError
from .cache_text import Yes, answered, ask, count, progress, size
from .options import ENGINE, MODEL, SYSTEM, AsJson, Flags, Messages, PromptTokens, Raw, command, warn

if TYPE_CHECKING:
    from ..cache.legacy.importing import Report
    from ..config import Settings
    from ..decode.legacy import Asked, Opened
    from ..decode.options import EngineInfo, Options


@command(MODEL, SYSTEM, ENGINE)
def import_(
    flags: Flags,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A cache folder of oMLX, or mlx-lm prompt caches.")],
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="TEXT", help="The prompt they were made from.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", metavar="FILE", help="The same, from a file.", show_default=False)
    ] = None,
    messages: Messages = None,
    prompt_tokens: PromptTokens = None,
    raw: Raw = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read everything, say what would be imported, and store nothing.")
    ] = False,
    assume_same_weights: Annotated[
        bool,
        typer.Option(
            "--assume-same-weights",
            help="Vouch that these files were made by this model's present weights, in the dtype in which it runs. "
            "Remembered for the folder.",
        ),
    ] = False,
    source_model: Annotated[
        str | None,
        typer.Option(
            "--source-model",
            metavar="NAME",
            help="The name or path under which the other tool had the model.",
            show_default=False,
        ),
    ] = None,
    trust_prompt: Annotated[
        bool, typer.Option("--trust-prompt", help="Believe the prompt where nothing in a file can prove it.")
    ] = False,
    remove_imported: Annotated[
        bool, typer.Option("--remove-imported", help="Then remove the files of which everything useful is imported.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Take over what oMLX or mlx-lm stored. Its files stay as they are, unless --remove-imported."""
    from ..cache.legacy.recognise import KINDS, recognise
    from .start import quiet_libraries

    settings = flags.settings()
    given = _prompt(settings, prompt, prompt_file, messages, prompt_tokens, raw)
    path = Path(os.path.abspath(path.expanduser()))
    kind = recognise(path)
    model = settings.require_model()
    options = _options(settings, model)
    if not as_json:
        typer.echo(f"{path}: {KINDS[kind]}", err=True)
    quiet_libraries()

    from ..cache.legacy.journal import NoRoom
    from ..decode.legacy import Asked
    from ..decode.request import Request

    request = Request(**given) if given is not None else None
    asked = Asked(path, kind, request, assume_same_weights, trust_prompt, source_model)
    try:
        if dry_run:
            found = _look(settings, options, asked)
        else:
            found = _carry_out(settings, options, asked, remove_imported, yes)
    except NoRoom as error:
        raise ConfigError(f"Nothing can be imported: {error}.", "Raise --cache-budget.") from None
    except (OSError, sqlite3.Error) as error:
        raise MlxkvError(f"The import of {path} ended: {error}.", "What was imported stays; run it again.") from error
    _show(path, kind, dry_run, found, as_json)
    if found.unanswered is not None:
        raise found.unanswered
    report = found.report
    if report.unstored.files or (report.files and not (report.imported.files or report.already.files)):
        raise typer.Exit(1)


def _prompt(
    settings: Settings,
    prompt: str | None,
    prompt_file: Path | None,
    messages: str | None,
    prompt_tokens: str | None,
    raw: bool,
) -> dict[str, Any] | None:
    """The prompt that was given, as ``run`` takes one; None if there is none. Raises ConfigError, RequestError."""
    from .run import read_request, read_text

    if prompt_file is not None:
        if prompt is not None:
            raise ConfigError("--prompt and --prompt-file were given together.", "Keep one of them.")
        prompt = read_text(str(prompt_file), "--prompt-file")
    if prompt is None and messages is None and prompt_tokens is None:
        if raw:
            raise ConfigError("--raw was given without a prompt.", "It goes with --prompt or --prompt-file.")
        return None
    return read_request(settings, prompt, messages, prompt_tokens, raw)


def _options(settings: Settings, model: str) -> Options:
    from ..decode.options import Options

    options = settings.engine_options()
    if not options.pop("cache"):
        raise ConfigError("With --no-cache there is nothing to import into.", "Leave it away.")
    return Options(model=model, **options)


class _Done:
    """A report, the model's name, and what was removed: (files, bytes), and how many files stayed after all.
    ``in_part``: how many of them because of what the store has. ``unanswered``: nobody said whether to remove any."""

    def __init__(self, report: Report, model: str) -> None:
        self.report, self.model = report, model
        self.removed, self.removed_bytes, self.kept, self.in_part = 0, 0, 0, 0
        self.unanswered: ConfigError | None = None


def _daily(settings: Settings) -> int:
    from ..cache.policy import Policy

    return Policy().daily if settings.write_budget is None else settings.write_budget


def _look(settings: Settings, options: Options, asked: Asked) -> _Done:
    from ..cache.catalogue import holds_something
    from ..cache.legacy.importing import Importer
    from ..decode.legacy import looked_at

    stored = holds_something(settings.cache_dir)
    with looked_at(options, asked, stored=stored) as o, progress("reading", as_bytes=True) as tell:
        importer = Importer(o.store, o.journal, o.source, asked.path, daily=_daily(settings), progress=tell)
        return _Done(importer.run(dry_run=True), o.info.name)


def _carry_out(settings: Settings, options: Options, asked: Asked, remove_imported: bool, yes: bool) -> _Done:
    from ..cache.legacy.importing import Importer
    from ..decode.legacy import opened

    with opened(options, asked, vouch=lambda info: _vouch(asked.path, info)) as o:
        with progress("importing", as_bytes=True) as tell:
            importer = Importer(o.store, o.journal, o.source, asked.path, daily=_daily(settings), progress=tell)
            done = _Done(importer.run(), o.info.name)
        if remove_imported:
            _remove(o, asked.path, importer, done, yes)
        return done


def _vouch(path: Path, info: EngineInfo) -> bool:
    """On a terminal, whether the user vouches for the files."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    question = f"Were the files in {path} made by the present weights of {info.name}, run in {info.dtype}?"
    return bool(answered(f"They cannot say it themselves, and wrong ones would give wrong answers. {question}"))


def _remove(o: Opened, path: Path, importer: Any, done: _Done, yes: bool) -> None:
    from ..cache.legacy.removal import removable, remove

    with progress("comparing before removal") as tell:
        files = removable(o.store, o.journal, path, importer.wanted, tell)
    total = sum(file.signature.size for file in files)
    done.in_part = len(importer.wanted) - len(files)
    try:
        if not files or not ask(f"Remove {count(len(files), 'file')} ({size(total)}) that are imported whole?", yes):
            done.kept = len(importer.wanted)
            return
    except ConfigError as error:  # told after what was imported
        done.kept, done.unanswered = len(importer.wanted), error
        return
    gone = remove(o.journal, path, files)
    done.removed, done.removed_bytes = len(gone), sum(file.signature.size for file in gone)
    done.kept = len(importer.wanted) - len(gone)


def _show(path: Path, kind: str, dry_run: bool, done: _Done, as_json: bool) -> None:
    from ..cache.legacy.reasons import REASONS
    from .render import print_json, printable

    report = done.report
    if as_json:
        print_json(
            {
                "path": str(path),
                "kind": kind,
                "model": done.model,
                "dry_run": dry_run,
                "files": report.files,
                "imported": {"files": report.imported.files, "bytes": report.imported.bytes},
                "already": {"files": report.already.files, "bytes": report.already.bytes},
                "unstored": {"files": report.unstored.files, "bytes": report.unstored.bytes, "why": report.why},
                "refused": {
                    code: {
                        "files": part.files,
                        "bytes": part.bytes,
                        "meaning": REASONS[code],
                        "examples": [{"file": name, "detail": detail} for name, detail in part.examples],
                    }
                    for code, part in sorted(report.refused.items())
                },
                "proven": [{"file": name, "how": how} for name, how in report.proven],
                "records": report.records,
                "record_bytes": report.new_bytes,
                "frees": report.frees,
                "removed": {"files": done.removed, "bytes": done.removed_bytes, "kept": done.kept},
            }
        )
        return
    would = "would be imported" if dry_run else "imported"
    made = f"{count(report.records, 'record')} of {size(report.new_bytes)}"
    typer.echo(f"{count(report.imported.files, 'file')} ({size(report.imported.bytes)}) {would}, as {made}")
    for name, how in report.proven:
        typer.echo(f"  {printable(name)}: {printable(how)}")
    if report.already.files:
        typer.echo(f"{count(report.already.files, 'file')} ({size(report.already.bytes)}) imported before")
    for code, part in sorted(report.refused.items()):
        typer.echo(f"{count(part.files, 'file')} ({size(part.bytes)}) refused: {code}: {REASONS[code]}")
        for name, detail in part.examples:
            typer.echo(f"  {printable(name)}{'' if detail == REASONS[code] else ': ' + printable(detail)}")
    if report.unstored.files:
        typer.echo(f"{count(report.unstored.files, 'file')} ({size(report.unstored.bytes)}) could not be stored")
    for why in report.why:
        warn(f"the import is not complete: {why}.")
    if done.removed or done.kept:
        typer.echo(f"{count(done.removed, 'file')} ({size(done.removed_bytes)}) removed, {done.kept:,} kept")
        if done.in_part:
            why = "they changed, or the store has not all any more that was made of them (a state, for instance)"
            typer.echo(f"{count(done.in_part, 'file')} of those kept cannot be removed here: {why}.")
    elif report.imported.files or report.already.files:
        verb = "frees" if report.frees >= 0 else "needs"
        typer.echo(f"Removing the imported files (--remove-imported) {verb} {size(abs(report.frees))} in all.")
    if "NO_CONSENT" in report.refused:
        typer.echo("If you know that this model's present weights made these files: --assume-same-weights")
    if "NO_TOKENS" in report.refused and kind == "omlx":
        typer.echo("A prompt makes them known: --prompt, --prompt-file, --messages or --prompt-tokens.")
        typer.echo(f"Without one, a run looks there for its own: mlxkv run --legacy-dirs {printable(str(path))} …")
    if "MODEL" in report.refused:
        typer.echo("If that is this model under another name or path: --source-model NAME")
    if not report.files:
        typer.echo("Nothing there is a file that could be imported.")
