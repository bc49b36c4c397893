"""``LOCK``: held shared by everyone who has the folder open, exclusively by who opens or rebuilds its index alone."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

FILE = "LOCK"
_POLL = 0.05


class LockRefused(Exception):
    """The folder cannot be locked; the message says why."""


class FolderLock:
    """A lock on ``folder`` until ``close()``. ``alone``: nobody else has the folder open, nor can open it until
    ``share()``."""

    def __init__(self, folder: Path, wait: float = 120.0) -> None:
        """Waits at most so many seconds for a process that is opening or rebuilding. Raises LockRefused, OSError."""
        self._path = folder / FILE
        self.alone = False
        self._fd = -1
        until = time.monotonic() + wait
        while not self._take():
            if time.monotonic() > until:
                raise LockRefused(f"another process has been opening {folder} for {wait:.0f} s")
            time.sleep(_POLL)
        try:
            self._check_that_locks_work()
        except BaseException:
            self.close()  # or this process would wait for itself when it tries again
            raise

    def _take(self) -> bool:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            alone = _flock(fd, fcntl.LOCK_EX)
            if not alone and not _flock(fd, fcntl.LOCK_SH):
                return False
            if not _same(fd, self._path):  # removed while we waited for it
                return False
            self._fd, self.alone, fd = fd, alone, -1
            return True
        finally:
            if fd >= 0:
                os.close(fd)

    def _check_that_locks_work(self) -> None:
        check_that_locks_work(self._path)

    def share(self) -> None:
        """Let others in. Raises LockRefused."""
        if self.alone:
            self.alone = False
            until = time.monotonic() + 10
            while not _flock(self._fd, fcntl.LOCK_SH):  # changing a lock may let another process slip in between
                if time.monotonic() > until:
                    raise LockRefused("another process holds its lock")
                time.sleep(_POLL)

    def try_alone(self, wait: float) -> bool:
        """Become the only one within so many seconds; if that fails, the lock is shared as before."""
        until = time.monotonic() + wait
        while not self.alone and not (_flock(self._fd, fcntl.LOCK_EX)):
            if time.monotonic() > until:
                while not _flock(self._fd, fcntl.LOCK_SH):
                    time.sleep(_POLL)
                return False
            time.sleep(_POLL)
        self.alone = True
        return True

    def lost(self) -> bool:
        """Whether the file is known not to be the one that is locked: a folder that was removed is nobody's."""
        try:
            return self._fd < 0 or not _same(self._fd, self._path)
        except OSError:
            return False  # that cannot be told now

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def check_that_locks_work(path: Path) -> None:
    """Some file systems say yes to everybody. The file is locked by this process already. Raises LockRefused,
    OSError."""
    other = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if _flock(other, fcntl.LOCK_EX):
            raise LockRefused("locks do not work on its volume: two were given at once")
    finally:
        os.close(other)


def probe_locks(path: Path, fd: int) -> None:
    """Whether locks work where a new file is, of which ``fd`` is open. Raises LockRefused, OSError."""
    _flock(fd, fcntl.LOCK_EX)
    check_that_locks_work(path)


def _flock(fd: int, how: int) -> bool:
    """True if the lock was taken, False if somebody else has it. Raises LockRefused."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as e:
        raise LockRefused(f"locks do not work on its volume ({e.strerror or e})") from e


def _same(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
