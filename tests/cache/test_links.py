"""Symbolic links planted in the cache folder: what they lead to is never changed, and nothing wrong is served."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from mlxkv.cache.folder import FolderRefused
from tests.cache.machine import scratch
from tests.cache.synthetic import MODELS, ask

MODEL, PROMPT, OTHER = MODELS["mixed"], [1, 2, 3, 4, 5, 6, 7], [2, 2, 2, 2, 2, 2, 2]
PLACES = (
    "records", "tmp", "quarantine", "records/??", "records/??/*", "index.sqlite", "index.sqlite-wal",
    "index.sqlite-shm", "index.damaged", "CACHEDIR.TAG",
)  # fmt: skip


def picture(folder: Path) -> dict[Path, tuple[int, bytes | None]]:
    """Modes and bytes of all that is there."""
    return {
        p: (stat.S_IMODE(p.lstat().st_mode), p.read_bytes() if p.is_file() else None) for p in folder.rglob("*")
    } | {folder: (stat.S_IMODE(folder.stat().st_mode), None)}


@pytest.fixture(scope="module")
def sound():
    with scratch() as folder:
        store = MODEL.open(folder / "c")
        ask(MODEL, store, PROMPT, ends=(3,))
        store.close()
        yield folder


@pytest.mark.parametrize("full", [True, False], ids=["to-what-was-there", "to-other-things"])
@pytest.mark.parametrize("running", [True, False], ids=["running", "closed"])
@pytest.mark.parametrize("place", PLACES)
def test_a_link_is_not_followed_to_write(sound, place, running, full):
    """Planted before the store opens, or while it runs, for a file or folder that was moved away, or for others."""
    folder, outside = sound / "try", sound / "outside"
    for path in (folder, outside):
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(sound / "c", folder)
    outside.mkdir(mode=0o755)
    store = MODEL.open(folder) if running else None
    if store is not None:  # its writer has the index open too
        ask(MODEL, store, [3] * 7, ends=(3,))
        assert store.writer.flush(20)
    found = list(folder.glob(place)) or [folder / place]
    for i, path in enumerate(found):
        target = outside / str(i)
        if full and path.exists():
            shutil.move(path, target)
        elif path.is_dir():
            shutil.rmtree(path)
            target.mkdir(mode=0o755)
            (target / "0-precious").write_bytes(b"x")
            (target / "1-00000000-1-precious").write_bytes(b"x")
        else:
            path.unlink(missing_ok=True)
            target.write_bytes(b"precious")
        link = outside / "link"
        link.symlink_to(target)
        os.replace(link, path)  # at once: what runs may make the file anew
    before = picture(outside)
    try:
        store = store or MODEL.open(folder)
    except FolderRefused as e:
        assert place in ("records", "tmp", "quarantine") and place in str(e) and "link" in str(e)
        assert picture(outside) == before
        return
    for prompt in (PROMPT, OTHER, PROMPT):
        ask(MODEL, store, prompt, ends=(3,))
        store.writer.flush(20)
    for record in (folder / "records").rglob("*.safetensors"):  # something to set aside
        if not record.is_symlink() and not record.parent.is_symlink():
            record.write_bytes(b"x" * 9000)
    ask(MODEL, store, OTHER)
    store.close()
    # planted under a running store, a link is a place like any other for what is already open or named; not for long
    if not (running and (place in ("records", "tmp") or place.startswith("index"))):
        assert picture(outside) == before
    if place in ("records", "tmp", "quarantine"):
        with pytest.raises(FolderRefused, match=f"{place} is a symbolic link"):
            MODEL.open(folder)
        return
    store = MODEL.open(folder)
    ask(MODEL, store, PROMPT)
    store.close()
    assert folder.joinpath("index.sqlite").is_file() and not folder.joinpath("index.sqlite").is_symlink()
