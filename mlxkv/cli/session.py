"""Chat sessions on disk: one JSON file each, written whole or not at all, readable by their owner alone.

A file holds ``version, id, model, created, updated, messages``; an assistant message carries ``token_ids``, so that a
resumed chat goes on from the very ids that were sampled (the engine uses them only where they decode to the text).
Sessions are the user's data, not cache: a damaged file is moved to ``damaged/`` beside it and named, never deleted.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..config import data_dir
from ..errors import MlxkvError
from ..messages import normalise

VERSION = 1


class SessionError(MlxkvError):
    """A session that is not there, cannot be read or cannot be written."""

    exit_code = 2
    code = "session_error"


@dataclass
class Session:
    """One conversation. ``model`` is the folder of the model it was last held with."""

    model: str
    id: str = ""
    created: str = ""
    updated: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    _written: tuple[int, int] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.created = self.created or _now()
        self.id = self.id or new_id()

    @property
    def path(self) -> Path:
        return folder() / f"{self.id}.json"

    @property
    def title(self) -> str:
        """The first question, on one line."""
        first = next((m["content"] for m in self.messages if m["role"] == "user"), "")
        return " ".join(first.split())

    @property
    def turns(self) -> int:
        return sum(m["role"] == "assistant" for m in self.messages)

    def save(self) -> bool:
        """Write atomically, durable, 0600. False if another process changed the file: then it gets a new id.

        Raises SessionError naming the file.
        """
        mine = _stamp(self.path) == self._written
        if not mine:
            self.id = new_id()
        self.updated = _now()
        saved = {"version": VERSION, "id": self.id, "model": self.model}
        saved |= {"created": self.created, "updated": self.updated, "messages": self.messages}
        try:
            write_private(self.path, json.dumps(saved, ensure_ascii=False, indent=1).encode("utf-8", "replace"))
        except OSError as error:
            raise SessionError(
                f"The session cannot be saved to {self.path}: {error.strerror}.", "The chat itself goes on."
            ) from None
        self._written = _stamp(self.path)
        return mine


def folder() -> Path:
    """Where sessions are; it need not exist."""
    return data_dir() / "sessions"


def new_id() -> str:
    """Sorts by time of creation."""
    return datetime.now().strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)


def load(path: Path) -> Session:
    """Read one session. Raises SessionError; a damaged file has then been moved aside."""
    try:
        stamp = _stamp(path)
        data = path.read_bytes()
    except OSError as error:
        raise SessionError(f"The session {path} cannot be read: {error.strerror}.") from None
    try:
        saved = json.loads(data)
        if saved["version"] != VERSION:
            raise SessionError(
                f"The session {path} has version {saved['version']!r}, and this mlxkv knows {VERSION}.",
                "It is left as it is; a newer mlxkv may have written it.",
            )
        texts = {key: saved[key] for key in ("model", "created", "updated")}
        if not all(isinstance(value, str) for value in texts.values()) or saved["id"] != path.stem:
            raise ValueError("its fields do not fit together")
        messages = normalise(saved["messages"], token_ids=True) if saved["messages"] else []
    except SessionError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError, MlxkvError) as error:
        aside = _move_aside(path)
        raise SessionError(f"The session {path} is damaged ({error}); it was kept as {aside}.") from None
    return Session(id=path.stem, messages=messages, _written=stamp, **texts)


def paths() -> list[Path]:
    """Session files, the one last changed first."""
    try:
        found = [(entry.stat().st_mtime_ns, Path(entry.path)) for entry in os.scandir(folder()) if _is_session(entry)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SessionError(f"{folder()} cannot be read: {error.strerror}.") from None
    return [path for _, path in sorted(found, reverse=True)]


def find(wanted: str) -> Session:
    """The session whose id is, or alone begins with, ``wanted``. Raises SessionError."""
    fits = [path for path in paths() if path.stem.startswith(wanted)]
    exact = [path for path in fits if path.stem == wanted]
    if len(exact or fits) != 1:
        what = f"{len(fits)} sessions begin" if fits else "No session begins"
        raise SessionError(f"{what} with {wanted!r}.", "See them with: mlxkv chat --list")
    return load((exact or fits)[0])


def write_private(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, 0600, in a folder that is made 0700. Raises OSError."""
    make_private_folder(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")  # made 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def make_private_folder(path: Path) -> None:
    """Make the folder, 0700; parents that do not exist yet too."""
    for part in [*reversed(path.parents), path]:
        if not part.is_dir():
            part.mkdir(mode=0o700, exist_ok=True)


def _is_session(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(".json") and not entry.name.startswith(".") and entry.is_file()


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _move_aside(path: Path) -> Path:
    aside = path.parent / "damaged" / f"{path.stem}-{secrets.token_hex(2)}.json"
    try:
        make_private_folder(aside.parent)
        os.replace(path, aside)
    except OSError:
        return path
    return aside


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
