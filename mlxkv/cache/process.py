"""Who holds something in a folder that several processes share: a process, told apart from later ones with its id."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """``started`` and ``boot`` are texts that only compare; '' where the system does not say. ``boot`` names the boot
    and, on Linux, the namespace that ``pid`` counts in."""

    pid: int
    started: str
    boot: str

    def alive(self) -> bool:
        """Whether it may still run. What cannot be judged (another container) counts as alive."""
        here = this_process()
        if self.boot.partition(" ")[0] != here.boot.partition(" ")[0]:
            return False  # before the last boot
        if self.boot != here.boot:
            return True  # another namespace: its ids mean nothing here
        started = _started(self.pid)
        return started is not None and (started == self.started or not started or not self.started)


def this_process() -> Process:
    return _of(os.getpid())


@lru_cache(maxsize=1)
def _of(pid: int) -> Process:  # by id: a fork is another process
    return Process(pid, _started(pid) or "", _boot())


def _boot() -> str:
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "kern.bootsessionuuid") or _output("sysctl", "-n", "kern.boottime")
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When a process started; '' if it runs and the system does not say, None if it does not run."""
    if sys.platform == "darwin":
        state, _, started = _output("ps", "-o", "stat=,lstart=", "-p", str(pid)).partition(" ")
        return None if not state or state.startswith("Z") else started.strip()
    try:
        # fields after the name, which may hold anything: state is the first, the start (ticks since boot) the 20th
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return None
    except (OSError, IndexError):
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except (OSError, OverflowError):
        pass
    return ""


def _output(*command: str) -> str:
    try:
        environ = os.environ | {"LC_ALL": "C"}
        return subprocess.run(command, capture_output=True, text=True, timeout=5, env=environ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
