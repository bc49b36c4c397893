"""What a service runs, and the file that tells the system so: a launchd property list, or a systemd unit."""

from __future__ import annotations

import plistlib
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError

#: seconds from SIGTERM to SIGKILL, beside those that running answers have: what waits for the disk is written
WRITING = 60


@dataclass(frozen=True)
class Job:
    """A command with its environment. ``errors``: the file that stdout and stderr go to. ``stop_s``: seconds that it
    has to end."""

    command: tuple[str, ...]
    errors: Path
    environment: dict[str, str] = field(default_factory=dict)
    stop_s: int = WRITING

    def plist(self, label: str) -> bytes:
        """For launchd: started at login, and again when it fails, not when it was stopped. ``Interactive``: at full
        speed, whatever else the user does; other types are slowed down."""
        return plistlib.dumps(
            {
                "Label": label,
                "ProgramArguments": list(self.command),
                "EnvironmentVariables": self.environment,
                "WorkingDirectory": str(Path.home()),
                "RunAtLoad": True,
                "KeepAlive": {"SuccessfulExit": False},
                "ThrottleInterval": 30,
                "ExitTimeOut": self.stop_s,
                "ProcessType": "Interactive",
                "Umask": 0o077,
                "StandardOutPath": str(self.errors),
                "StandardErrorPath": str(self.errors),
            },
            sort_keys=False,
        )

    def unit(self) -> bytes:
        """For systemd: started with the user's session, and again when it fails, unless the reason (settings, a model
        that cannot be loaded) would be the same."""
        lines = [
            "[Unit]",
            "Description=mlxkv, a server of language models",
            "StartLimitIntervalSec=600",
            "StartLimitBurst=5",
            "",
            "[Service]",
            f"ExecStart={' '.join(map(_quoted, self.command))}",
            "ExecReload=/bin/kill -HUP $MAINPID",
            *(f"Environment={_quoted(f'{name}={value}', dollars=False)}" for name, value in self.environment.items()),
            "WorkingDirectory=%h",
            "Restart=on-failure",
            "RestartSec=10",
            "RestartPreventExitStatus=2 3",
            f"TimeoutStopSec={self.stop_s}",
            "KillMode=mixed",
            "UMask=0077",
            f"StandardOutput=append:{_percent(str(self.errors))}",
            f"StandardError=append:{_percent(str(self.errors))}",
            "",
            "[Install]",
            "WantedBy=default.target",
            "",
        ]
        return "\n".join(lines).encode("utf-8", "surrogateescape")

    @staticmethod
    def read(data: bytes) -> Job:
        """From either file. Raises ValueError for what is no such file."""
        if data.lstrip().startswith(b"<"):
            return _from_plist(data)
        return _from_unit(data.decode("utf-8", "surrogateescape"))


def _from_plist(data: bytes) -> Job:
    try:
        found: dict[str, Any] = plistlib.loads(data)
        return Job(
            tuple(found["ProgramArguments"]),
            Path(found["StandardErrorPath"]),
            found.get("EnvironmentVariables", {}),
            int(found.get("ExitTimeOut", WRITING)),
        )
    except (plistlib.InvalidFileException, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no property list of mlxkv's ({error})") from None
    except Exception as error:  # expat's own error has no common base
        raise ValueError(f"no property list ({error})") from None


def _from_unit(text: str) -> Job:
    command: tuple[str, ...] = ()
    errors, environment, stop = "", {}, WRITING
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key == "ExecStart":
            command = tuple(_unquoted(value))
        elif key == "Environment":
            for pair in _unquoted(value, dollars=False):
                name, _, text = pair.partition("=")
                environment[name] = text
        elif key == "TimeoutStopSec":
            stop = int(value)
        elif key == "StandardError":
            errors = value.removeprefix("append:").replace("%%", "%")
    if not command or not errors:
        raise ValueError("no unit of mlxkv's")
    return Job(command, Path(errors), environment, stop)


def _percent(text: str) -> str:
    return text.replace("%", "%%")


def _quoted(text: str, dollars: bool = True) -> str:
    """One word of a unit: specifiers (%), variables ($, in commands) and escapes stand for themselves."""
    if not text.isprintable():
        raise ConfigError(f"{text!r} has a character that a unit file cannot hold.", "Leave it out.")
    text = _percent(text).replace("\\", "\\\\").replace('"', '\\"')
    if dollars:
        text = text.replace("$", "$$")
    return text if re.fullmatch(r"[\w@%+=:,./$-]+", text) else f'"{text}"'


def _unquoted(text: str, dollars: bool = True) -> list[str]:
    words = [word.replace("%%", "%") for word in shlex.split(text)]
    return [word.replace("$$", "$") for word in words] if dollars else words
