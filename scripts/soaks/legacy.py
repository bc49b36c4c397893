"""Attempts to break the import of other tools' folders: hostile headers, changed blocks, kill -9, very many files.

Each part takes a ``Task`` and returns how many attempts it made; what it finds is raised. ``headers``, ``imports`` and
``names`` do all of their work, however long it takes (a minute or two each).
"""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import mlxkv.models  # noqa: F401 - chooses the BLAS before MLX is imported

from hypothesis import HealthCheck, Phase, given, settings  # isort: skip
from hypothesis import seed as seeded
from hypothesis import strategies as st

from soaks.faults import Task  # isort: skip

from mlxkv.cache.legacy.journal import Journal
from tests.cache.legacy.damage import LAYOUTS, chain, save_all
from tests.cache.legacy.fuzz import Folder, files, peak, read
from tests.cache.legacy.harness import converted
from tests.cache.legacy.kills import MODEL, Victims, killed_at, make, sizes
from tests.cache.legacy.omlx_writer import Style
from tests.cache.machine import scratch

HEADERS, KILLS, NAMES, BATCH = 50_000, 100, 20_000, 500
FOLDERS = (
    ("list", Style()),
    ("list", Style(composite="pm", stamped=True)),
    ("pair", Style(version="2", names="keys")),
    ("mixed", Style()),
    ("window", Style(version="2")),
    ("slots", Style(stamped=True)),
)
SETTINGS = settings(
    max_examples=BATCH,
    deadline=None,
    database=None,
    print_blob=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def headers(task: Task) -> int:
    """50,000 files that may be anything."""
    with scratch() as folder:
        for i in range(0, HEADERS, BATCH):

            @seeded(task.seed + i)
            @settings(SETTINGS)
            @given(files)
            def draw(raw: bytes) -> None:
                read(folder / "f.safetensors", raw)

            draw()
    return HEADERS


def blocks(task: Task) -> int:
    """Changed blocks among sound ones, of every layout in turn."""
    count, until, codes = 0, time.monotonic() + task.seconds, Counter()
    while count == 0 or time.monotonic() < until:
        with scratch() as base:
            folder = Folder(base, *FOLDERS[count // BATCH % len(FOLDERS)])

            @seeded(task.seed + count)
            @settings(SETTINGS)
            @given(st.data())
            def draw(data: st.DataObject) -> None:
                codes.update(folder.tried(data.draw))  # noqa: B023 - called within this turn

            draw()
        count += BATCH
    print(f"  {dict(codes.most_common())}")
    return count


def imports(task: Task) -> int:
    """100 kills at random steps, up to eight on one cache."""
    rng, done, victims = task.rng(), 0, Victims()
    try:
        with scratch() as base:
            make(base / "omlx")
            steps = victims.one(base / "omlx", base / "undisturbed", 0)
            assert steps is not None
            store = MODEL.open(base / "undisturbed")
            want = sizes(store)
            store.close()
            while done < KILLS:
                at = [rng.randint(1, steps) for _ in range(min(rng.randint(1, 8), KILLS - done))]
                try:
                    killed_at(victims, base / "omlx", base / f"c{done}", at, want)
                except Exception as e:
                    raise AssertionError(f"killed at {at} of {steps}") from e
                done += len(at)
    finally:
        victims.close()
    return done


def names(task: Task) -> int:
    """20,000 files of no sense beside three of some: time grows with the number of names, memory hardly."""
    rng = task.rng()
    with scratch() as base:
        folder = base / "omlx"
        save_all(folder, chain("list", Style()))
        for i in range(NAMES):
            _odd(folder / "0123456789abcdef"[i % 16], rng, i)
        journal = Journal(base, None)
        before, begun = peak(), time.monotonic()
        drafts, said = converted(LAYOUTS["list"], folder, journal)
        took, grown = time.monotonic() - begun, peak() - before
        journal.close()
    assert {4, 8, 12} == {draft.meta.end for draft in drafts if "state" in draft.bodies}
    assert {"NAME", "TOO_SMALL", "HEADER_JSON"} <= said, said
    assert grown < 128 << 20, grown
    print(f"  {took:.1f} s, {grown >> 20} MiB")
    return NAMES


def _odd(folder: Path, rng: random.Random, i: int) -> None:
    name = folder.name + f"{rng.getrandbits(252):063x}.safetensors"
    if i % 4 == 0:
        (folder / f"{i}.safetensors").write_bytes(b"")
    elif i % 4 == 1:
        (folder / name).write_bytes(b"")
    elif i % 4 == 2:
        (folder / name).write_bytes(bytes(64))
    else:
        (folder / name).symlink_to("/dev/zero")


PARTS = (headers, blocks, imports, names)
