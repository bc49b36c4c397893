"""Two processes fill a folder, are frozen and killed at random: it must never weigh a byte more than the budget."""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlxkv.cache.record import Reader, RecordError
from tests.cache.drafts import open_store
from tests.cache.frozen import watch, weigh

MIB = 1 << 20
#: what one folder sees at least: looks at it with both frozen, and how often its budget is written
LOOKS, TIMES = 500, 20


@dataclass
class Budget:
    """One entry a folder; ``wrong`` must stay empty."""

    folders: list[dict[str, Any]] = field(default_factory=list)
    looks: int = 0
    reservations: int = 0
    killed: int = 0
    written: int = 0
    wrong: list[str] = field(default_factory=list)


def budget(folder: Path, rng: random.Random, seconds: float) -> Budget:
    """Folder after folder, at least one without kills and one with some. Each is opened at the end: what is left is
    whole, and the index agrees with the files."""
    result, until = Budget(), time.monotonic() + seconds
    while len(result.folders) < 2 or time.monotonic() < until:
        where, limit = folder / f"budget-{len(result.folders)}", rng.randint(16 * MIB, 40 * MIB)
        kills = 0.01 * (len(result.folders) % 2)
        seen = watch(where, rng, limit, looks=LOOKS, times=TIMES, within=600, kills=kills)
        check(where, limit, seen.wrong)
        result.folders.append(asdict(seen))
        for name in ("looks", "reservations", "killed", "written", "wrong"):
            setattr(result, name, getattr(result, name) + getattr(seen, name))
    return result


def check(where: Path, limit: int, wrong: list[str]) -> None:
    store = open_store(where, budget=limit)
    listed = {
        name: store.folder.file(bytes.fromhex(name[:64]), name.split(".")[1]) for name in store.index.file_names()
    }
    found = {path.name for path in (where / "records").rglob("*.safetensors")}
    if listed.keys() != found:
        wrong.append(f"{len(listed.keys() ^ found)} files and rows do not fit each other")
    for path in listed.values():
        try:
            with Reader.open(path) as reader:
                for name in reader.tensors:
                    reader.read(name)
        except RecordError as e:
            wrong.append(f"{path.name}: {e}")
    store.close()
    if weigh(where) > limit:
        wrong.append("over the budget after closing")
