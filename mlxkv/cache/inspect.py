"""Looking at a cache folder: what it holds, what an entry is, whether a restore could stand there. No model, no MLX."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import stat
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .catalogue import CacheError, Catalogue, Forest, Item, Root
from .daily import Daily
from .folder import CacheFolder
from .index import FILE, Index
from .keys import unpack
from .record import Reader, RecordError
from .tables import SUFFIX
from .tensors import RECORD_KINDS

#: files beside records, temporaries and quarantine that are mlxkv's own
OWN_FILES = (
    "CACHEDIR.TAG", ".metadata_never_index", "index.damaged", "weights.json", "writes.json", "LOCK",
    "imports.sqlite", "imports.sqlite-journal",
)  # fmt: skip


def report(path: Path, index: Catalogue | None) -> dict[str, Any]:
    """What is in a folder, file by file and model by model; the object of ``mlxkv cache info --json``."""
    folder = CacheFolder(path)
    size = {name: 0 for name in (*RECORD_KINDS, "index", "temporaries", "quarantine", "own", "foreign")}
    count = dict(size)
    names: set[tuple[bytes, str]] = set()
    for base, _, files in os.walk(path):
        for name in files:
            where = Path(base, name)
            try:
                info = where.lstat()
            except OSError:
                continue
            kind = _kind(folder, where)
            if kind in RECORD_KINDS:
                names.add((bytes.fromhex(name[:64]), kind))
            count[kind] += 1
            size[kind] += info.st_size if stat.S_ISREG(info.st_mode) else 0
    models: list[dict[str, Any]] = []
    used: float | None = None
    rows: set[tuple[bytes, str]] = set()
    if index is not None:
        rows = set(index.names())
        by_root: dict[bytes, list[Item]] = {}
        for item in index.items():
            by_root.setdefault(item.root, []).append(item)
            used = max(used or 0, item.used)
        for key, space in index.spaces().items():
            models.append(_model(folder, space, by_root.get(key, [])))
        models.sort(key=lambda m: (m["used"] or "", m["model"]), reverse=True)
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    disk = os.statvfs(there)
    return {
        "path": str(path),
        "exists": path.is_dir(),
        "bytes": sum(size.values()),
        "free_disk_bytes": disk.f_bavail * disk.f_frsize,
        "used": moment(used),
        "records": {kind: {"count": count[kind], "bytes": size[kind]} for kind in RECORD_KINDS},
        "index_bytes": size["index"],
        "notes_bytes": size["own"],
        "temporaries": {
            "count": count["temporaries"],
            "bytes": size["temporaries"],
            "left_over": sum(1 for _ in folder.leftovers()),
        },
        "quarantine": {"count": count["quarantine"], "bytes": size["quarantine"]},
        "foreign": {"count": count["foreign"], "bytes": size["foreign"]},
        "rows_without_file": len(rows - names),
        "files_without_row": len(names - rows),
        "models": models,
    }


def _kind(folder: CacheFolder, path: Path) -> str:
    """Which of the sizes of ``report`` a file belongs to."""
    if path.parent == folder.path:
        if path.name.startswith(FILE):
            return "index"
        return "own" if path.name in OWN_FILES or path.name.startswith(".weights-") else "foreign"
    if path.is_relative_to(folder.tmp):
        return "temporaries"
    if path.is_relative_to(folder.quarantine_dir):
        return "quarantine"
    named = re.fullmatch(rf"([0-9a-f]{{64}})\.({'|'.join(RECORD_KINDS)}){re.escape(SUFFIX)}", path.name)
    if named and path == folder.file(bytes.fromhex(named[1]), named[2]):
        return named[2]
    return "foreign"


def _model(folder: CacheFolder, space: Root, items: list[Item]) -> dict[str, Any]:
    """One key space, with the tensors of its newest records as an example of its layout."""
    layout: dict[str, Any] = {}
    bits = 0
    for kind in RECORD_KINDS:
        have = [item for item in items if kind in item.sizes]
        for item in sorted(have, key=lambda i: i.used, reverse=True)[:1]:
            with contextlib.suppress(RecordError), Reader.open(folder.file(item.key, kind)) as reader:
                layout[kind] = tensors(reader)
                bits = reader.meta.store_bits
    return {
        "model": space.model,
        "root": space.key.hex(),
        "fingerprint": _hex(space.fingerprint),
        "compute": _json(space.compute),
        "layout": _hex(space.layout),
        "block": space.block,
        "entries": len(items),
        "records": sum(len(item.sizes) for item in items),
        "bytes": sum(item.bytes for item in items),
        "used": moment(max((item.used for item in items), default=None)),
        "store_bits": bits or None,
        "tensors": layout,
    }


def tensors(reader: Reader) -> list[dict[str, Any]]:
    return [
        {"name": name, "dtype": dtype, "shape": list(shape), "bytes": end - start}
        for name, (dtype, shape, start, end) in reader.tensors.items()
    ]


def describe(item: Item, forest: Forest, spaces: dict[bytes, Root]) -> dict[str, Any]:
    """One line of ``mlxkv cache ls``: an entry, and how much of its chain is there."""
    chain, missing = forest.chain(item)
    space = spaces.get(item.root)
    return {
        "key": item.key.hex(),
        "model": space.model if space else "",
        "tokens": item.end,
        "start": item.start,
        "kinds": [kind for kind in RECORD_KINDS if kind in item.sizes],
        "bytes": item.bytes,
        "chain_entries": len(chain),
        "chain_bytes": sum(link.bytes for link in chain),
        "used": moment(item.used),
        "tip": forest.is_end(item),
        "resumable": missing is None and forest.stands(item)[0] is None,
    }


def examine(folder: CacheFolder, index: Catalogue, key: bytes) -> dict[str, Any]:
    """All that is known of one entry; the object of ``mlxkv cache show --json`` but for its text. Raises CacheError."""
    forest, spaces = Forest(index.items()), index.spaces()
    item, entry = forest.items.get(key), index.entry(key)
    if item is None or entry is None:
        raise CacheError(
            f"The index holds a damaged row for {key.hex()[:16]}.",
            "mlxkv cache verify --repair reads its record again.",
        )
    records: list[dict[str, Any]] = []
    reason, why = forest.stands(item)
    for kind in (kind for kind in RECORD_KINDS if kind in item.sizes):
        path = folder.file(key, kind)
        record: dict[str, Any] = {"kind": kind, "bytes": item.sizes[kind], "file": str(path), "problem": None}
        try:
            with Reader.open(path) as reader:
                bits = reader.meta.store_bits or None
                record |= {"tensors": tensors(reader), "software": reader.meta.software, "store_bits": bits}
        except RecordError as error:
            record |= {"tensors": [], "software": "", "store_bits": None, "problem": f"{error.reason}: {error}"}
            if reason is None:
                reason, why = error.reason, f"its {kind} record: {error}"
        records.append(record)
    links = forest.chain(item)[0]
    found = describe(item, forest, spaces) | {
        "root": item.root.hex(),
        "block": spaces[item.root].block if item.root in spaces else None,
        "fingerprint": _hex(spaces[item.root].fingerprint) if item.root in spaces else None,
        "compute": _json(spaces[item.root].compute) if item.root in spaces else {},
        "row_start": item.row_start,
        "parent": None if item.parent == item.root else item.parent.hex(),
        "base": item.base.hex() if item.base else None,
        "records": records,
        "token_ids": unpack(entry.tokens),
        "chain": [{"key": i.key.hex(), "start": i.row_start, "end": min(i.end, item.end)} for i in links],
        "hanging": [
            {"key": i.key.hex(), "start": i.row_start, "end": i.end, "as": _as(i, key)}
            for i in sorted(forest.hanging(key), key=lambda i: (i.end, i.key))
        ],
        "answers_from": index.answers_at(key),
        "resumable": reason is None,
        "reason": reason,
        "why": why,
    }
    return found


def _as(item: Item, key: bytes) -> str:
    """What an entry is that hangs on ``key``."""
    return "child" if item.base != key else "merged" if item.merged else "piece"


def stats(path: Path) -> dict[str, Any]:
    """``entries, records, waiting, bytes, written_today, merged_today, by_model`` of a cache folder; zeros where there
    is none or it cannot be read.

    ``waiting`` are records that are still to be taken into the index (``adoption``) and not among the others; ``bytes``
    is what a budget counts: the size of every regular file under the folder. ``merged_today`` is that part of
    ``written_today`` which merging wrote.
    """
    by_model: list[dict[str, Any]] = []
    waiting = 0
    for _ in range(3):
        try:
            index = Index(path, create=False)
        except sqlite3.Error:
            break
        try:
            totals, waiting = index.totals(), index.waiting()
        except sqlite3.OperationalError:  # another process is just creating it
            time.sleep(0.05)
            continue
        except sqlite3.DatabaseError:  # damaged: the next run builds it again
            break
        finally:
            index.close()
        by_model = [{"model": m, "entries": e, "records": r, "bytes": b} for m, e, r, b in totals]
        break
    return {
        "entries": sum(m["entries"] for m in by_model),
        "records": sum(m["records"] for m in by_model),
        "waiting": waiting,
        "bytes": CacheFolder(path).size() if path.is_dir() else 0,
        "written_today": Daily(path).used(),
        "merged_today": Daily(path).merged(),
        "by_model": by_model,
    }


def moment(seconds: float | None) -> str | None:
    """A time as ISO 8601 in UTC, to the second."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _hex(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else ""


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
