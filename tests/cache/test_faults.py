"""Every call to the system fails in its turn, while a store opens, restores and writes: right values or misses with a
reason, nothing durable lost, and once the fault is gone the folder is sound."""

from __future__ import annotations

import contextlib
import errno
import shutil

import pytest

from mlxkv.cache.folder import FolderRefused
from mlxkv.cache.lock import FolderLock
from tests.cache.faults import CALLS, MODEL, Faults, each_turn, make_sound, tried
from tests.cache.machine import scratch


@pytest.fixture(scope="module")
def sound():
    with scratch() as folder:
        yield make_sound(folder)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_once(sound, call):
    assert each_turn(sound, call, lambda n: 1 if n < 4 else 7), f"the store never calls os.{call}"


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_from_some_time_on(sound, call):
    for first in (1, 9):
        tried(sound, call, first, 10**9, CALLS[call][-1])


@pytest.mark.parametrize("call", ["write", "preadv"])
def test_calls_that_do_half_of_what_was_asked(sound, call):
    assert tried(sound, call, 1, 10**9, None).hit > 20


def test_an_opening_that_fails_leaves_no_lock_behind(sound):
    """Each of the first opens fails: the next try in this process must not wait for the one before."""
    with scratch() as folder:
        shutil.copytree(sound / "c", folder / "c")
        for n in range(1, 40):
            with Faults(folder / "c", "open", n, n, errno.EMFILE) as faults, contextlib.suppress(FolderRefused):
                MODEL.open(folder / "c").close()
            with contextlib.closing(FolderLock(folder / "c", wait=0)) as lock:
                assert lock.alone, f"open number {n}"
            if not faults.hit:
                break
        assert n > 5
