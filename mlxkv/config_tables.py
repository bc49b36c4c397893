"""Tables of the configuration file: models that can be served beside the one that was named, and their adapters."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .config_values import a_path, a_switch, a_text, seconds_or_never, words
from .errors import ConfigError


@dataclass(frozen=True)
class ModelTable:
    """A ``[models.NAME]`` table of the file: a model that can be served, beside ``model``. path: a folder or a Hugging
    Face id. adapter: a name of ``[adapters]``. pin: loaded at start, never unloaded. idle_ttl: seconds, None for the
    server's setting. options: settings of this model alone, checked like any others."""

    path: str
    aliases: tuple[str, ...] = ()
    adapter: str | None = None
    pin: bool = False
    idle_ttl: float | None = None
    ttl_set: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


#: settings that a [models.NAME] table may have for itself
MODEL_OPTIONS = ("dtype", "draft", "draft_model", "draft_depth", "ring_spare", "compile", "max_rows", "prefill_chunk")
MODEL_OPTIONS += ("split", "max_gap_ms", "store_bits", "memory_limit")


def model_tables(value: Any, keys: Mapping[str, tuple[Callable[[Any], Any], str]]) -> dict[str, ModelTable]:
    """``keys``: the parsers of settings. Raises ValueError, and ConfigError naming the line at fault."""
    if not isinstance(value, dict):
        raise ValueError
    made = {}
    for name, table in value.items():
        table = {"path": table} if isinstance(table, str) else table
        if not name or not isinstance(table, dict):
            raise ValueError
        fields = {key.replace("-", "_"): raw for key, raw in table.items()}
        own = ("path", "aliases", "adapter", "pin", "idle_ttl")
        options: dict[str, Any] = {}
        for key, raw in fields.items():
            try:
                if key in MODEL_OPTIONS:
                    options[key] = keys[key][0](raw)
                elif key not in own:
                    raise ValueError
            except (ValueError, TypeError, OverflowError):
                allowed = keys[key][1] if key in MODEL_OPTIONS else f"one of {', '.join(own + MODEL_OPTIONS)}"
                raise ConfigError(f"{key} of the model {name!r} is not valid.", f"It must be {allowed}.") from None
        made[name] = ModelTable(
            path=os.path.expanduser(a_text(fields.get("path"))),
            aliases=words(fields.get("aliases", ())),
            adapter=a_text(fields["adapter"]) if "adapter" in fields else None,
            pin=a_switch(fields.get("pin", False)),
            idle_ttl=seconds_or_never(fields["idle_ttl"]) if "idle_ttl" in fields else None,
            ttl_set="idle_ttl" in fields,
            options=options,
        )
    return made


def adapter_table(value: Any) -> dict[str, Path]:
    """Names and folders. Raises ValueError."""
    if not isinstance(value, dict) or not all(value):
        raise ValueError
    return {name: a_path(path) for name, path in value.items()}
