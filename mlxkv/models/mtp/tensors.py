"""Where a folder keeps its tensors: in the checkpoint's own files, or in a side file that somebody put beside them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import ModelError
from .. import folder

#: what ``mlxkv convert`` calls the file of a head: mlx-lm, which reads model*.safetensors, must not see it
SIDE_FILE = "mtp.safetensors"
#: keys in the metadata of such a file
VERSION_KEY, NORMS_KEY = "mlxkv_head", "norms"
VERSION = "1"
_CHECKPOINT = re.compile(r"model(\.safetensors)?(-\d+-of-\d+)?\.safetensors")


@dataclass(frozen=True)
class File:
    """One weight file. ``own``: written by ``mlxkv convert``, with ``norms`` "w" or "w-1"; ``checkpoint``: part of the
    checkpoint that the body comes from, by its index or, where there is none, by its name."""

    path: Path
    shapes: dict[str, list[int]]
    metadata: dict[str, str]
    checkpoint: bool

    @property
    def own(self) -> bool:
        return self.metadata.get(VERSION_KEY) == VERSION

    @property
    def norms(self) -> str | None:
        return self.metadata.get(NORMS_KEY) if self.own else None


@dataclass(frozen=True)
class Tensors:
    """The headers of all weight files of a folder; ``damaged`` are sentences on side files that cannot be read."""

    path: Path
    files: list[File]
    damaged: list[str] = field(default_factory=list)

    @staticmethod
    def of(path: Path) -> Tensors:
        """Read the headers, no tensor. Raises ModelError where a file of the body is damaged."""
        index = path / "model.safetensors.index.json"
        named: dict[str, Any] | None = None
        if index.is_file():
            named = folder.read_json(index).get("weight_map")
        listed = set(named.values()) if isinstance(named, dict) else None
        files, damaged = [], []
        for file in [*folder.weight_files(path), *folder.side_files(path)]:
            try:
                header = folder.read_header(file)
            except ModelError as error:
                if file.name.startswith("model"):
                    raise
                damaged.append(error.message)
                continue
            metadata = header.pop("__metadata__", None) or {}
            part = file.name in listed if listed is not None else bool(_CHECKPOINT.fullmatch(file.name))
            files.append(File(file, {n: e["shape"] for n, e in header.items()}, metadata, part))
        return Tensors(path, files, damaged)

    @cached_property
    def names(self) -> list[str]:
        return sorted({name for file in self.files for name in file.shapes})

    def source(self, names: list[str]) -> list[File]:
        """The files to take ``names`` from: one that says itself what it holds, else the checkpoint's own, else those
        beside it."""
        holding = [file for file in self.files if file.shapes.keys() & set(names)]
        for chosen in (lambda f: f.own, lambda f: f.checkpoint):
            if found := [file for file in holding if chosen(file)]:
                return found
        return holding

    @property
    def convolutions(self) -> list[list[int]]:
        """Shapes of the body's short convolutions."""
        return [s for f in self.files if f.checkpoint for n, s in f.shapes.items() if n.endswith("conv1d.weight")]


def read(files: list[File], names: set[str]) -> dict[str, mx.array]:
    """The named tensors of these files, not yet evaluated."""
    out: dict[str, mx.array] = {}
    for file in files:
        tensors: Any = mx.load(str(file.path))
        out |= {name: array for name, array in tensors.items() if name in names}
    return out
