"""A folder that may only be read, in a process of its own: ``python -m tests.cache.readonly FOLDER {rights,mount}``.

``rights``: files and folders without the permission to write, for a user who is not root. ``mount``: a read-only mount,
for which the process needs a mount namespace of its own. Prints nothing and ends with 0 if what is stored is served
and shown, what is new is kept in RAM, and nothing in the folder changes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from mlxkv.cache import inspect
from mlxkv.cache.catalogue import look
from mlxkv.cache.store import PrefixStore
from mlxkv.cache.unwritten import UnwrittenStore, open_store
from mlxkv.cache.verify import verify as verified
from tests.cache.limits import give_up_rights
from tests.cache.synthetic import BLOCK, MODELS, ask, verify

MODEL = MODELS["mixed"]
OLD, NEW = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 9, 9, 9, 9, 9]


def opened(folder: Path, ram: int) -> UnwrittenStore:
    store, refused = open_store(folder, MODEL.identity, MODEL.layout, block=BLOCK, ram_budget=ram)
    assert isinstance(store, UnwrittenStore) and store.reads and refused is not None and str(folder) in str(refused)
    return store


def content(folder: Path) -> dict[Path, tuple[int, int]]:
    return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*")}


def serves(folder: Path, ram: int) -> None:
    before = content(folder)
    store = opened(folder, ram)
    assert ask(MODEL, store, OLD).reason is None
    for kept in (False, ram > 0):
        assert (ask(MODEL, store, NEW, ends=(5,)).reason is None) == kept
    assert store.writer.flush(5) and not store.faults
    store.close()
    assert content(folder) == before


def is_shown(folder: Path) -> None:
    """``mlxkv cache`` finds what is there, and no damage."""
    before = content(folder)
    files = [*(folder / "records").rglob("*.safetensors")]
    found = inspect.stats(folder)
    assert found["records"] == len(files) and found["entries"]
    with look(folder) as index:
        assert index is not None and len(index.items()) == found["entries"]
        assert sum(m["records"] for m in inspect.report(folder, index)["models"]) == len(files)
    checked = verified(folder)
    assert checked.records == len(files) and not checked.findings
    assert content(folder) == before


def without_what_was_not_closed(folder: Path) -> None:
    """Its last process was killed: what the log alone knows may be missed."""
    store = opened(folder, 0)
    ask(MODEL, store, OLD)
    store.close()


def damaged(folder: Path) -> None:
    """A miss, time and again: it stays where it is."""
    store = opened(folder, 0)
    for _ in range(2):
        assert ask(MODEL, store, OLD).reason == "corrupt"
    assert store.faults["corrupt"] >= 2
    store.close()


def make(folder: Path) -> None:
    store = MODEL.open(folder / "sound")
    ask(MODEL, store, OLD, ends=(5,))
    assert store.writer.flush(20)
    store.close()
    store = MODEL.open(folder / "killed")
    ask(MODEL, store, OLD, ends=(5,))
    assert store.writer.flush(20)
    shutil.copytree(folder / "killed", folder / "crashed")
    store.close()
    shutil.copytree(folder / "sound", folder / "damaged")
    for path in (folder / "damaged" / "records").rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-40] + b"x" * 40)


def main(folder: Path, how: str) -> None:
    make(folder)
    paths = [folder, *folder.rglob("*")]
    if how == "mount":
        for command in (["--bind", folder, folder], ["-o", "remount,ro,bind", folder]):
            subprocess.run(["mount", *command], check=True)
    else:
        for path in paths:
            path.chmod(0o500 if path.is_dir() else 0o400)
        give_up_rights()
    for ram in (0, 1 << 24):
        serves(folder / "sound", ram)
    is_shown(folder / "sound")
    without_what_was_not_closed(folder / "crashed")
    damaged(folder / "damaged")
    if how == "rights":
        for path in paths:
            path.chmod(0o700 if path.is_dir() else 0o600)
        store = MODEL.open(folder / "sound")
        assert isinstance(store, PrefixStore) and ask(MODEL, store, OLD, keep=False).reason is None
        verify(folder / "sound", store)
        store.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
