"""An index that was built again knows the newest records at once; the others are found when asked for, and taken in
behind. Whatever happens meanwhile, nothing is lost, nothing wrong is served, and the budget holds."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlxkv.cache.adoption import take_in_all
from mlxkv.cache.folder import CacheFolder
from mlxkv.cache.index import Index
from mlxkv.cache.opening import open_index
from mlxkv.cache.verify import verify
from tests.cache.drafts import BLOCK, chain, open_store, put, tokens
from tests.cache.stores import records
from tests.cache.synthetic import MODELS, ask
from tests.cache.synthetic import verify as whole
from tests.cache.test_budget import MIB, weigh

MODEL = MODELS["mixed"]
CONVERSATIONS = 12


def conversation(i: int) -> list[int]:
    """All begin alike; parts of two blocks lie behind."""
    return [1, 2, 3, 4, 5, 100 + i, *tokens(i, 9)]


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """Conversations, the first written long before the last."""
    folder = tmp_path_factory.mktemp("adoption") / "c"
    store = MODEL.open(folder)
    seen: set[Path] = set()
    for i in range(CONVERSATIONS):
        ask(MODEL, store, conversation(i), ends=(6, 10))
        assert store.writer.flush(20)
        for path in set(records(folder)) - seen:
            os.utime(path, (1000 + i, 1000 + i))
        seen = set(records(folder))
    store.close()
    return folder


@pytest.fixture
def folder(filled, tmp_path):
    """A copy of it, the index damaged."""
    copy = Path(shutil.copytree(filled, tmp_path / "c"))
    (copy / "index.sqlite").write_bytes(b"not a database, but noise" * 400)
    return copy


def waiting(folder: Path) -> int:
    index = Index(folder, create=False)
    try:
        return index.waiting()
    finally:
        index.close()


def hits(store, i: int) -> str | None:
    """Ask for a conversation, which must be right; the reason why not all of it was there."""
    return ask(MODEL, store, conversation(i), keep=False).reason


def finish(folder: Path, **options) -> None:
    """Open it as a run does and wait: every record is in the index, all is whole, and every conversation is found."""
    store = MODEL.open(folder, **options)
    assert store.adopter is None or store.adopter.wait(30)
    assert not store.index.any_waiting()
    whole(folder, store)
    accounts = dict(store.index.execute("SELECT name, bytes FROM ledger"))
    assert accounts["records"] == sum(path.stat().st_size for path in records(folder))
    assert accounts["waiting"] == accounts["inside"] == 0
    assert [hits(store, i) for i in range(CONVERSATIONS)] == [None] * CONVERSATIONS
    store.close()
    assert verify(folder).findings == []


def test_the_newest_are_known_at_once(folder):
    index = open_index(CacheFolder(folder), at_once=20)
    known = {path for key, kind in index.names() for path in records(folder, kind) if key.hex() in path.name}
    assert len(known) == 20 and index.waiting() == len(records(folder)) - 20
    oldest = min(path.stat().st_mtime for path in known)
    assert all(path.stat().st_mtime <= oldest for path in set(records(folder)) - known)
    room = dict(index.execute("SELECT name, bytes FROM ledger"))
    assert room["records"] + room["waiting"] > sum(path.stat().st_size for path in records(folder))
    index.close()
    assert verify(folder).findings == []  # what waits is no damage


def test_what_a_look_up_asks_for_is_taken_in(folder):
    """The last conversation and the first; of others only what they share with these."""
    store = MODEL.open(folder, at_once=2, behind=False)
    before = store.index.waiting()
    assert hits(store, CONVERSATIONS - 1) is None
    assert hits(store, 0) is None
    assert 0 < store.index.waiting() < before
    assert ask(MODEL, store, [9, 9, 9, 9, 9, 9], keep=False).reason == "empty"
    ask(MODEL, store, conversation(1), more=(7, 8))  # goes on from there, and stores: nothing counts twice
    store.close()
    finish(folder)


def test_a_miss_says_that_it_may_be_too_early(tmp_path):
    """Where rows alone are enough, those who share the first tokens of a block only cannot be asked for by name."""
    model, folder = MODELS["growing"], tmp_path / "c"
    store = model.open(folder)
    ask(model, store, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    store.close()
    (folder / "index.sqlite").unlink()
    store = model.open(folder, at_once=0, behind=False)
    lookup = ask(model, store, [1, 2, 3, 9, 9], keep=False)
    assert (lookup.tokens, lookup.reason) == (0, "pending")
    assert ask(model, store, [1, 2, 3, 4, 5, 6, 7, 8, 9], keep=False).reason is None
    store.close()
    store = model.open(folder)
    assert store.adopter is None or store.adopter.wait(30)
    lookup = ask(model, store, [1, 2, 3, 9, 9], keep=False)
    assert (lookup.tokens, lookup.reason) == (3, "different_tokens")
    store.close()


def test_the_rest_is_taken_in_behind(folder):
    finish(folder, at_once=3)


def test_closed_in_the_middle(folder):
    store = MODEL.open(folder, at_once=1, behind=False)
    assert hits(store, 5) is None
    store.close()
    left = [waiting(folder)]
    assert left[0] > 0
    for _ in range(3):
        MODEL.open(folder).close()
        left.append(waiting(folder))
    assert left == sorted(left, reverse=True)
    finish(folder)


KILLED = """
import sys
from pathlib import Path
from mlxkv.cache.adoption import take_in_last
from mlxkv.cache.folder import CacheFolder
from mlxkv.cache.opening import open_index
folder = CacheFolder(Path(sys.argv[1]))
index = open_index(folder, at_once=1)
files = index.all_waiting()
while take_in_last(folder, index, files, 1):
    print(len(files), flush=True)
    sys.stdin.readline()
"""


def other(folder: Path) -> subprocess.Popen[str]:
    """Another process, which takes in one record for each line that it is told."""
    command = [sys.executable, "-c", KILLED, str(folder)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, cwd=Path(__file__).parents[2])


def told(process: subprocess.Popen[str], times: int) -> None:
    assert process.stdin is not None and process.stdout is not None
    for _ in range(times):
        assert process.stdout.readline()
        process.stdin.write("\n")


@pytest.mark.parametrize("after", [1, 20])
def test_killed_in_the_middle(folder, after):
    with other(folder) as process:
        told(process, after)
        process.kill()
    assert waiting(folder) > 0
    finish(folder)


def test_another_process_takes_in_too(folder):
    with other(folder) as process:
        told(process, 3)
        finish(folder)
        process.communicate(timeout=30)
    assert process.returncode == 0


def test_two_stores_at_once(folder):
    first = MODEL.open(folder, at_once=1, behind=False)
    second, third = MODEL.open(folder), MODEL.open(folder)
    assert second.adopter is not None  # nobody waits for all of it
    assert hits(second, 0) is hits(first, 0) is hits(third, 7) is None
    assert second.adopter.wait(30) and (third.adopter is None or third.adopter.wait(30))
    for store in (first, second, third):
        store.close()
    finish(folder)


def test_a_damaged_record_among_them(folder):
    bad = {}
    for path, data in zip(records(folder)[:3], (b"", b"x" * 100, None), strict=True):
        bad[path] = data
        path.write_bytes(path.read_bytes() + b"longer" if data is None else data)
    store = MODEL.open(folder, at_once=0)
    assert store.adopter is not None and store.adopter.wait(30)
    assert not store.index.any_waiting()
    assert [path.exists() for path in bad] == [False, False, True]
    assert store.index.charge() >= weigh(folder)
    store.close()


def test_the_budget_while_records_wait(tmp_path):
    """Built again in less room than there is: the oldest go, and no moment of what follows is over the budget."""
    folder, budget = tmp_path / "c", 6 * MIB
    store = open_store(folder)
    for i in range(40):
        put(store, chain(store, tokens(i, 2 * BLOCK), weight=1 << 14))
        for path in records(folder):
            if path.stat().st_mtime > 2000:
                os.utime(path, (1000 + i, 1000 + i))
    store.close()
    (folder / "index.sqlite").unlink()
    assert weigh(folder) > budget
    oldest = min(records(folder), key=lambda path: path.stat().st_mtime)
    newest = max(records(folder), key=lambda path: path.stat().st_mtime)
    store = open_store(folder, budget=budget, at_once=2, behind=False)
    assert store.index.any_waiting() and newest.exists() and not oldest.exists()
    store.close()
    assert weigh(folder) <= budget
    store = open_store(folder, budget=budget)
    assert store.adopter is not None
    while not store.adopter.wait(0.002):
        assert weigh(folder) <= budget
    assert not store.index.any_waiting() and newest.exists() and weigh(folder) > budget // 2
    store.close()


def test_a_writer_that_needs_room_while_records_wait(tmp_path):
    """What was used last stays, and what it hangs on; what nobody has taken in yet is not lost for it."""
    folder, budget = tmp_path / "c", 6 * MIB
    store = open_store(folder, budget=budget)
    first = chain(store, tokens(0, BLOCK))
    put(store, first)
    for i in range(1, 20):
        put(store, chain(store, tokens(i, BLOCK)))
    store.close()
    (folder / "index.sqlite").unlink()
    now = time.time()
    for path in records(folder):  # the first was used last
        when = now if first[0].meta.key.hex() in path.name else now - 1000
        os.utime(path, (when, when))
    store = open_store(folder, budget=budget, at_once=0, behind=False)
    assert store.ledger.make_room(1, within=-1.0).bytes == 0  # no time to find out what may go: nothing goes
    assert len(records(folder)) == 40 and store.index.any_waiting()
    while store.index.any_waiting():
        put(store, chain(store, tokens(random.randrange(100, 10**6), BLOCK), weight=1 << 15))
        assert weigh(folder) <= budget
    assert len(store.index.records_of(first[0].meta.key)) == 2
    store.close()
    assert verify(folder).findings == []


def test_flipped_bytes_of_an_index_in_which_records_wait(folder):
    """A miss or the right state, and no record is lost for it."""
    open_index(CacheFolder(folder), at_once=4).close()
    data, rng, files = (folder / "index.sqlite").read_bytes(), random.Random(5), records(folder)
    names = data.index(b".safetensors")
    for n in range(24):
        place = rng.randrange(len(data)) if n % 2 else names + rng.randrange(4000) - 2000
        damaged = bytearray(data)
        damaged[place] ^= 1 << rng.randrange(8)
        (folder / "index.sqlite").write_bytes(damaged)
        store = MODEL.open(folder, at_once=2)
        for i in (0, CONVERSATIONS - 1):
            hits(store, i)  # raises for a wrong state
        store.close()
        assert records(folder) == files, (n, place)


def test_taking_in_says_how_far_it_is(folder):
    where = CacheFolder(folder)
    index = open_index(where, at_once=1)
    total, said = index.waiting(), []
    take_in_all(where, index, lambda *p: said.append(p))
    assert said[0] == (0, total) and said[-1] == (total, total) and not index.any_waiting()
    index.close()
