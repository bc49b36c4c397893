"""A Mac is kept awake by ``caffeinate``, here a script that writes down what it was asked for."""

from __future__ import annotations

import os
import sys
import time

import pytest

from mlxkv.cli.awake import awake


@pytest.fixture
def caffeinate(tmp_path, monkeypatch):
    script = tmp_path / "bin" / "caffeinate"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\necho "$@" $$ >> "$0.log"\nexec sleep 60\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
    monkeypatch.setattr(sys, "platform", "darwin")

    def calls(seconds=10.0):
        """What it was asked, a line a call; waits for the first one."""
        until = time.monotonic() + seconds
        log = script.with_suffix(".log")
        while not (log.exists() and log.read_text().endswith("\n")) and time.monotonic() < until:
            time.sleep(0.01)
        return log.read_text().splitlines() if log.exists() else []

    return calls


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("after", [0, 0.05])
def test_as_long_as_it_takes(caffeinate, after):
    with awake(after=after):
        (call,) = caffeinate()
        *asked, pid = call.split()
        assert asked == ["-i", "-w", str(os.getpid())] and alive(int(pid))
    assert not alive(int(pid))


def test_not_for_what_is_short_nor_unasked_nor_elsewhere(caffeinate, monkeypatch):
    with awake(after=60):
        pass
    with awake(False):
        pass
    monkeypatch.setattr(sys, "platform", "linux")
    with awake():
        pass
    assert caffeinate(0.2) == []


@pytest.mark.parametrize(("flags", "expected"), [([], True), (["--let-sleep"], False)])
def test_a_server_keeps_its_mac_awake(caffeinate, monkeypatch, cli, model, flags, expected):
    """What it does there is played here."""
    seen = []

    async def run(self):
        seen.append(bool(caffeinate(5.0 if expected else 0.2)))

    monkeypatch.setattr("mlxkv.cli.serve._Process.run", run)
    assert cli("serve", "--port", 0, "--model", model, *flags).code == 0
    assert seen == [expected]
