"""How far blocks lead, by the verdicts of each: the tables of reference/state-handoff.md, D.2, and by brute force."""

from __future__ import annotations

import itertools
import random

import pytest

from mlxkv.cache.reach import Asked, reach
from mlxkv.cache.rules import required_blocks, window_blocks
from mlxkv.cache.verdicts import Verdict
from tests.cache.test_rules import Ruled

VERDICTS = {"H": Verdict.HIT, "M": Verdict.MISS, "P": Verdict.PENDING, "R": Verdict.RETRY}
T = 1024
ALL, CHUNKED, STATE = Ruled("growing"), Ruled("chunked", 8192), Ruled("recurrent")


class InWindows(Asked):
    """The need of places that know windows in whole blocks only, as the vectors of D.2 do."""

    def need(self, position):
        return window_blocks(self.member, self.block) or super().need(position)


def asked(member, verdicts: str, block: int = 1, first: int = 0, kind=Asked) -> Asked:
    return kind(member, block, lambda i: VERDICTS[verdicts[i]], first)


def deepest(member, verdicts: str) -> int | None:
    group = asked(member, verdicts)
    end = group.deepest(len(verdicts))
    return None if group.deferred else end


@pytest.mark.parametrize(
    ("verdicts", "end"),
    [
        ("HHHH", 4),
        ("HHMH", 2),
        ("MHHH", 0),
        ("", 0),
        ("HPHM", None),
        ("HRMH", None),
        ("RRRR", None),
        ("MR", 0),
    ],
)
def test_members_of_all_rows_are_looked_up_from_the_first_block(verdicts, end):
    assert deepest(ALL, verdicts) == end


@pytest.mark.parametrize(
    ("verdicts", "window", "end"),
    [
        ("HHHHHHHH", 3, 8),
        ("HHHHHMHH", 3, 5),
        ("MMHHHMHH", 3, 5),
        ("HHMMMMMM", 3, 2),
        ("HHMMMMMM", 2, 2),
        ("HMMMMMMM", 3, 1),
        ("MMMMMMMM", 3, 0),
        ("MHHHMHHM", 2, 7),
        ("HHHM", 3, 3),
        ("MHH", 3, 0),  # too short, and it does not touch the first
        ("HHM", 3, 2),
        ("HHHP", 3, None),
        ("HHHR", 3, None),
        ("M", 1, 0),
        ("MH", 1, 2),
    ],
)
def test_windows_are_looked_up_from_the_last_block(verdicts, window, end):
    assert deepest(Ruled("window", window), verdicts) == end


#: (tokens, verdicts of the group beside one of all rows, of that one, tokens computed, in whole windows, exactly)
WHOLE = {
    "all are there": (CHUNKED, 20_480, "H" * 20, "H" * 20, 0, 20_479, 20_479),
    # what is needed at 20,479 begins at 16,384: the hole lies before
    "a hole": (CHUNKED, 20_480, "H" * 12 + "M" + "H" * 7, "H" * 20, 0, 12_288, 20_479),
    "a hole in its chunk": (CHUNKED, 20_480, "H" * 17 + "M" + "H" * 2, "H" * 20, 0, 17_408, 17_408),
    # at 8,192 a chunk begins, which needs nothing of those before
    "a run of 7": (CHUNKED, 20_480, "M" + "H" * 7 + "M" * 12, "H" * 15 + "M" * 5, 0, 0, 8192),
    "4,096 are here": (CHUNKED, 20_480, "H" * 20, "H" * 20, 4096, 16_383, 16_383),
    "fewer rows": (CHUNKED, 20_480, "H" * 20, "H" * 9 + "M" * 11, 0, 9216, 9216),
    "only the last 8": (CHUNKED, 20_481, "M" * 12 + "H" * 8 + "M", "H" * 20 + "M", 0, 20_480, 20_480),
    "a state": (STATE, 20_480, "MMMMH" + "M" * 15, "H" * 20, 0, 5120, 5120),
    "less than a block": (CHUNKED, 1024, "H", "H", 0, 0, 0),
    "nothing": (CHUNKED, 20_480, "M" * 20, "M" * 20, 0, 0, 0),
    "not known yet": (CHUNKED, 20_480, "H" * 19 + "R", "H" * 20, 0, None, None),
    "loaded by another": (CHUNKED, 20_480, "H" * 19 + "P", "H" * 20, 0, None, None),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_look_up(name):
    member, tokens, verdicts, rows, computed, in_windows, exact = WHOLE[name]
    for kind, expected in ((InWindows, in_windows), (Asked, exact)):
        groups = [asked(member, verdicts, T, computed // T, kind), asked(ALL, rows, T, computed // T, kind)]
        assert reach(groups, tokens, computed) == expected
        if expected:
            end = computed + expected
            assert all(VERDICTS[verdicts[i]] is Verdict.HIT for i in groups[0].wanted(end))
            assert groups[1].wanted(end) == range(computed // T, -(-end // T))


def test_windows_are_counted_again_where_the_rest_ends_earlier():
    """Not from the prompt's end: what is whole there need not be whole where the rows end."""
    window = asked(Ruled("window", 3), "HMMHHHMMHHHH")
    assert reach([window, asked(ALL, "HHHHHHHHMMMM")], 12) == 6
    assert window.wanted(6) == range(3, 6)


def truth(members, verdicts, block, tokens) -> int:
    """The last place that is the limit or a block's end at which all blocks that hold visible rows are there."""
    limit = tokens - any(m.kind != "growing" for m in members)
    for n in sorted({limit, *range(0, limit + 1, block)}, reverse=True):
        if n < block:
            return 0
        for m, there in zip(members, verdicts, strict=True):
            if m.kind == "recurrent":
                blocks = {n // block - 1} if n % block == 0 else {-1}
            else:
                size = m.window or 1
                low = {"growing": 0, "window": max(0, n - size), "chunked": n // size * size}[m.kind]
                blocks = {p // block for p in range(low, n)}
            if -1 in blocks or any(there[i] != "H" for i in blocks):
                break
        else:
            return n
    return 0


def look_ups(count: int):
    rng = random.Random(7)
    for _ in range(count):
        block, blocks = rng.randint(1, 5), rng.randint(1, 12)
        kinds = [ALL, Ruled("window", rng.randint(1, 12)), Ruled("chunked", rng.randint(1, 20)), STATE]
        members = rng.sample(kinds, rng.randint(1, 4))
        tokens = (blocks - 1) * block + rng.randint(1, block)
        odds = rng.choice([0.5, 0.8, 0.95])
        verdicts = ["".join("H" if rng.random() < odds else "M" for _ in range(blocks)) for _ in members]
        yield members, verdicts, block, tokens


def found(members, verdicts, block, tokens, kind=Asked) -> int | None:
    return reach([asked(m, v, block, kind=kind) for m, v in zip(members, verdicts, strict=True)], tokens)


def test_any_look_up_ends_at_the_last_place_that_is_whole():
    for look_up in look_ups(2000):
        assert found(*look_up) == truth(*look_up), look_up


class Floor(Asked):
    """A mutant: whole blocks, rounded down."""

    def need(self, position):
        return super().need(position) if self.member.window is None else self.member.window // self.block


class FromTheEnd(Asked):
    """A mutant: what is needed at the first place that is looked at, the prompt's end, at every other."""

    at = 0

    def need(self, position):
        self.at = self.at or position
        return required_blocks(self.member, self.block, self.at)


class ShortRun(Asked):
    """A mutant: a short run in the middle is enough."""

    def need(self, position):
        return min(1, super().need(position))


@pytest.mark.parametrize("mutant", [Floor, FromTheEnd, ShortRun])
def test_mutants_claim_what_is_not_whole(mutant):
    for look_up in itertools.islice(look_ups(2000), 500):
        if (found(*look_up, kind=mutant) or 0) > truth(*look_up):
            return
    pytest.fail("it is as good as the original")


def test_no_block_is_asked_for_twice_nor_one_that_is_here_or_not_needed():
    told: list[int] = []

    def verdict(i: int) -> Verdict:
        told.append(i)
        return Verdict.HIT

    assert reach([Asked(CHUNKED, T, verdict, first=4)], 20_480, 4096) == 16_383
    assert sorted(told) == [16, 17, 18, 19]
