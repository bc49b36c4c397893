"""kill -9 at twenty steps of an import, evenly over all of them; a re-run completes it. scripts/soak does a hundred."""

from __future__ import annotations

import pytest

from tests.cache.machine import scratch

from .kills import MODEL, Victims, killed_at, make, sizes


@pytest.fixture(scope="module")
def victims():
    source = Victims()
    yield source
    source.close()


def test_killed_at_twenty_steps(victims):
    with scratch() as base:
        make(base / "omlx")
        steps = victims.one(base / "omlx", base / "undisturbed", 0)
        assert steps is not None and steps > 100
        store = MODEL.open(base / "undisturbed")
        want = sizes(store)
        store.close()
        at = [1 + i * (steps - 1) // 19 for i in range(20)]
        for i in range(4):  # five kills of one cache, each after another part of the work is done
            killed_at(victims, base / "omlx", base / f"c{i}", at[i::4], want)
