"""The names that requests may use for models: made of settings at start and at a reload, and looked up, never opened.

What a request says is only ever compared with these names: no path that it sends reaches the file system.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ModelError


@dataclass(frozen=True)
class Entry:
    """One model that can be served.

    name: what ``/v1/models`` calls it. source: a folder or a Hugging Face id, from the settings. aliases: other names
    for it. adapter: the registered name of its adapter, if it has one. pinned: loaded at start, and never unloaded for
    another. ttl: seconds without a request after which it is unloaded; None for never. options: keyword arguments of
    the engine.
    """

    name: str
    source: str
    aliases: tuple[str, ...] = ()
    adapter: str | None = None
    pinned: bool = False
    ttl: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def same_engine(self, other: Entry) -> bool:
        """Whether an engine that was made for ``other`` serves this entry too."""
        return self.source == other.source and dict(self.options) == dict(other.options)


class Registry:
    """All entries, by name and alias. The first entry is the default. Raises ConfigError for a name given twice."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(entries)
        self._names: dict[str, Entry] = {}
        for entry in self.entries:
            if entry.name in self._names:
                raise ConfigError(f"Two models are called {entry.name!r}.", "Give one of them another name.")
            self._names[entry.name] = entry
        for entry in self.entries:
            for alias in entry.aliases:
                if self._names.setdefault(alias, entry) is not entry:
                    raise ConfigError(
                        f"{alias!r} names both {self._names[alias].name} and {entry.name}.", "Give one another alias."
                    )

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __getitem__(self, name: str) -> Entry:
        """The entry of a name or an alias. Raises ModelError."""
        found = self._names.get(name)
        if found is None:
            known = ", ".join(entry.name for entry in self.entries[:8]) + (", …" if len(self.entries) > 8 else "")
            raise ModelError(f"There is no model {name[:200]!r} here.", f"This server has {known}.")
        return found

    def __contains__(self, name: str) -> bool:
        return name in self._names


def names_of(source: str) -> tuple[str, tuple[str, ...]]:
    """The name that a folder or a Hugging Face id goes by, and its aliases: the whole path, and the last part of an id.

    The same name as ``EngineInfo.name``, without loading anything.
    """
    path = Path(source).expanduser()
    if path.exists():
        folder = path.resolve()
        return folder.name, (str(folder),)
    last = source.rpartition("/")[2]
    return source, ((last,) if last and last != source else ())
