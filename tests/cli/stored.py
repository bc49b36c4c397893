"""A small real store, written once and copied for each test that may change it."""

from __future__ import annotations

import shutil
from pathlib import Path

from mlxkv.cache.catalogue import Forest, Item, look
from tests.cache.stores import Written, prompt
from tests.probe import run


class Stored:
    """Two prompts of 30 tokens that share 20, of a hybrid model, in blocks of 8; and one of a plain model."""

    def __init__(self, hybrid: Path, plain: Path, folder: Path) -> None:
        self.folder = folder
        self.tokens = prompt()
        self.other = self.tokens[:20] + prompt(seed=2)[20:]
        self.hybrid, self.plain = Written(hybrid, folder), Written(plain, folder)
        rt = self.hybrid.at(folder)
        run(rt, self.other)
        rt.store.close()

    def copy(self, to: Path) -> Path:
        return Path(shutil.copytree(self.folder, to))


def items(folder: Path) -> list[Item]:
    with look(folder) as index:
        assert index is not None
        return index.items()


def forest(folder: Path) -> Forest:
    return Forest(items(folder))
