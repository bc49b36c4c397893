"""What the ``mlxkv cache`` commands share: sizes and times for people, progress, questions, the text of tokens."""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import EMBEDDED
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..config import Settings

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")]

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def size(n: float) -> str:
    """Bytes for people: ``1.5 GB`` (powers of ten, as disks are sold)."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def count(n: int, one: str, many: str = "") -> str:
    """``1 entry``, ``1,204 entries``."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def ago(when: str | None) -> str:
    """How long ago a moment (ISO 8601) was: ``5 min ago``."""
    if when is None:
        return "never"
    seconds = (datetime.now(UTC) - datetime.fromisoformat(when)).total_seconds()
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now" if seconds < 60 else "1 min ago"


def parse_duration(text: str) -> float:
    """Seconds from ``90s``, ``12h``, ``30d``, ``1.5w``. Raises ConfigError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*", text.lower())
    if not found:
        raise ConfigError(f"--older-than is {text!r}.", "It must be a number with s, m, h, d or w: 12h, 30d.")
    return float(found[1]) * _SECONDS[found[2]]


def nothing_yet(path: Path) -> None:
    """Say on stderr that there is no store."""
    what = "holds nothing that mlxkv stored" if path.is_dir() else "does not exist yet"
    typer.echo(f"The cache folder {path} {what}; it is filled at the first run.", err=True)


def ask(question: str, yes: bool) -> bool:
    """Whether to remove: asked on stderr, answered on stdin. Raises ConfigError where nobody answers."""
    if yes:
        return True
    answer = answered(question)
    if answer is None:
        raise ConfigError("Nobody answered, so nothing was removed.", "Give --yes to remove without a question.")
    return answer


def answered(question: str) -> bool | None:
    """What is answered on stdin to a question on stderr; None where its end comes first."""
    typer.echo(f"{question} [y/N]: ", err=True, nl=False)
    answer = sys.stdin.readline()
    if not answer:
        typer.echo("", err=True)
        return None
    return answer.strip().lower() in ("y", "yes")


@contextmanager
def progress(what: str, as_bytes: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, where that is a terminal, for work that tells (done, of how many) between its steps.

    Ctrl-C is heard between two steps, where stopping leaves nothing half done: KeyboardInterrupt. A second one stops
    at once.
    """
    stop = threading.Event()

    def heard(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, heard) if main else None
    bar: Any = None
    try:
        bar = _bar(what, as_bytes) if sys.stderr.isatty() else None

        def tell(done: int, total: int) -> None:
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done, total=max(total, 1))
            if stop.is_set():
                raise KeyboardInterrupt

        yield tell
    finally:
        if bar is not None:
            bar.stop()
        if main:
            signal.signal(signal.SIGINT, before)


def _bar(what: str, as_bytes: bool) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn() if as_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(what, total=None)
    bar.start()
    return bar


def take_in_waiting(path: Path) -> None:
    """For commands that need the whole picture: have all records of a folder in its index, with a bar if that takes
    long."""
    from ..cache.catalogue import complete

    complete(path, lambda: progress("taking records into the index"))


def choose_model(wanted: str | None, known: set[str]) -> str | None:
    """The stored model that ``wanted`` names: by its name or by the path of its folder. Raises ConfigError."""
    if wanted is None:
        return None
    for name in (wanted, Path(wanted).name):
        if name in known:
            return name
    alike = [name for name in known if name.lower() == wanted.lower()]
    if len(alike) == 1:
        return alike[0]
    raise ConfigError(
        f"Nothing is stored for a model {wanted!r}.", f"Stored are: {', '.join(sorted(known)) or 'none at all'}."
    )


def decoder(model: str, settings: Settings) -> Callable[[list[int]], str] | None:
    """What turns ids of a stored model into text, if its tokenizer is on this machine: in the folder that ``--model``
    or the settings name, in the package, in a checkout's ``models/``, or in the Hugging Face cache."""
    places: list[Path] = []
    if settings.model is not None:
        folder = Path(settings.model).expanduser()
        if settings.source("model").kind == "flag" or model in (folder.name, settings.model):
            places.append(folder / "tokenizer.json")
        model = settings.model if settings.source("model").kind == "flag" else model
    if Path(model).name == EMBEDDED.name:
        places.append(EMBEDDED / "tokenizer.json")
    places.append(Path(__file__).resolve().parents[2] / "models" / Path(model).name / "tokenizer.json")
    place = next((place for place in places if place.is_file()), None) or _in_hub_cache(model)
    if place is None:
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(place))
    except Exception:  # what its parser raises has no class of its own
        return None
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def _in_hub_cache(model: str) -> Path | None:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "tokenizer.json")
    except (HFValidationError, OSError):
        return None
    return Path(found) if isinstance(found, str) else None
