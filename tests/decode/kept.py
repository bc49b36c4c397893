"""Two cache folders side by side: what both keep under one key must be the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mlxkv.cache.record import Meta, Reader
from tests.cache.stores import records

#: (key, record kind) -> what the record says of itself, and its tensors by name
Kept = dict[tuple[bytes, str], tuple[Meta, dict[str, np.ndarray]]]


def kept(folder: Path) -> Kept:
    out: Kept = {}
    for path in records(folder):
        with Reader.open(path) as reader:
            arrays = {name: reader.read(name) for name in reader.tensors}
            out[reader.meta.key, reader.meta.kind] = reader.meta, arrays
    return out


@dataclass
class Comparison:
    """``both``: records that are in both folders, ``either``: in one of them at least; ``worst``: the largest
    difference, relative to the largest value of its tensor."""

    both: int = 0
    either: int = 0
    worst: float = 0.0
    wrong: list[str] = field(default_factory=list)


def compare(a: Kept, b: Kept, bound: float = 0.0) -> Comparison:
    """Rows may begin at another place, where another leaf had been stored before: those that both hold are compared.
    ``bound``: what ``worst`` may be; 0.0: bits."""
    found = Comparison(len(a.keys() & b.keys()), len(a.keys() | b.keys()))
    for key in a.keys() & b.keys():
        (meta, mine), (other, theirs) = a[key], b[key]
        where = f"{meta.kind} of [{meta.start}, {meta.end})"
        if (meta.start, meta.end, meta.tokens, meta.parent) != (other.start, other.end, other.tokens, other.parent):
            found.wrong.append(f"{where} is another place in the other folder")
        elif mine.keys() != theirs.keys():
            found.wrong.append(f"{where}: {sorted(mine)}, {sorted(theirs)}")
        else:
            for name in mine:
                x, y = mine[name], theirs[name]
                if meta.kind != "state":  # both end at the same place, wherever they begin
                    n = min(x.shape[2], y.shape[2])
                    x, y = x[:, :, x.shape[2] - n :], y[:, :, y.shape[2] - n :]
                off = difference(x, y)
                found.worst = max(found.worst, off)
                if off > bound:
                    found.wrong.append(f"{where}: {name} differs by {off:.1e}")
    return found


def difference(x: np.ndarray, y: np.ndarray) -> float:
    """Relative to the largest value; infinity where bits differ that are no floating numbers, or shapes do."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return float("inf")
    if x.dtype.kind != "f":
        return 0.0 if np.array_equal(x, y) else float("inf")
    if not x.size:
        return 0.0
    return float(np.abs(x - y).max()) / max(float(np.abs(y).max()), 1e-30)
