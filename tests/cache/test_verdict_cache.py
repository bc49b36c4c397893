"""What is known of keys while requests want them: the table of reference/state-handoff.md §E.2, with real files.

The tier of this test reads blocks of 16 bytes in order, and stops at the first that fails. A file that is longer than
it should be is a miss here, and kept (DESIGN §4).
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from pathlib import Path

import pytest

from mlxkv.cache.verdicts import Verdict, Verdicts

SIZE = 16
KEYS = ["k0", "k1", "k2", "k3"]
SIGN = {Verdict.HIT: "H", Verdict.MISS: "M", Verdict.RETRY: "R"}


class Tier:
    """A folder of blocks. ``steps`` are what worker threads would do, done when ``settle`` is called."""

    def __init__(self, folder: Path, kind: type[Verdicts] = Verdicts) -> None:
        self.folder = folder
        self.steps: deque = deque()
        self.verdicts: Verdicts[str] = kind(lambda keys: {k: (folder / k).exists() for k in keys}, self.steps.append)
        self.loads = 0
        for i, key in enumerate(KEYS):
            (folder / key).write_bytes(bytes([i]) * SIZE)

    def settle(self) -> None:
        self.verdicts.flush()
        while self.steps:
            self.steps.popleft()()

    def see(self, request: str, keys=KEYS) -> str:
        for _ in range(2):
            seen = "".join(SIGN[self.verdicts.lookup(k, request)] for k in keys)
            if "R" not in seen:
                break
            self.settle()
        return seen

    def load(self, keys) -> list[bytes]:
        """Blocks that were read whole, in order, up to the first that fails."""
        self.loads += 1
        blocks: list[bytes] = []
        for key in keys:
            try:
                blocks.append(self.read(self.folder / key))
            except (OSError, ValueError):
                break
        self.verdicts.loaded(keys, len(blocks))
        return blocks

    def read(self, path: Path) -> bytes:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if (size := os.fstat(fd).st_size) > SIZE:
                raise ValueError("longer than it should be")
            if size < SIZE:
                path.unlink()
                raise ValueError("short")
            return os.read(fd, SIZE)
        finally:
            os.close(fd)


def cut(key: str, to: int):
    return lambda tier: os.truncate(tier.folder / key, to)


def loop(tier: Tier) -> None:
    (tier.folder / "k2").unlink()
    (tier.folder / "k2").symlink_to("k2")


def broken(tier: Tier) -> None:
    """Reading k1 fails; once."""
    real, left = tier.read, [1]

    def read(path: Path) -> bytes:
        if path.name == "k1" and left:
            left.pop()
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    tier.read = read


#: damage after the look-up; num_succeeded, files that are left, what r1 and r2 see, what r3 sees
TABLE = {
    "none": (lambda tier: None, 4, KEYS, "HHHH", "HHHH"),
    "k0 is cut": (cut("k0", 10), 0, ["k1", "k2", "k3"], "MMMM", "MHHH"),
    "k3 is cut": (cut("k3", 15), 3, ["k0", "k1", "k2"], "HHHM", "HHHM"),
    "k1 is empty": (cut("k1", 0), 1, ["k0", "k2", "k3"], "HMMM", "HMHH"),
    "k2 links to itself": (loop, 2, KEYS, "HHMM", "HHMH"),
    "k2 is removed": (lambda tier: (tier.folder / "k2").unlink(), 2, ["k0", "k1", "k3"], "HHMM", "HHMH"),
    "k1 cannot be read": (broken, 1, KEYS, "HMMM", "HHHH"),
    "k1 is longer": (cut("k1", 24), 1, KEYS, "HMMM", "HHHH"),
}


@pytest.mark.parametrize("case", TABLE)
def test_a_load_that_fails(case, tmp_path):
    a_load_that_fails(case, Tier(tmp_path))


def a_load_that_fails(case: str, tier: Tier) -> None:
    damage, succeeded, left, seen, again = TABLE[case]
    assert tier.see("r1") == "HHHH"
    damage(tier)
    blocks = tier.load(KEYS)
    assert blocks == [bytes([i]) * SIZE for i in range(succeeded)]
    assert sorted(os.listdir(tier.folder)) == left
    assert tier.see("r1") == seen
    assert tier.see("r2") == seen, "while r1 lives, its verdicts hold for all"
    assert tier.verdicts.probed == len(KEYS), "nothing is asked for again"
    tier.verdicts.cleanup("r1")
    assert tier.see("r2") == seen, "and while r2 does"
    tier.verdicts.cleanup("r2")
    assert len(tier.verdicts) == 0
    assert tier.see("r3") == again


class WithoutMarks(Verdicts):
    """A mutant: what could not be loaded is still said to be there."""

    def mark_miss(self, keys) -> None:
        pass


class DeletesAll(Tier):
    """A mutant: whatever fails is removed, though it may be whole."""

    def read(self, path: Path) -> bytes:
        try:
            return super().read(path)
        except OSError:
            path.unlink(missing_ok=True)
            raise


@pytest.mark.parametrize("case", [case for case in TABLE if case != "none"])
def test_a_verdict_that_survives_its_load_shows(case, tmp_path):
    with pytest.raises(AssertionError):
        a_load_that_fails(case, Tier(tmp_path, WithoutMarks))


def test_a_file_that_could_not_be_opened_is_not_lost(tmp_path):
    with pytest.raises(AssertionError):
        a_load_that_fails("k2 links to itself", DeletesAll(tmp_path))


def test_a_request_that_goes_on_does_not_load_for_ever(tmp_path):
    promotes(Tier(tmp_path))


def test_without_marks_it_loads_for_ever(tmp_path):
    with pytest.raises(AssertionError):
        promotes(Tier(tmp_path, WithoutMarks))


def promotes(tier: Tier) -> None:
    """A key that is there and cannot be loaded: 100 steps of a request that promotes what it is told is there."""
    assert tier.see("r1") == "HHHH"
    loop(tier)
    for _ in range(100):
        seen = tier.see("r1")
        held = seen.index("M") if "M" in seen else len(seen)
        if held == len(KEYS):
            tier.load(KEYS)
    assert (tier.loads, tier.verdicts.probed) == (1, 4)


def test_what_nobody_holds_is_not_marked(tmp_path):
    verdicts = Tier(tmp_path).verdicts
    verdicts.mark_miss(["k0", "other"])
    assert (len(verdicts), verdicts.probed) == (0, 0)


def test_a_probe_that_comes_late_does_not_win(tmp_path):
    tier = Tier(tmp_path)
    assert tier.verdicts.lookup("k0", "r1") is Verdict.RETRY
    tier.verdicts.flush()
    tier.verdicts.mark_miss(["k0"])
    assert tier.see("r1", ["k0"]) == "M"
    tier.settle()
    assert tier.see("r1", ["k0"]) == "M"


def test_a_failed_batch_marks_all_of_its_keys_unless_told_otherwise(tmp_path):
    verdicts = Tier(tmp_path)
    assert verdicts.see("r1") == "HHHH"
    assert verdicts.verdicts.loaded(["k0", "k1"], None) == ["k0", "k1"]
    assert verdicts.verdicts.loaded(["k2", "k3"], {"k3"}) == ["k2"]
    assert verdicts.see("r1") == "MMMH"


def test_a_probe_that_raises_finds_nothing(tmp_path):
    steps: deque = deque()

    def probe(keys):
        raise OSError("no answer")

    verdicts = Verdicts(probe, steps.append)
    verdicts.lookup("k0", "r1")
    verdicts.flush()
    steps.popleft()()
    assert verdicts.lookup("k0", "r1") is Verdict.MISS


def test_where_nobody_can_ask_nothing_is_found():
    def submit(step):
        raise RuntimeError("can't start new thread")

    verdicts = Verdicts(lambda keys: dict.fromkeys(keys, True), submit)
    verdicts.lookup("k0", "r1")
    verdicts.flush()
    assert verdicts.lookup("k0", "r1") is Verdict.MISS


def test_a_request_that_ends_early(tmp_path):
    """What it alone had queued is not asked for; what another wants too is; what is in flight is forgotten once its
    result is there."""
    tier = Tier(tmp_path)
    verdicts = tier.verdicts
    for key in ("k0", "k1"):
        verdicts.lookup(key, "r1")
    verdicts.lookup("k1", "r2")
    verdicts.cleanup("r1")
    tier.settle()
    assert verdicts.probed == 1 and tier.see("r2", ["k1"]) == "H"
    verdicts.lookup("k2", "r3")
    verdicts.flush()
    verdicts.cleanup("r3")
    assert len(verdicts) == 2
    tier.settle()
    assert len(verdicts) == 1
    verdicts.lookup("k3", "r3")
    verdicts.flush()
    verdicts.cleanup("r3")
    assert verdicts.lookup("k3", "r4") is Verdict.RETRY
    tier.settle()
    assert tier.see("r4", ["k3"]) == "H" and verdicts.probed == 3, "who comes meanwhile needs no probe of its own"


def test_each_flush_asks_once_a_request(tmp_path):
    tier = Tier(tmp_path)
    for key, request in zip(KEYS, ("r1", "r1", "r2", "r2"), strict=True):
        tier.verdicts.lookup(key, request)
    tier.verdicts.flush()
    tier.verdicts.flush()
    assert len(tier.steps) == 2


def test_waiting_ends(tmp_path):
    tier = Tier(tmp_path)
    tier.verdicts.lookup("k0", "r1")
    tier.verdicts.flush()
    now = time.monotonic()
    assert not tier.verdicts.wait(["k0"], now - 1)
    assert not tier.verdicts.wait(["k0"], now + 60, lambda: True)
    tier.settle()
    assert tier.verdicts.wait(["k0"], now - 1)
