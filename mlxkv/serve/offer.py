"""From settings to what a server offers: its registry of models, its limits, and who may ask."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import ConfigError
from .limits import Limits, Pings
from .registry import Entry, Registry, names_of
from .safety import Keys, Safety, own_names

if TYPE_CHECKING:
    from ..config import ModelTable, Settings

log = logging.getLogger("mlxkv.serve")

#: open files that a server asks the system for (a Mac gives 256 unless asked). mlx-lm, as it is imported, sets 2,048 of
#: at most 4,096; more than that cannot be had afterwards
OPEN_FILES = 4096
#: those of them that are no sockets: readers and writers of the store, its index, libraries
OTHER_FILES = 192


def raise_open_files() -> int:
    """Raise the limit of open files as far as that is allowed and useful; gives back what it is now. To be called again
    once mlx-lm was imported."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
        except (OSError, ValueError) as error:  # a Mac may refuse what it said it would allow
            log.warning("the limit of open files stays at %d: %s", soft, error)
    return OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def limits_of(settings: Settings, open_files: int) -> Limits:
    """``open_files``: how many the process may have; connections are kept well below that."""
    room = max(1, open_files - OTHER_FILES)
    if settings.max_connections > room and settings.source("max_connections").kind != "default":
        log.warning("%d connections at most: no more than %d files may be open", room, open_files)
    return Limits(
        max_body=settings.max_body,
        max_connections=min(settings.max_connections, room),
        timeout_s=settings.request_timeout,
        ping=cast(Pings, settings.ping),
        ping_s=settings.ping_interval,
        grace_s=settings.grace,
    )


def safety_of(settings: Settings) -> Safety:
    """Raises ConfigError."""
    hosts = own_names(settings.host, *settings.allow_hosts)
    return Safety(Keys(settings.api_keys()), hosts, frozenset(settings.cors_origins))


def registry_of(settings: Settings) -> Registry:
    """All models that these settings offer, the default first: the model that was named, those of ``[models]``, and
    what is found in ``models_dir`` and in the Hugging Face cache. Raises ConfigError."""
    entries = [_table(settings, name, table) for name, table in settings.models.items()]
    default = next((entry for entry in entries if entry.name == settings.model), None)
    if default is not None:
        entries.remove(default)
        entries.insert(0, default)
    elif settings.model is not None or not entries:
        entries.insert(0, _named(settings))
    taken = {name for entry in entries for name in (entry.name, *entry.aliases)}
    for name, source in _found(settings):
        if name in taken:
            continue
        last = name.rpartition("/")[2]
        aliases = (last,) if last not in taken | {name} else ()
        taken |= {name, *aliases}
        entries.append(Entry(name, source, aliases, ttl=settings.idle_ttl, options=_plain_options(settings)))
    return Registry(entries)


def _named(settings: Settings) -> Entry:
    source = settings.require_model()
    name, aliases = names_of(source)
    options = _engine_options(settings)
    adapter = settings.adapter if settings.adapter in settings.adapters else None
    if adapter is not None:
        options["adapter"] = settings.adapters[adapter]
    more = dict.fromkeys([*aliases, *settings.aliases])
    more.pop(name, None)
    return Entry(name, source, tuple(more), adapter, ttl=settings.idle_ttl, options=options)


def _table(settings: Settings, name: str, table: ModelTable) -> Entry:
    options = {**_plain_options(settings), **table.options}
    if options.get("draft_model"):
        options["draft_model"] = os.path.expanduser(options["draft_model"])
    elif options["draft"] == "model":
        options["draft"] = "auto"
    if table.adapter is not None:
        if table.adapter not in settings.adapters:
            known = ", ".join(settings.adapters) or "none"
            raise ConfigError(
                f"The model {name!r} names the adapter {table.adapter!r}, which is not registered.",
                f"Add it to [adapters]; there is {known}.",
            )
        options["adapter"] = settings.adapters[table.adapter]
    ttl = table.idle_ttl if table.ttl_set else settings.idle_ttl
    return Entry(name, table.path, table.aliases, table.adapter, table.pin, ttl, options)


def _plain_options(settings: Settings) -> dict[str, Any]:
    """Engine options without those that belong to the model that was named."""
    return _engine_options(settings) | {"adapter": None, "draft_model": None}


def _engine_options(settings: Settings) -> dict[str, Any]:
    """What an engine is made with that has a queue of a server in front of it."""
    return settings.engine_options() | {"max_queue": settings.max_queue}


def _found(settings: Settings) -> Iterator[tuple[str, str]]:
    """(name, source) of model folders in ``models_dir``, one or two levels deep, and of complete models in the Hugging
    Face cache."""
    for folder in settings.models_dir:
        if not folder.is_dir():
            raise ConfigError(f"models_dir names {folder}, which is no folder.", "Correct it, or create the folder.")
        for path in _folders(folder):
            if _is_model(path):
                yield path.name, str(path)
            else:
                yield from ((f"{path.name}/{inner.name}", str(inner)) for inner in _folders(path) if _is_model(inner))
    if settings.hf_models:
        from huggingface_hub.constants import HF_HUB_CACHE

        for path in _folders(Path(HF_HUB_CACHE)):
            if path.name.startswith("models--") and any(map(_is_model, _folders(path / "snapshots"))):
                name = path.name.removeprefix("models--").replace("--", "/", 1)
                yield name, name


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.is_dir())
    except OSError:
        return []


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("model*.safetensors"))
