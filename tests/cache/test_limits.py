"""Limits that the system itself sets, and a clock that goes back."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tests.cache.limits import LIMITS
from tests.cache.machine import scratch
from tests.cache.synthetic import MODELS, ask, verify


def test_limits_of_the_system():
    """RLIMIT_FSIZE, RLIMIT_NOFILE, and folders that become read-only."""
    # without no_permission elsewhere: root gives up its rights as Linux knows them
    names = [n for n in LIMITS if n != "no_permission" or sys.platform.startswith("linux")]
    with scratch() as folder:
        command = [sys.executable, "-m", "tests.cache.limits", str(folder), *names]
        done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("stops writing") == len(names) - 1  # said once for each limit that lasts


def test_a_clock_that_goes_back(monkeypatch):
    """Hours at a time, between and within requests, and back to 1970."""
    model, now = MODELS["list"], [2e9]

    def earlier() -> float:
        now[0] = max(0.0, now[0] - 7200)
        return now[0]

    monkeypatch.setattr(time, "time", earlier)
    monkeypatch.setattr(time, "time_ns", lambda: int(earlier() * 1e9))
    with scratch() as folder:
        for n in range(5, 12):
            store = model.open(folder / "c")
            prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3][:n]
            for _ in range(2):
                ask(model, store, prompt, ends=(3,))
                assert store.writer.flush(20)
            assert ask(model, store, prompt, keep=False).reason is None
            if n == 9:
                now[0] = 30000.0
            verify(folder / "c", store)
            assert not store.faults and not store.writer.counters.faults
            store.close()
