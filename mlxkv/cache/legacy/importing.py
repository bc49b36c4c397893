"""The import: what a source yields is converted, committed and noted in the journal, in this order.

It can be killed at any step: what is durable stays, what is not in the journal is looked at again, and its entries are
then found as stored already. Files of the source are only read; ``removal`` takes them away if the user asks. This
module does not own: what files mean (``omlx``, ``prompt_cache``), where entries go (``commit``), options (``cli``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...errors import ConfigError
from ..daily import Daily
from ..ledger import SHARE
from ..policy import may_write
from ..ram import Draft
from ..record import size as record_size
from ..store import PrefixStore
from .commit import missing, take
from .convert import Target
from .header import Signature
from .journal import FileDigest, Journal, NoRoom, read_digest
from .prefix import Prefix
from .reasons import REASONS, Refused
from .source import Found, Source, relative_name

#: told (bytes of files done, of how many so far); may raise to stop
Progress = Callable[[int, int], None]

#: files whose details are remembered for each reason, for people
EXAMPLES = 3
_SURVEY_STEP = 64


@dataclass
class Tally:
    files: int = 0
    bytes: int = 0

    def add(self, nbytes: int) -> None:
        self.files += 1
        self.bytes += nbytes


@dataclass
class Refusal(Tally):
    """``examples``: (file, what was found) of the first few."""

    examples: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Report:
    """Of one import. ``imported``: files of which everything useful is stored now (of a dry run: would be);
    ``already``: those of which it was before; ``unstored``: those that could not be stored, ``why`` says with numbers.
    ``records`` and ``new_bytes``: of records that were written, or would be."""

    refused: dict[str, Refusal] = field(default_factory=dict)
    imported: Tally = field(default_factory=Tally)
    already: Tally = field(default_factory=Tally)
    unstored: Tally = field(default_factory=Tally)
    why: list[str] = field(default_factory=list)
    #: (file, how its tokens were found), where a source says so
    proven: list[tuple[str, str]] = field(default_factory=list)
    records: int = 0
    new_bytes: int = 0

    @property
    def files(self) -> int:
        parts: Iterable[Tally] = (self.imported, self.already, self.unstored, *self.refused.values())
        return sum(part.files for part in parts)

    @property
    def frees(self) -> int:
        """Bytes that the disk has more of once the imported files are removed: theirs less those of new records."""
        return self.imported.bytes + self.already.bytes - self.new_bytes


class NotStored(Exception):
    """The writer dropped what it was given; the message says why."""


def target(store: PrefixStore) -> Target:
    """What legacy files are converted to. Raises ConfigError for a model whose entries they can never make."""
    if any(m.kind in ("head", "hidden") for m in store.layout.members):
        raise ConfigError(
            f"HEAD: {REASONS['HEAD']}: {store.identity.name} runs with its head, and an entry without the head's rows "
            "would never be found.",
            "Nothing of another tool can be imported for this model; name the one that made the files with --model.",
        )
    return Target(store.space(), store.layout, store.identity, store.software)


class Importer:
    """``root``: the folder or file of ``source``, under which the journal knows it. ``daily``: bytes that may be
    written a day."""

    def __init__(
        self,
        store: PrefixStore,
        journal: Journal,
        source: Source,
        root: Path,
        *,
        daily: int,
        progress: Progress = lambda done, total: None,
    ) -> None:
        self.store, self.journal, self.source, self.root = store, journal, source, root
        self.target = target(store)
        self.report = Report()
        self._daily, self._progress = daily, progress
        self._good: dict[Path, Found] = {}
        self._state: dict[Path, str] = {}  # "imported", "already", "unstored" or a code
        self._details: dict[Path, str] = {}
        self._staying: set[bytes] = set()  # keys of what this import wants to be there when it ends
        self._staying_bytes = 0
        self._total = self._done = 0

    def run(self, *, dry_run: bool = False) -> Report:
        """Import everything that can be. ``dry_run``: read it all, and store nothing. Raises OSError where the source
        cannot be looked at, sqlite3.Error where the index or the journal cannot be used."""
        self._survey(dry_run)
        for prefix, files in self.source.prefixes():
            self._take_in(prefix, files, dry_run)
            if self.store.writer.stopped_because and not dry_run:
                self._why(self.store.writer.stopped_because)
                break
        else:
            for found in self.source.refused():
                self._settle([found.path], found.code or "NO_STATE", found.detail)
        return self._sum()

    @property
    def wanted(self) -> list[Path]:
        """The files of which everything useful is stored."""
        return [path for path, state in self._state.items() if state in ("imported", "already")]

    def _survey(self, dry_run: bool) -> None:
        for seen, found in enumerate(self.source.survey(), 1):
            if seen % _SURVEY_STEP == 0:
                self._progress(0, self._total)
            if found.code is None:
                self._good[found.path] = found
                self._total += found.nbytes
            elif found.code != "NO_TOKENS" or not self._known_without_tokens(found, dry_run):
                self._refuse(found.path, found.nbytes, found.code, found.detail)

    def _take_in(self, prefix: Prefix, files: list[Path], dry_run: bool) -> None:
        """One prefix: skip, refuse, or convert → commit → journal."""
        outline = dict(self.target.outline(prefix))
        weight = sum(self._good[path].nbytes for path in files if path not in self._state)
        if self._known(files, dry_run):
            self._stay(outline)
            if not dry_run:
                self.store.writer.touch(next(reversed(outline)))  # so that what is new does not push it out
            self._settle(files, "already")
        elif codes := self._refused_before(files):
            for path, code in codes.items():
                self._settle([path], code, "an earlier import found that out")
        else:
            try:
                why = "" if dry_run else self._no_room(outline)
                if why:
                    raise NotStored(why)
                if dry_run:
                    self._count(prefix, weight)
                    self._settle(files, "imported")
                else:
                    self._store(prefix, files, outline, weight)
            except Refused as e:
                self._refuse_prefix(files, e, dry_run)
            except (NotStored, NoRoom) as e:
                self._why(str(e))
                self._settle(files, "unstored")
        if prefix.how:
            some = [relative_name(self.root, p) for p in files if self._state.get(p) in ("imported", "already")]
            self.report.proven += [(name, prefix.how) for name in some][: EXAMPLES - len(self.report.proven)]
        self._done += weight
        self._progress(self._done, self._total)

    def _store(self, prefix: Prefix, files: list[Path], outline: dict[bytes, dict[str, int]], weight: int) -> None:
        """Raises Refused, NotStored, NoRoom."""
        counters = self.store.writer.counters
        records, written = counters.written_records, counters.written_bytes
        try:
            taken = take(self.store, self._watched(prefix, outline, weight), wait=True)
        finally:
            self.report.records += counters.written_records - records
            self.report.new_bytes += counters.written_bytes - written
        if not taken.complete or missing(self.store, taken.records):
            raise NotStored(self._fault())
        self._stay(outline)
        digests: dict[str, FileDigest] = {}
        for path in files:
            try:
                found = read_digest(path)
                if found.signature != self._good[path].signature:
                    raise Refused("CHANGED", path=path)
                digests[relative_name(self.root, path)] = found
            except Refused as e:  # what was read of it is stored; what it is now is not known
                self._settle([path], e.code, e.detail)
        if digests:
            self.journal.note(self.root, self.target.space.root, digests, taken.records)
        self._settle(files, "imported")

    def _watched(self, prefix: Prefix, outline: dict[bytes, dict[str, int]], weight: int) -> Iterator[list[Draft]]:
        """The groups of a prefix. Before the next is made, the one before must be durable: else the rest would hang on
        nothing."""
        total = max(1, sum(sum(sizes.values()) for sizes in outline.values()))
        done = 0
        before: dict[bytes, frozenset[str]] = {}
        for group in self.target.drafts(prefix):
            if missing(self.store, before):
                raise NotStored(self._fault())
            before = {d.meta.key: frozenset(d.bodies) for d in group}
            yield group
            done += sum(d.nbytes for d in group)
            self._progress(self._done + weight * done // total, self._total)

    def _count(self, prefix: Prefix, weight: int) -> None:
        """What storing a prefix would write. Reads all of it, so that what an import would refuse is refused here."""
        for group in self.target.drafts(prefix):
            there = {d.meta.key: frozenset(d.bodies) for d in group if d.meta.key not in self._staying}
            lacking = missing(self.store, there)
            for draft in group:
                for kind in lacking.get(draft.meta.key, ()):
                    self.report.records += 1
                    self.report.new_bytes += record_size(replace(draft.meta, kind=kind), draft.bodies[kind])
                self._staying.add(draft.meta.key)
            self._progress(min(self._done + weight, self._total), self._total)

    def _known(self, files: list[Path], dry_run: bool) -> bool:
        """Whether all of these files are in the journal as they are, and what was made of them is there. States that
        were given up since (by the policy of their chain) are not made again; rows are."""
        root = self.target.space.root
        before: dict[bytes, frozenset[str]] | None = None
        moved: list[tuple[str, Signature]] = []
        unread: list[Path] = []  # noted by the legacy tier, which had no time for all of their bytes
        for path in files:
            name, signature = relative_name(self.root, path), self._good[path].signature
            row = self.journal.imported(self.root, name, root)
            if row is None or signature is None:
                return False
            if row.same(signature):
                unread += [] if row.digest else [path]
            else:
                try:
                    if read_digest(path).digest != row.digest:
                        return False
                except Refused:
                    return False
                moved.append((name, signature))
            if row.records is not before:  # files that were imported together are asked about once
                before = row.records
                if missing(self.store, {key: kinds - {"state"} for key, kinds in before.items()}):
                    return False
        with contextlib.suppress(NoRoom):  # then they are compared again the next time
            for name, signature in moved if not dry_run else ():
                self.journal.touch(self.root, name, root, signature)
            for path in unread if not dry_run else ():
                self._note_digest(path, root)
        return True

    def _known_without_tokens(self, found: Found, dry_run: bool) -> bool:
        """Whether a file whose tokens nobody says now was imported when they were known, by a prompt or a request."""
        self._good[found.path] = found
        if not self._known([found.path], dry_run):
            del self._good[found.path]
            return False
        row = self.journal.imported(self.root, relative_name(self.root, found.path), self.target.space.root)
        records = row.records if row is not None else {}
        if not records.keys() <= self._staying:  # files that were imported together have the same ones
            self._stay({key: {kind: self._size(key, kind) for kind in kinds} for key, kinds in records.items()})
            if not dry_run:
                self.store.writer.touch(next(reversed(records)))
        self._settle([found.path], "already")
        return True

    def _size(self, key: bytes, kind: str) -> int:
        try:
            return self.store.folder.file(key, kind).stat().st_size
        except OSError:
            return 0  # a state that was given up

    def _note_digest(self, path: Path, root: bytes) -> None:
        """Note what an imported file holds, if it is still that one. Raises NoRoom."""
        name = relative_name(self.root, path)
        row = self.journal.imported(self.root, name, root)
        with contextlib.suppress(Refused):
            found = read_digest(path)
            if row is not None and row.same(found.signature):
                self.journal.digested(self.root, name, root, found.digest)

    def _refused_before(self, files: list[Path]) -> dict[Path, str]:
        """The codes with which an earlier import refused these very files, if it refused all of them."""
        codes = {}
        for path in files:
            name, signature = relative_name(self.root, path), self._good[path].signature
            code = None
            if signature is not None:
                code = self.journal.refusal(self.root, name, self.target.space.root, signature)
            if code is None:
                return {}
            codes[path] = code
        return codes

    def _refuse_prefix(self, files: list[Path], error: Refused, dry_run: bool) -> None:
        """Rows are not what the source said. The file at fault gets its reason, the others hang on it."""
        for path in files:
            mine = error.path is None or path == error.path
            code, detail = (error.code, error.detail) if mine else ("CHAIN", f"{error.code}: {error.path}")
            signature = self._good[path].signature
            if not dry_run and signature is not None and error.code not in ("CHANGED", "UNREADABLE"):
                name = relative_name(self.root, path)
                self.journal.refuse(self.root, name, self.target.space.root, signature, code)
            self._settle([path], code, detail)

    def _no_room(self, outline: dict[bytes, dict[str, int]]) -> str:
        """Why a prefix cannot be stored, or ''. What this import stored before must not go for it."""
        lacking = missing(self.store, {key: frozenset(sizes) for key, sizes in outline.items()})
        need = {key: sum(outline[key][kind] for kind in kinds) for key, kinds in lacking.items()}
        budget = self.store.index.budget() or 0
        room = min(self.store.ledger.room(), int(SHARE * budget)) - self._staying_bytes
        new = sum(sum(sizes.values()) for key, sizes in outline.items() if key not in self._staying)
        if need and new > room:
            return (
                f"the cache budget of {budget:,} bytes has room for {max(0, room):,} bytes more of what is imported, "
                f"and {new:,} are needed (--cache-budget)"
            )
        used, total = Daily(self.store.folder.path).used(), sum(need.values())
        if need and not may_write("state" if self.store.layout.needs_state else "rows", total, used, self._daily):
            return (
                f"{used:,} of the {self._daily:,} bytes that may be written a day are used up, and {total:,} more are "
                "needed (--write-budget, or go on tomorrow)"
            )
        return ""

    def _fault(self) -> str:
        writer = self.store.writer
        return writer.stopped_because or writer.counters.last_fault or "the writer's queue is full"

    def _stay(self, outline: dict[bytes, dict[str, int]]) -> None:
        new = outline.keys() - self._staying
        self._staying |= new
        self._staying_bytes += sum(sum(outline[key].values()) for key in new)

    def _settle(self, files: Iterable[Path], state: str, detail: str = "") -> None:
        """What became of files. Stored in one prefix is stored, whatever happens to others that they are part of."""
        for path in files:
            if path in self._good and self._state.get(path) not in ("imported", "already", "CHANGED", "UNREADABLE"):
                self._state[path] = state
                self._details[path] = detail

    def _why(self, text: str) -> None:
        if text not in self.report.why:
            self.report.why.append(text)

    def _refuse(self, path: Path, nbytes: int, code: str, detail: str) -> None:
        part = self.report.refused.setdefault(code, Refusal())
        part.add(nbytes)
        if len(part.examples) < EXAMPLES:
            part.examples.append((relative_name(self.root, path), detail or REASONS[code]))

    def _sum(self) -> Report:
        report = self.report
        parts = {"imported": report.imported, "already": report.already, "unstored": report.unstored}
        left = "unstored" if report.why else "NO_STATE"
        for path, found in self._good.items():
            state = self._state.get(path, left)
            if state in parts:
                parts[state].add(found.nbytes)
            else:
                self._refuse(path, found.nbytes, state, self._details.get(path, ""))
        return report
