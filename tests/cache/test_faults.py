"""Every call to the system fails in its turn, while a store opens, restores and writes: right values or misses with a
reason, nothing durable lost, and once the fault is gone the folder is sound."""

from __future__ import annotations

import pytest

from tests.cache.faults import CALLS, each_turn, make_sound, tried
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
