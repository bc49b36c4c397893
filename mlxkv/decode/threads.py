"""Threads that use MLX: what is done on one of its own, and ending one, all of it."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def elsewhere(work: Callable[[], T], name: str) -> T:
    """What ``work()`` gives back, done on a thread of its own while this one waits; raises what it raises. No array
    that it leaves unevaluated can be used here.

    glibc has a heap for each thread. What forwards of other kinds than its own leave in an engine's makes its steps
    slower for good: 1 to 4 % were measured, with the same calls and allocations."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as e:
            failed.append(e)
        finally:
            leave_device()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    join_fully(thread)
    if failed:
        raise failed.pop()
    return done[0]


def leave_device() -> None:
    """Called last on such a thread: streams must not outlive it."""
    with contextlib.suppress(Exception):
        import mlx.core as mx

        mx.synchronize()
        mx.clear_streams()


def join_fully(thread: threading.Thread, patience: float = 10.0) -> None:
    """Join ``thread`` and wait (``patience`` seconds at most) until its system thread has ended too.

    MLX keeps Python objects in thread-local storage and frees them while the system thread ends, for which it needs the
    interpreter: one that is shutting down then ends the process ("terminate called without an active exception").
    From Python 3.13 on ``join`` itself waits for the system thread.

    A thread whose ``start()`` was interrupted (Ctrl-C) may run or may never run: it gets ``patience`` to begin.
    """
    until = time.monotonic() + patience
    while True:
        try:
            thread.join()
            break
        except RuntimeError:  # not begun yet
            if time.monotonic() > until:
                return
            time.sleep(0.001)
    if sys.version_info >= (3, 13):
        return
    task = Path(f"/proc/self/task/{thread.native_id}")
    if not task.parent.is_dir():
        time.sleep(0.2)  # no way to ask here; freeing takes some milliseconds
        return
    until = time.monotonic() + patience
    while task.exists() and time.monotonic() < until:
        time.sleep(0.001)
