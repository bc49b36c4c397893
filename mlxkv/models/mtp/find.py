"""Find the head of a model folder, and say why it cannot be used."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from .deepseek import DeepSeek
from .head import Head
from .layout import Layout, Misfit, fit
from .mimo import MiMo
from .norms import shifted
from .qwen import Qwen
from .tensors import File, Tensors, read

LAYOUTS: tuple[Layout, ...] = (Qwen(), DeepSeek(), MiMo())
#: what heads of other families are called in mlx-lm's architectures, which all drop them: by a name of their own, or
#: as layers behind the body's, of which one brings a projection
_NAMED = re.compile(r"(.*\.)?(mtp|mtp_[a-z_]+)\..+")
_LAYER = re.compile(r"(.*\.)?layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Found:
    """What a folder says of a head. ``shifted``: norms are stored as w − 1. ``reason``: why it is not used, or ''."""

    names: tuple[str, ...]
    shifted: bool
    reason: str
    family: str = ""
    n_layers: int = 0
    #: drafts in a row at most; None: any number
    most_drafts: int | None = None
    files: tuple[Path, ...] = ()

    @property
    def usable(self) -> bool:
        return bool(self.names) and not self.reason


@dataclass(frozen=True)
class Opened:
    """A head whose tensors are known and fit, none of them evaluated. ``weights`` by its parameters' names, norms as
    they are stored."""

    head: Head
    weights: dict[str, mx.array]
    shifted: bool
    files: list[File]
    layout: Layout
    config: dict[str, Any]


def find(path: Path, config: dict[str, Any]) -> Found:
    """Look for a head in a folder, as far as headers of files show; reads no tensor. Raises ModelError."""
    return open_head(path, config)[0]


def open_head(path: Path, config: dict[str, Any]) -> tuple[Found, Opened | None]:
    """What is there, and the head itself where it can be used. Raises ModelError."""
    tensors = Tensors.of(path)
    for layout in LAYOUTS:
        if names := layout.names(tensors.names, config):
            return _opened(tensors, layout, names, config)
    if names := _others(tensors.names, config):
        why = f"heads of {config.get('model_type')} are not supported: their layout is not known here"
        return Found(tuple(names), False, why), None
    return Found((), False, " ".join(tensors.damaged)), None


def _opened(tensors: Tensors, layout: Layout, names: list[str], config: dict[str, Any]) -> tuple[Found, Opened | None]:
    files = tensors.source(names)
    held = {name for file in files for name in file.shapes} & set(names)
    paths = tuple(file.path for file in files)
    try:
        moved = shifted(tensors, files) if layout.shifts else False
        local = {layout.local(name, config): array for name, array in read(files, held).items()}
        head, weights = layout.build(config, local)
        fit(head, weights)
    except Misfit as error:
        return Found(tuple(sorted(held)), False, str(error), files=paths), None
    except Exception as error:  # configs and tensors of strangers fail in every way there is
        why = f"it cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return Found(tuple(sorted(held)), False, why, files=paths), None
    found = Found(tuple(sorted(held)), moved, "", head.family, head.n_layers, head.most_drafts, paths)
    return found, Opened(head, weights, moved, files, layout, config)


def _others(names: list[str], config: dict[str, Any]) -> list[str]:
    """Names of a head in no known layout."""
    text = config.get("text_config") or config
    layers = text.get("num_hidden_layers") or text.get("num_layers")
    named = [name for name in names if _NAMED.fullmatch(name)]
    if named or not isinstance(layers, int):
        return named
    behind = [name for name in names if (m := _LAYER.fullmatch(name)) and int(m[2]) >= layers]
    return behind if any("eh_proj." in name for name in behind) else []
