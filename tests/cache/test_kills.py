"""kill -9 at random moments of a run that does nothing but store."""

from __future__ import annotations

import random

import pytest

from tests.cache.kills import Victims, killed_once
from tests.cache.machine import scratch


@pytest.fixture(scope="module")
def victims():
    source = Victims()
    yield source
    source.close()


def test_killed_twenty_times(victims):
    rng = random.Random(9)
    with scratch() as folder:
        assert sum(killed_once(victims, folder / "c", rng) for _ in range(20)) > 0
