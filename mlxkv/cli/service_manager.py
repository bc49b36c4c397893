"""Who keeps a service running: launchd on a Mac, the user's systemd on Linux. Each is asked through its own command."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..config import config_home
from ..errors import ConfigError, MlxkvError
from .service_job import Job

#: seconds that a manager may take, for the server that it stops
PATIENCE = 600
#: what bootout ends with while the server still drains (EINPROGRESS on a Mac)
IN_PROGRESS = 36

LABEL = "local.mlxkv.serve"
UNIT = "mlxkv.service"


class ServiceError(MlxkvError):
    """The system's manager of services refused, or cannot be spoken to; the message has its own words."""

    exit_code = 1
    code = "service_failed"


@dataclass(frozen=True)
class State:
    """What the manager says. ``exit``: of the last time that it ended, None if that is not known."""

    running: bool
    pid: int | None = None
    exit: int | None = None
    word: str = ""


class Manager(Protocol):
    path: Path

    def text(self, job: Job) -> bytes: ...

    def commands(self, what: str) -> list[list[str]]:
        """What ``install`` or ``uninstall`` runs, in order."""
        ...

    def check(self) -> None:
        """Raises ConfigError where there is no such manager, ServiceError where it cannot be spoken to."""
        ...

    def start(self) -> None:
        """Have it run what the file says, now and from now on. Raises ServiceError."""
        ...

    def stop(self) -> None:
        """Have it end, and not start again. Raises ServiceError."""
        ...

    def forget(self) -> None:
        """After the file was removed."""
        ...

    def state(self) -> State: ...


def manager() -> Manager:
    """The one of this system. Raises ConfigError."""
    if sys.platform == "darwin":
        return Launchd()
    if sys.platform == "linux":
        return Systemd()
    raise ConfigError(f"Services are not known for {sys.platform}.", "Run mlxkv serve by other means.")


class Launchd:
    """A LaunchAgent in the user's login session."""

    def __init__(self) -> None:
        self.path = Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        self._domain = f"gui/{os.getuid()}"
        self._target = f"{self._domain}/{LABEL}"

    def text(self, job: Job) -> bytes:
        return job.plist(LABEL)

    def commands(self, what: str) -> list[list[str]]:
        out = ["launchctl", "bootout", self._target]
        if what == "uninstall":
            return [out]
        enable = ["launchctl", "enable", self._target]
        return [out, enable, ["launchctl", "bootstrap", self._domain, str(self.path)]]

    def check(self) -> None:
        _tool("launchctl")
        code, words = _run(["launchctl", "print", self._domain])
        if code:
            raise ServiceError(
                f"launchctl cannot reach the login session of this user: {words}.",
                "Log in at the Mac's own screen; agents live in that session, not in one of ssh's.",
            )

    def start(self) -> None:
        self.stop()
        _, *rest = self.commands("install")
        for command in rest:
            _must(command)

    def stop(self) -> None:
        if not self._loaded():
            return
        command = self.commands("uninstall")[0]
        code, words = _run(command)
        if code not in (0, IN_PROGRESS) and self._loaded():
            raise _failed(command, code, words)
        # bootout comes back before a process has ended that takes its time
        until = time.monotonic() + PATIENCE
        while self._loaded():
            if time.monotonic() > until:
                raise ServiceError(f"{LABEL} does not end.", "See its log, and try again.")
            time.sleep(0.2)

    def forget(self) -> None:
        pass  # bootout has forgotten it

    def state(self) -> State:
        code, words = _run(["launchctl", "print", self._target])
        if code:
            return State(False, word="not loaded")
        word = _found(r"^\s*state = (.+)$", words) or ""
        pid, ended = _found(r"^\s*pid = (\d+)", words), _found(r"^\s*last exit code = (\d+)", words)
        return State(pid is not None, int(pid) if pid else None, int(ended) if ended else None, word)

    def _loaded(self) -> bool:
        return _run(["launchctl", "print", self._target])[0] == 0


class Systemd:
    """A unit of the user's own systemd."""

    def __init__(self) -> None:
        self.path = config_home() / "systemd" / "user" / UNIT

    def text(self, job: Job) -> bytes:
        return job.unit()

    def commands(self, what: str) -> list[list[str]]:
        asked = [["disable", "--now", UNIT]]
        if what == "install":
            asked = [["daemon-reload"], ["enable", UNIT], ["restart", UNIT]]
        return [["systemctl", "--user", *words] for words in asked]

    def check(self) -> None:
        _tool("systemctl")
        code, words = _run(["systemctl", "--user", "show-environment"])
        if code:
            raise ServiceError(
                f"systemctl cannot reach the systemd of this user: {words}.",
                "Log in as this user, rather than by su or sudo; in a container there is none.",
            )

    def start(self) -> None:
        for command in self.commands("install"):
            _must(command)

    def stop(self) -> None:
        if self.path.exists():
            _must(self.commands("uninstall")[0])

    def forget(self) -> None:
        _must(["systemctl", "--user", "daemon-reload"])

    def state(self) -> State:
        asked = ["ActiveState", "SubState", "MainPID", "ExecMainStatus", "ExecMainExitTimestampMonotonic"]
        code, words = _run(["systemctl", "--user", "show", UNIT, "--property=" + ",".join(asked)])
        told = {name: value for name, _, value in (line.partition("=") for line in words.splitlines())}
        if code or "ActiveState" not in told:
            return State(False, word=words)
        pid = int(told.get("MainPID") or 0)
        # the status is that of the last end, and 0 where there was none
        ended = int(told["ExecMainStatus"]) if told.get("ExecMainExitTimestampMonotonic", "0") != "0" else None
        word = told["ActiveState"] + (f" ({told['SubState']})" if told.get("SubState") else "")
        return State(told["ActiveState"] == "active" and pid > 0, pid or None, ended, word)


def _tool(name: str) -> None:
    if shutil.which(name) is None:
        raise ConfigError(
            f"There is no {name} here, so no service can be installed.",
            "Run mlxkv serve by other means; --dry-run shows what would be installed.",
        )


def _run(command: list[str]) -> tuple[int, str]:
    """Exit code, and what it said."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        return 124, f"{command[0]} did not answer"
    except OSError as error:
        return 127, f"{command[0]}: {error.strerror}"
    said = done.stdout if done.returncode == 0 else done.stderr.strip() or done.stdout.strip()
    return done.returncode, said if done.returncode == 0 else " ".join(said.split()).rstrip(".") or "it says nothing"


def _must(command: list[str]) -> None:
    code, words = _run(command)
    if code:
        raise _failed(command, code, words)


def _failed(command: list[str], code: int, words: str) -> ServiceError:
    return ServiceError(f"{' '.join(command)} ended with {code}: {words}.")


def _found(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1].strip() if found else None
