"""Reader threads: they do the tasks of jobs beside the engine's thread. Host bytes only, never MLX.

A job's tasks are begun in order, by whoever has time: a few threads, and the one that needs the job done. Threads live
as long as there is something to begin, so that nothing waits anywhere while nothing is read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

#: threads of one pool: what a disk and the checksums can use, and each has a record open at most
THREADS = 4

Task = Callable[[], None]
E = TypeVar("E", bound=Exception)


class Job:
    """Tasks that are begun in order. After one has failed, or ``stop()``, no other is begun."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._tasks = deque(tasks)
        self._begun = self._running = 0
        self._failed: tuple[int, Exception] | None = None
        self._changed = threading.Condition()

    @property
    def left(self) -> int:
        """How many tasks are still to be begun."""
        return len(self._tasks)

    @property
    def running(self) -> int:
        """How many threads are at it."""
        return self._running

    @property
    def ended(self) -> bool:
        """Whether no thread does anything for it, now or later."""
        with self._changed:
            return not self._tasks and not self._running

    @property
    def error(self) -> Exception | None:
        """Of the first task, in their order, that failed; the same whatever the threads did meanwhile, since all before
        it were done. Without the frames that raised it, which hold views."""
        return None if self._failed is None else self._failed[1]

    def step(self) -> bool:
        """Do the next task on this thread; False if there is none to begin."""
        begun = self.begin()
        if begun is not None:
            self.do(*begun)
        return begun is not None

    def begin(self) -> tuple[int, Task] | None:
        """Take the next task; whoever takes one must ``do`` it."""
        with self._changed:
            if not self._tasks:
                return None
            self._begun += 1
            self._running += 1
            return self._begun, self._tasks.popleft()

    def do(self, number: int, task: Task) -> None:
        error: Exception | None = None
        try:
            task()
        except Exception as e:
            error = bare(e)
        finally:
            del task  # before anybody hears that it is done: what it refers to is not to be kept from here
            with self._changed:
                self._running -= 1
                if error is not None:
                    self._tasks.clear()
                    if self._failed is None or number < self._failed[0]:
                        self._failed = number, error
                self._changed.notify_all()

    def stop(self) -> None:
        """Begin no more tasks."""
        with self._changed:
            self._tasks.clear()
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Until it has ended; False on time-out (seconds)."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._tasks and not self._running, timeout)

    def help(self) -> None:
        """Have it ended as soon as can be: this thread does what nobody has begun."""
        while self.step():
            pass
        self.wait()


class Readers:
    """At most ``most`` threads for all jobs that are submitted; several jobs take turns. No job has all of them, where
    there are several: what its files' disk does not answer would keep the others waiting."""

    def __init__(self, most: int = THREADS, name: str = "mlxkv-reader") -> None:
        self._most, self._each, self._name = most, max(1, most - 1), name
        self._jobs: deque[Job] = deque()
        self._threads = 0
        self._lock = threading.Condition()

    def submit(self, job: Job) -> None:
        """Have the job done. Where no thread can be started, it is done here and now."""
        with self._lock:
            self._jobs.append(job)
            more = min(job.left, self._each, self._most - self._threads)
            self._threads += more
        started = 0
        try:
            for _ in range(more):
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
                started += 1
        except RuntimeError:  # the system has no more
            with self._lock:
                self._threads -= more - started
                alone = self._threads == 0
            if alone:
                job.help()

    def wait(self, timeout: float) -> bool:
        """Until no thread is left; False on time-out (seconds)."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._threads, timeout)

    def _work(self) -> None:
        while (begun := self._next()) is not None:
            job, number, task = begun
            del begun
            job.do(number, task)
            del job, task

    def _next(self) -> tuple[Job, int, Task] | None:
        """A task that this thread has begun; None: it is not needed any more."""
        with self._lock:
            self._jobs = deque(job for job in self._jobs if job.left)
            for job in self._jobs:
                if job.running < self._each and (begun := job.begin()) is not None:
                    self._jobs.remove(job)
                    self._jobs.append(job)  # the others first
                    return job, *begun
            self._threads -= 1
            self._lock.notify_all()
            return None


def bare(error: E) -> E:
    """The error without the frames and errors that led to it: they hold views of what was read into."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error
