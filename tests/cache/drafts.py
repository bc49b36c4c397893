"""Entries made up without a model: real stores, writers and records, with content that only has a size."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

from mlxkv.cache.keys import Identity, KeySpace, pack
from mlxkv.cache.layout import Layout, MemberSpec
from mlxkv.cache.ram import Draft
from mlxkv.cache.record import Body, Meta
from mlxkv.cache.store import PrefixStore
from mlxkv.cache.tensors import TensorSpec

BLOCK = 16
ROW = 256  # floats a token
STATE = 8192  # floats
LAYOUT = Layout(
    (
        MemberSpec((0,), "growing", "rows", (), None, 0, (TensorSpec("0.keys", "F32", (1, 1, 0, ROW)),)),
        MemberSpec((1,), "recurrent", "state", (), None, 0, (TensorSpec("1.0", "F32", (1, STATE)),)),
    )
)


def open_store(folder: Path, model: str = "a", **options) -> PrefixStore:
    identity = Identity(model.encode() * 32, (("test", "yes"),), LAYOUT.digest, model)
    return PrefixStore(folder, identity, LAYOUT, **{"block": BLOCK, "disk_floor": 0} | options)


def tokens(seed: int, length: int) -> list[int]:
    return [random.Random(seed * 1_000_003 + i).randrange(1 << 16) for i in range(length)]


def chain(store: PrefixStore, ids: list[int], states: bool = True, weight: int = STATE) -> list[Draft]:
    """The full blocks of ``ids``, each with its state of ``weight`` floats."""
    space, parent, out = store.space(), store.space().root, []
    for a in range(0, len(ids) - BLOCK + 1, BLOCK):
        draft = entry(store, parent, a, ids[a : a + BLOCK], states=states, weight=weight)
        out.append(draft)
        parent = space.key(parent, ids[a : a + BLOCK])
    return out


def entry(
    store: PrefixStore,
    parent: bytes,
    start: int,
    ids: list[int],
    *,
    base: Draft | None = None,
    states: bool = True,
    weight: int = STATE,
) -> Draft:
    """A block or leaf on ``parent``; with ``base``, its rows begin where that leaf ends."""
    space: KeySpace = store.space()
    row_start = base.meta.end if base is not None else start
    meta = Meta(
        kind="",
        key=space.key(parent, ids),
        root=space.root,
        parent=parent,
        start=start,
        end=start + len(ids),
        row_start=row_start,
        base=base.meta.key if base is not None else None,
        tokens=tuple(ids),
        block=BLOCK,
        layout=LAYOUT.digest,
        model=store.identity.name,
        fingerprint=store.identity.fingerprint,
        compute=json.dumps({"test": "yes"}),
    )
    seed = np.frombuffer(pack(ids), "<u4").sum()
    rows = np.full((1, 1, meta.end - row_start, ROW), seed, np.float32)
    bodies = {"rows": Body.of({"0.keys": ("F32", rows)})}
    if states:
        bodies["state"] = Body.of({"1.0": ("F32", np.full((1, weight), seed, np.float32))})
    needs = [key for key in (parent, meta.base) if key and key != space.root]
    return Draft(meta, bodies, tuple(needs))


def put(store: PrefixStore, drafts: list[Draft]) -> None:
    """Store a group and wait until it is done."""
    assert store.writer.submit(drafts)
    assert store.writer.flush(60)


def held(store: PrefixStore, drafts: list[Draft]) -> list[str]:
    """The kinds of records of each entry that are in the index, and that their files are there; '' for none."""
    out = []
    for draft in drafts:
        kinds = sorted(kind for kind, _ in store.index.records_of(draft.meta.key))
        assert all(store.folder.file(draft.meta.key, kind).is_file() for kind in kinds)
        out.append("+".join(kinds))
    return out
