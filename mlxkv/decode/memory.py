"""The memory of one engine: what its weights, live caches and RAM tier may take together, and who gives way.

The RAM tier does: a request whose caches need the room takes it for as long as it runs. Groups that wait for the writer
are held in the RAM tier, pinned, and counted there. What a forward needs besides, and other programs, are not counted:
the limit leaves room for them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..cache.layout import Layout
from ..cache.ram import Ram


def physical() -> int:
    """Bytes of memory in this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def recommended() -> int:
    """Bytes that an engine may take on this machine: on a Mac the working set that Metal recommends, else three
    quarters of memory."""
    if mx.metal.is_available():
        return int(mx.device_info().get("max_recommended_working_set_size", 0)) or physical() * 3 // 4
    return physical() * 3 // 4


def weigh(*models: nn.Module) -> int:
    """Bytes of their parameters; those that several have count once."""
    pairs: Any = tree_flatten([model.parameters() for model in models])
    arrays = {id(array): array for _, array in pairs}
    return sum(array.nbytes for array in arrays.values())


def live_bytes(layout: Layout, rows: int) -> int:
    """Bytes of the caches of a sequence that has room for ``rows`` rows."""
    return sum(
        t.nbytes(rows if m.window is None else min(rows, m.keep + m.window)) for m in layout.members for t in m.tensors
    )


@dataclass(frozen=True)
class Memory:
    """``limit``: bytes for all that is counted; ``weights``: bytes of the model; ``live``: the layout of its caches as
    they run, however they are stored."""

    limit: int
    weights: int
    live: Layout

    def make_room(self, ram: Ram, rows: int) -> None:
        """Let live caches have room for ``rows`` rows; 0: there are none. The RAM tier lends what is not free
        otherwise, its least recently used records first, and has it back with the next call that asks for less."""
        caches = live_bytes(self.live, rows) if rows else 0
        ram.lend(self.weights + caches + ram.most - self.limit)
