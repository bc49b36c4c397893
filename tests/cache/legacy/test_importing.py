"""The import's driver and its journal: what is imported is served, once, within the budget, whatever happens."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mlxkv.cache.folder import CacheFolder
from mlxkv.cache.legacy import importing, journal
from mlxkv.cache.legacy.importing import Importer, target
from mlxkv.cache.legacy.journal import Journal
from mlxkv.cache.legacy.removal import removable, remove
from mlxkv.cache.legacy.source import Context
from mlxkv.cache.record import Reader
from mlxkv.cache.verify import verify
from mlxkv.errors import ConfigError
from tests import headed, tiny
from tests.cache.legacy import shelf
from tests.cache.stores import records, reopened
from tests.probe import equal, run, runtime

LENGTH = 40
TOKENS = tiny.ids(LENGTH, seed=3)
BRANCH = TOKENS[:20] + tiny.ids(20, seed=4)


@pytest.fixture(scope="module")
def world(tiny_model, tmp_path_factory):
    """A runtime, a shelf with two conversations that share 20 tokens, and their cold logits."""
    folder = tmp_path_factory.mktemp("world")
    rt = runtime(tiny_model("qwen3_5"), folder / "cache")
    rt.store.close()
    shelf.fill(rt, folder / "old" / "a", TOKENS)
    shelf.fill(rt, folder / "old" / "b", BRANCH)
    colds = [run(rt, tokens, use_cache=False)[0] for tokens in (TOKENS, BRANCH)]
    return rt, folder / "old", colds


class Place:
    """A shelf and a store of one's own."""

    def __init__(self, world, tmp_path: Path) -> None:
        self.rt, old, self.colds = world
        self.old = Path(shutil.copytree(old, tmp_path / "old"))
        self.cache = tmp_path / "cache"

    def take(self, *, consent=True, daily=1 << 40, progress=lambda done, total: None, dry_run=False, **options):
        """One import, as a process of its own does it: (report, how often rows were read)."""
        rt = reopened(self.rt, self.cache, **options)
        notes = None
        try:
            notes = Journal(self.cache, None if dry_run else rt.store.ledger)
            source = shelf.Shelf(self.old, Context(target(rt.store), rt, notes, same_weights=consent))
            self.importer = Importer(rt.store, notes, source, self.old, daily=daily, progress=progress)
            return self.importer.run(dry_run=dry_run), source.reads
        finally:
            if notes is not None:
                notes.close()
            rt.store.close()

    def remove(self) -> list[Path]:
        rt = reopened(self.rt, self.cache)
        notes = Journal(self.cache, rt.store.ledger)
        try:
            files = removable(rt.store, notes, self.old, self.files())
            return [file.path for file in remove(notes, self.old, files)]
        finally:
            notes.close()
            rt.store.close()

    def files(self) -> list[Path]:
        return sorted(self.old.rglob("*.safetensors"))

    def served(self) -> list[tuple[int, str]]:
        """Ask both conversations: (cached tokens, source) of each; answers are the cold ones."""
        rt = reopened(self.rt, self.cache)
        out = []
        for tokens, cold in zip((TOKENS, BRANCH), self.colds, strict=True):
            logits, done = run(rt, tokens, keep=False)
            assert equal(logits, cold)
            out.append((done.usage.cached_tokens, done.cache.source))
        rt.store.close()
        return out


def ends(path: Path) -> int:
    with Reader.open(path) as reader:
        return reader.meta.end


@pytest.fixture
def place(world, tmp_path) -> Place:
    return Place(world, tmp_path)


def test_what_is_imported_is_served_and_not_imported_twice(place):
    before = {path: path.read_bytes() for path in place.files()}
    report, reads = place.take()
    assert (report.imported.files, report.refused, report.why) == (16, {}, [])
    assert report.imported.bytes == sum(map(len, before.values())) and reads
    assert place.served() == [(35, "ssd")] * 2  # the last stand before n−1
    assert report.new_bytes == sum(path.stat().st_size for path in records(place.cache))
    assert report.records == len(records(place.cache))
    again, reads = place.take()
    assert (again.already.files, again.imported.files, again.records, reads) == (16, 0, 0, 0)
    assert {path: path.read_bytes() for path in place.files()} == before
    assert verify(place.cache).findings == []
    assert report.frees == report.imported.bytes - report.new_bytes


def test_rows_that_were_given_up_are_imported_again(place):
    place.take()
    for path in records(place.cache):
        path.unlink()
    report, _ = place.take()
    assert report.imported.files == 16 and place.served() == [(35, "ssd")] * 2


def test_a_state_that_was_given_up_is_not_made_again(place):
    place.take()
    for path in records(place.cache, "state"):
        path.unlink()
    report, reads = place.take()
    assert (report.already.files, reads) == (16, 0)


def test_a_touched_file_is_compared_a_changed_one_done_again(place):
    place.take()
    for path in place.files()[:8]:
        os.utime(path, (1, 1))
    report, reads = place.take()
    assert (report.already.files, reads) == (16, 0)
    assert place.take()[1] == 0
    shelf.rewrite(place.files()[3], note="another")
    report, reads = place.take()
    assert (report.already.files, report.imported.files, report.records) == (8, 8, 0) and reads


@pytest.mark.parametrize("damage", ["gone", "garbage", "other version", "link"])
def test_without_its_journal_an_import_finds_all_stored(place, tmp_path, damage):
    place.take()
    path = place.cache / journal.FILE
    elsewhere = tmp_path / "precious"
    if damage == "garbage":
        path.write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    elif damage == "other version":
        data = bytearray(path.read_bytes())
        data[60:64] = (99).to_bytes(4, "big")  # user_version
        path.write_bytes(data)
    else:
        path.rename(elsewhere)
        if damage == "link":
            path.symlink_to(elsewhere)
    before = elsewhere.read_bytes() if elsewhere.exists() else b""
    report, _ = place.take()
    assert (report.imported.files, report.records) == (16, 0)
    assert place.take()[0].already.files == 16
    assert (elsewhere.read_bytes() if before else b"") == before


def test_a_dry_run_says_what_an_import_does_and_writes_nothing(place):
    shelf.rewrite(place.files()[7], model="other")
    place.take(consent=False)
    there = sorted((p, p.stat().st_size) for p in place.cache.rglob("*.safetensors"))
    notes = (place.cache / journal.FILE).read_bytes()
    seen, _ = place.take(dry_run=True)
    assert sorted((p, p.stat().st_size) for p in place.cache.rglob("*.safetensors")) == there == []
    assert (place.cache / journal.FILE).read_bytes() == notes
    done, _ = place.take()
    assert seen == done
    assert done.refused["MODEL"].files == 1 and done.imported.files == 15


def test_a_file_that_turns_out_bad_is_named_and_not_read_again(place):
    bad = place.files()[5]
    shelf.spoil(bad)
    dry, _ = place.take(dry_run=True)
    report, _ = place.take()
    assert dry.refused == report.refused
    assert {code: part.files for code, part in report.refused.items()} == {"NOT_FINITE": 1, "CHAIN": 7}
    assert report.refused["NOT_FINITE"].examples[0][0] == "a/" + bad.name
    assert place.served()[1] == (35, "ssd")
    again, reads = place.take()
    assert (again.already.files, reads) == (8, 0)
    assert {code: part.files for code, part in again.refused.items()} == {"NOT_FINITE": 1, "CHAIN": 7}
    shutil.copy(place.files()[13], bad)  # it is another one now: looked at again
    assert place.take()[1] > 0


def test_a_file_that_changes_while_it_is_imported_is_not_journalled(place):
    victim = place.files()[2]
    done = []

    def meddle(now: int, total: int) -> None:
        if now and not done:
            done.append(now)
            shelf.rewrite(victim, note="changed")

    report, _ = place.take(progress=meddle)
    assert done and "CHANGED" in report.refused
    assert victim not in place.importer.wanted and victim not in place.remove() and victim.exists()


def test_it_can_be_stopped_at_every_step_and_goes_on(place):
    class Stop(Exception):
        pass

    for steps in range(100):
        left = [steps]

        def tell(done: int, total: int, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Stop

        try:
            report, _ = place.take(progress=tell)
            break
        except Stop:
            assert verify(place.cache).findings == []
    assert steps >= 3 and report.already.files + report.imported.files == 16
    assert place.served() == [(35, "ssd")] * 2
    assert place.take()[1] == 0


def test_what_does_not_fit_is_said_with_numbers_and_not_journalled(place, monkeypatch):
    monkeypatch.setattr(importing, "SHARE", 0.1)  # the least budget has room for all of this tiny import
    budget = 4 << 20
    report, _ = place.take(budget=budget)
    assert report.imported.files == 8 and report.unstored.files == 8  # one of the two conversations
    assert f"{budget:,}" in report.why[0] and "--cache-budget" in report.why[0]
    assert CacheFolder(place.cache).size() <= budget
    again, reads = place.take(budget=budget)
    assert (again.already.files, again.unstored.files, reads) == (8, 8, 0)  # what came first does not go for the rest
    monkeypatch.undo()
    assert place.take()[0].imported.files == 8


def test_a_days_budget_that_is_used_up(place):
    report, _ = place.take(daily=10_000)
    assert report.imported.files == 0 and report.unstored.files == 16
    assert "10,000" in report.why[0] and "--write-budget" in report.why[0]
    assert records(place.cache) == []


def test_a_writer_that_stops_ends_the_import(place, monkeypatch):
    rt = reopened(place.rt, place.cache)
    rt.store.writer._stop("the disk is full")
    with Journal(place.cache, rt.store.ledger) as notes:
        source = shelf.Shelf(place.old, Context(target(rt.store), rt, notes, same_weights=True))
        report = Importer(rt.store, notes, source, place.old, daily=1 << 40).run()
        assert report.why == ["the disk is full"] and report.unstored.files == 16
        assert notes.names(place.old) == []
    rt.store.close()


def test_a_group_that_was_dropped_is_not_journalled(place, monkeypatch):
    monkeypatch.setattr("mlxkv.cache.commit.sync_group", lambda paths: (_ for _ in ()).throw(OSError(24, "too many")))
    report, _ = place.take()
    assert report.imported.files == 0 and "too many" in report.why[0]
    monkeypatch.undo()
    assert place.take()[0].imported.files == 16


def test_removal_takes_only_what_is_imported_whole(place):
    place.take()
    first, second = place.files()[:8], place.files()[8:]
    os.utime(first[0], (1, 1))  # the same to the last byte
    shelf.rewrite(first[1], note="another")
    keep = place.old / "notes.txt"
    keep.write_text("mine")
    gone = place.remove()
    assert gone == [path for path in (*first, *second) if path != first[1]]
    assert place.files() == [first[1]] and keep.exists()
    assert place.served() == [(35, "ssd")] * 2


def test_nothing_is_removed_whose_entries_are_not_whole(place):
    place.take()
    record = next(path for path in records(place.cache, "state") if ends(path) > 25)  # of one conversation only
    data = bytearray(record.read_bytes())
    data[-1] ^= 1
    record.write_bytes(data)  # the index does not know
    gone = place.remove()
    assert len(gone) == 8 and len(place.files()) == 8
    for path in records(place.cache, "rows"):
        path.unlink()
    assert place.remove() == []


def test_consent_is_remembered_for_a_folder_and_weights(place, tmp_path):
    assert place.take(consent=False)[0].refused["NO_CONSENT"].files == 16
    rt = reopened(place.rt, place.cache)
    mine, other = rt.store.identity.fingerprint, b"\1" * 32
    with Journal(place.cache, rt.store.ledger) as notes:
        notes.give_consent(place.old, mine)
        notes.trust(place.old, "x", b"content", b"prompt")
    link = tmp_path / "by another name"
    link.symlink_to(place.old)
    with Journal(place.cache, None) as notes:
        assert notes.consent(place.old, mine) and notes.consent(link, mine)
        assert not notes.consent(place.old, other) and not notes.consent(tmp_path, mine)
        assert notes.trusted(place.old, "x", b"content", b"prompt")
        assert not notes.trusted(place.old, "x", b"content", b"another")
        assert not notes.trusted(place.old, "x", b"changed", b"prompt")
    rt.store.close()


def test_the_journal_is_within_the_budget(place, monkeypatch):
    rt = reopened(place.rt, place.cache, budget=4 << 20)
    store, root = rt.store, rt.store.space().root
    with Journal(place.cache, store.ledger) as notes:
        file = journal.read_digest(place.files()[0])
        with pytest.raises(journal.NoRoom):
            for i in range(1000):
                names = {f"{i}/{n:0200}": file for n in range(200)}
                notes.note(place.old, root, names, {bytes([n]) * 32: frozenset({"rows"}) for n in range(200)})
                assert CacheFolder(place.cache).size() <= store.index.charge() <= store.budget
        assert i > 3
        left = notes.names(place.old)
        assert len(left) == 200 * i  # what did not fit is not there in parts
        notes.forget(place.old, left[: len(left) // 2])
        assert notes.names(place.old) == left[len(left) // 2 :]
    store.close()


def test_entries_make_room_for_the_journal(place):
    place.take(budget=5 << 20)
    rt = reopened(place.rt, place.cache, budget=5 << 20)
    ledger_, free = rt.store.ledger, rt.store.budget - rt.store.index.charge()
    before = len(records(place.cache))
    with journal._room(ledger_, free + 10_000):
        assert CacheFolder(place.cache).size() + free + 10_000 <= rt.store.budget
    assert len(records(place.cache)) < before
    rt.store.close()


def test_a_model_with_a_head_is_refused_by_name(tmp_path):
    rt = runtime(headed.make(tmp_path / "m"), tmp_path / "cache")
    with pytest.raises(ConfigError, match="HEAD"):
        target(rt.store)
    rt.store.close()
