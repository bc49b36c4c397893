"""Merging: the pieces of a full block become one file, when nothing else is to be done.

A block that filled bit by bit has its rows in several files: those of its leaves, each a delta on the one before, and
its own. Here they are read, verified, and written as one record in place of the block's own. Only when that is durable
and in the index do the rows of the leaves go: they are in the block. A leaf with a state stays, and so does one where
an answer ends or where one can stand without a state; its ``row_start`` is its end then, and its base the block. Where
its state's record alone would not keep it, its rows' file is replaced by one without tensors.

What another branch hangs on stays where it is: the merged rows begin after it. Belongs to the writer's thread. Every
step can be the last: what is left undone is found again by the next pass.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np

from .commit import Commit
from .folder import CacheFolder
from .index import Entry
from .keys import pack
from .layout import Layout
from .planner import Planner
from .policy import may_write
from .ram import Draft, Ram
from .record import Body, Meta, MissingRecord, Reader, RecordError
from .tensors import ROW_KINDS

log = logging.getLogger("mlxkv.cache")

#: full blocks whose rows begin with a base
_IN_PIECES = """
SELECT e.key FROM entries e JOIN roots o ON o.root = e.root
WHERE e.base IS NOT NULL AND e.end - e.start = o.block AND o.layout = ? AND o.block = ?
"""
#: full blocks that have rows which a leaf has too, on which nothing hangs
_TWICE = """
SELECT DISTINCT block FROM (
  SELECT (
    SELECT f.key FROM entries f WHERE f.parent = e.parent AND f.tokens > e.tokens
      AND f.tokens < CAST(e.tokens || x'ffffffffffffffff' AS BLOB) AND f.end - f.start = o.block AND f.row_start < e.end
    ORDER BY f.row_start LIMIT 1
  ) AS block
  FROM entries e JOIN roots o ON o.root = e.root
  -- or the windows of a leaf whose rows went already
  JOIN records r ON r.key = e.key AND (r.kind = 'window' OR (r.kind = 'rows' AND e.row_start < e.end))
  WHERE o.layout = ? AND o.block = ? AND e.end - e.start < o.block
    AND NOT EXISTS (SELECT 1 FROM entries d WHERE d.base = e.key)
) WHERE block IS NOT NULL
"""
#: the same, of the blocks that were written or used since then
_RECENT = """
SELECT e.key FROM entries e JOIN roots o ON o.root = e.root
WHERE o.layout = ? AND o.block = ? AND e.used > ? AND e.end - e.start = o.block
"""


class Merger:
    """``interrupted`` says whether something else is to be done now; ``pinned`` what is being restored; ``daily`` the
    bytes that may be written a day."""

    def __init__(
        self,
        folder: CacheFolder,
        commit: Commit,
        planner: Callable[[bytes], Planner],
        layout: Layout,
        block: int,
        ram: Ram,
        *,
        daily: int,
        pinned: Callable[[], Collection[bytes]],
        interrupted: Callable[[], bool],
    ) -> None:
        self._folder, self._commit, self._planner, self._layout, self._block = folder, commit, planner, layout, block
        self._ram, self._daily, self._pinned, self._interrupted = ram, daily, pinned, interrupted
        self._index, self._counters = commit.index, commit.counters
        self._failed: set[bytes] = set()  # a look-up will find out why, and say so
        self._room = True
        self._since: float | None = None  # nothing was in two places then

    def run(self) -> bool:
        """Merge what can be merged; False if something came between, or records wait to be taken into the index: nobody
        knows what they hang on. Raises OSError, sqlite3.Error."""
        if self._index.any_waiting():
            return False
        mine = (self._layout.digest, self._block)
        now, self._room = self._index.used(), True
        twice = (_TWICE, mine) if self._since is None else (_RECENT, (*mine, self._since))
        for query, values in ((_IN_PIECES, mine), twice):
            if self._interrupted():
                return False
            for (key,) in self._index.execute(query, values).fetchall():
                if self._interrupted():
                    return False
                full = self._index.entry(key)
                if full is None or key in self._failed:
                    continue
                try:
                    if self._merge(full) or query is not _IN_PIECES:
                        self._absorb(key)
                except RecordError as e:
                    if not isinstance(e, MissingRecord):  # another process was first
                        self._failed.add(key)
                    log.info("the pieces of %s are not merged: %s", key.hex()[:12], e)
        if self._interrupted():
            return False
        if self._room:
            self._since = now
        return True

    # the block

    def _merge(self, full: Entry) -> bool:
        """Write one file for the block and the pieces that nothing else hangs on; False if there are none, or no room.
        Raises RecordError."""
        pieces = self._own_pieces(full)
        if len(pieces) < 2 or not self._room or not self._planner(full.root).whole(full.key):
            return False
        draft = self._joined(pieces)

        def enter() -> int:
            entry = self._index.entry(full.key)
            if entry is None or not entry.kinds >= {*self._layout.row_kinds}:  # it went while it was merged
                for kind in self._layout.row_kinds:
                    self._folder.remove(full.key, kind)
                    self._index.drop_record(full.key, kind)
                return 0
            return self._enter(draft.meta, self._layout.row_kinds)

        if not self._write(draft, enter):
            return False
        self._counters.merged_blocks += 1
        if self._ram.open(full.key, "rows") is not None:  # in place of the block's last piece
            self._ram.put(draft)
        return True

    def _write(self, draft: Draft, enter: Callable[[], int]) -> bool:
        """False if the day's write budget or the folder has no room for it: then nothing more is tried this time."""
        self._room = (
            self._room
            and may_write("merge", draft.nbytes, self._commit.used_today(), self._daily)
            and self._commit.merge(draft, enter)
        )
        return self._room

    def _own_pieces(self, full: Entry) -> list[Entry]:
        """The block and the leaves that have the rows before its own, as far as only it hangs on them; first tokens
        first."""
        out = [full]
        while (key := out[0].base) is not None:
            piece = self._index.entry(key)
            hanging = self._index.execute("SELECT count(*) FROM entries WHERE base = ?", (key,)).fetchone()[0]
            whole = piece is not None and piece.end == out[0].row_start > piece.row_start
            if piece is None or not whole or piece.end - piece.start == self._block or hanging != 1:
                break
            out.insert(0, piece)
        return out

    def _joined(self, pieces: list[Entry]) -> Draft:
        """The rows of all pieces as one record of the last one's entry. Raises RecordError."""
        bodies: dict[str, Body] = {}
        meta: Meta | None = None
        for kind in self._layout.row_kinds:
            specs = self._layout.tensors(kind)
            parts: dict[str, list[np.ndarray]] = {t.name: [] for t in specs}
            for piece in pieces:
                with Reader.open(self._folder.file(piece.key, kind)) as reader:
                    m = self._checked(reader, piece, kind)
                    reader.require(specs, m.end - m.row_start)
                    for t in specs:
                        own = t.part(piece.row_start, m.end, m.row_start)
                        parts[t.name].append(reader.read(t.name)[:, :, own])
                meta = m if kind == "rows" else meta
            bodies[kind] = Body.of(
                {t.name: (t.dtype, np.ascontiguousarray(np.concatenate(parts[t.name], axis=2))) for t in specs}
            )
        assert meta is not None
        first = pieces[0]
        needs = tuple(key for key in (first.parent, first.base) if key is not None)
        return Draft(replace(meta, kind="", row_start=first.row_start, base=first.base), bodies, needs)

    @staticmethod
    def _checked(reader: Reader, entry: Entry, kind: str) -> Meta:
        m = reader.meta
        same = (m.kind, m.key, m.root, m.parent, m.start, m.end) == (
            kind, entry.key, entry.root, entry.parent, entry.start, entry.end,
        )  # fmt: skip
        if not same or pack(m.tokens) != entry.tokens or m.row_start > entry.row_start:
            raise RecordError("the file holds other rows than the index says")
        return m

    # its leaves

    def _absorb(self, key: bytes) -> None:
        """Give back the rows of leaves that the block has too, those that others hang on last. Raises RecordError."""
        full = self._index.entry(key)
        if full is None or not self._planner(full.root).whole(key):
            return
        for leaf in self._index.children(full.parent, full.tokens):  # longest first
            inside = leaf.root == full.root and leaf.end < full.end and full.tokens.startswith(leaf.tokens)
            if not inside or leaf.end <= full.row_start or not leaf.kinds & {*ROW_KINDS} or not self._free(leaf.key):
                continue
            if self._interrupted():
                return
            if leaf.row_start == leaf.end:
                if "window" in leaf.kinds:  # left when its rows went
                    self._drop(leaf, full, {"window"})
                continue
            answers = self._index.execute(
                "SELECT digest, start, last FROM answers WHERE key = ? ORDER BY start DESC", (leaf.key,)
            ).fetchall()
            if answers or ("state" not in leaf.kinds and self._stood_on(leaf)):
                self._hollow(leaf, full, answers)
            else:
                self._drop(leaf, full, {*ROW_KINDS})

    def _stood_on(self, leaf: Entry) -> bool:
        """Whether a request could go on from a leaf that has no state on disk."""
        if self._layout.needs_state:
            return self._ram.open(leaf.key, "state") is not None  # it may yet be written
        return not self._layout.growing_only  # else from anywhere in the block

    def _free(self, key: bytes) -> bool:
        """Whether nothing hangs on a leaf and nobody here is reading it."""
        hanging = self._index.execute("SELECT 1 FROM entries WHERE base = ? LIMIT 1", (key,)).fetchone()
        return hanging is None and key not in self._pinned()

    def _covered(self, leaf: Entry, full: Entry) -> bool:
        now = self._index.entry(full.key)
        return (
            now is not None
            and now.row_start < leaf.end
            and now.kinds >= {*self._layout.row_kinds}
            and self._free(leaf.key)
        )

    def _drop(self, leaf: Entry, full: Entry, kinds: Collection[str]) -> None:
        """Of a leaf that something else keeps, or that is of no use any more. Files go first: a row without one is
        found out, a file without a row would not be counted."""
        going = sorted(leaf.kinds & {*kinds})
        with self._index.transaction():
            answer = self._index.execute("SELECT 1 FROM answers WHERE key = ? LIMIT 1", (leaf.key,)).fetchone()
            if not self._covered(leaf, full) or ("rows" in going and answer is not None):
                return
            for kind in going:
                self._folder.remove(leaf.key, kind)
                self._counters.merged_files += 1
            if leaf.row_start < leaf.end:
                self._index.merged(leaf.key, full.key)
            for kind in going:
                self._index.drop_record(leaf.key, kind)
        self._forget(leaf)

    def _hollow(self, leaf: Entry, full: Entry, answers: list[tuple[bytes, int, int | None]]) -> None:
        """Replace the leaf's rows by a record without any. Raises RecordError."""
        with Reader.open(self._folder.file(leaf.key, "rows")) as reader:
            meta = self._checked(reader, leaf, "rows")
        if not meta.answer and answers:
            digest, start, last = answers[0]
            meta = replace(meta, answer=json.dumps({"digest": digest.hex(), "start": start, "last": last}))
        meta = replace(meta, kind="", row_start=leaf.end, base=full.key)

        def enter() -> int:
            if self._index.entry(leaf.key) is None:  # it went meanwhile
                self._folder.remove(leaf.key, "rows")
                return 0
            if "window" in leaf.kinds:
                self._folder.remove(leaf.key, "window")
                self._index.drop_record(leaf.key, "window")
                self._counters.merged_files += 1
            return self._enter(meta, ("rows",))

        if self._covered(leaf, full) and self._write(Draft(meta, {"rows": Body({}, {})}, ()), enter):
            self._forget(leaf)

    def _enter(self, m: Meta, kinds: Collection[str]) -> int:
        """Enter records that stand in the place of others; who used the entry when stays. Returns their bytes."""
        sizes = {}
        for kind in kinds:
            path = self._folder.file(m.key, kind)
            if self._folder.holds(m.key, kind):
                sizes[kind] = os.lstat(path).st_size
        entry = Entry(m.key, m.root, m.parent, m.start, m.end, m.row_start, m.base, pack(m.tokens), frozenset())
        self._index.add_entry(entry, sizes, self._index.last_used(m.key))
        return sum(sizes.values())

    def _forget(self, leaf: Entry) -> None:
        for kind in ROW_KINDS:
            self._ram.drop(leaf.key, kind)
