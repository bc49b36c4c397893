"""``mlxkv service``: the files that it writes, and what it asks launchd and systemd for, played by scripts here."""

from __future__ import annotations

import json
import os
import plistlib
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from mlxkv.cli.service_job import Job

ROOT = Path(__file__).parents[2]
ODD = 'sp ace "quoted" back\\slash 100% $HOME ümlaut'


@pytest.fixture
def tool(home, monkeypatch):
    """``tool(name, script)``: a command of that name, which writes down its arguments; the rest of PATH is hidden."""
    folder = home / "bin"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))

    def make(name, script=""):
        made = folder / name
        made.write_text(f'#!/bin/sh\necho "$@" >> "{home}/asked"\ncd "{home}"\n{script}\n')
        made.chmod(0o755)

    return make


@pytest.fixture
def asked(home):
    def lines():
        found = (home / "asked").read_text().splitlines() if (home / "asked").exists() else []
        (home / "asked").unlink(missing_ok=True)
        return found

    return lines


@pytest.fixture
def systemd(tool):
    """Runs, once it was started: as pid 12."""
    tool(
        "systemctl",
        """case "$2" in
        restart) : > running; ;;
        disable) /bin/rm -f running ;;
        show)
            if [ -e running ]; then echo "ActiveState=active
SubState=running
MainPID=12
ExecMainStatus=0
ExecMainExitTimestampMonotonic=0"
            else echo "ActiveState=failed
SubState=failed
MainPID=0
ExecMainStatus=3
ExecMainExitTimestampMonotonic=99"
            fi ;;
        esac""",
    )


@pytest.fixture
def launchd(tool, monkeypatch):
    """Ends what it runs a while after bootout has said that it did."""
    monkeypatch.setattr(sys, "platform", "darwin")
    for name in ("CACHE", "DATA", "CONFIG", "STATE"):
        monkeypatch.delenv(f"XDG_{name}_HOME", raising=False)
    tool(
        "launchctl",
        """case "$1 $2" in
        bootstrap*) [ ! -e refuse ] || { echo "Bootstrap failed: 5: Input/output error" >&2; exit 5; }
            : > loaded ;;
        bootout*) [ -e loaded ] || exit 3; [ ! -e keep ] || { echo "Not permitted" >&2; exit 1; }
            /bin/mv loaded ending; echo "Boot-out failed: 36: Operation now in progress" >&2; exit 36 ;;
        "print gui/"*/local.mlxkv.serve)
            [ ! -e ending ] || { /bin/rm ending; exit 0; }
            [ -e loaded ] || { echo "Could not find service" >&2; exit 113; }
            printf '%s\\n' "gui = {" "	state = running" "	pid = 12" "	last exit code = (never exited)" "}" ;;
        esac""",
    )


def test_a_unit(cli, systemd, asked, home):
    made = cli("service", "install", "--port", 4321, "--model", "org/name", "--no-cache")
    assert made.code == 0 and "http://127.0.0.1:4321" in made.out and "enable-linger" in made.out
    assert [line.split()[1] for line in asked()] == ["show-environment", "daemon-reload", "enable", "restart"]
    file = home / "config" / "systemd" / "user" / "mlxkv.service"
    assert str(file) in made.out and stat.S_IMODE(file.stat().st_mode) == 0o600
    job = Job.read(file.read_bytes())
    logs = home / "state" / "mlxkv"
    assert job.command[-5:-1] == ("serve", "--model=org/name", "--port=4321", "--no-cache")
    assert job.command[-1] == f"--log-file={logs}/serve.log" in job.command
    assert job.errors == logs / "serve.err" and logs.is_dir()
    found = cli("service", "status", "--json")
    assert found.code == 1 and found.json == {
        "installed": True,
        "file": str(file),
        "running": True,
        "pid": 12,
        "exit": None,
        "state": "active (running)",
        "url": "http://127.0.0.1:4321",
        "ready": False,
        "reason": "There is no server at http://127.0.0.1:4321: Connection refused.",
        "log": str(logs / "serve.log"),
        "errors": str(logs / "serve.err"),
    }
    asked()
    assert cli("service", "uninstall").code == 0 and not file.exists()
    assert [line.split()[1] for line in asked()] == ["show-environment", "disable", "daemon-reload"]
    assert cli("service", "uninstall").out == "It is not installed.\n"
    none = cli("service", "status")
    assert none.code == 1 and "not installed" in none.out


def test_a_service_that_has_failed_shows_the_end_of_its_log(cli, systemd, home):
    cli("service", "install", "--port", 4321)
    (home / "running").unlink()
    (home / "state" / "mlxkv" / "serve.err").write_text("early\n" * 9 + "error: \x1b[31mno such model\n")
    found = cli("service", "status")
    assert found.code == 1
    assert "none (failed (failed), last ended with 3)" in found.out
    assert "  error: [31mno such model\n" in found.err and found.err.count("early") == 4


def test_a_launch_agent(cli, launchd, asked, home):
    file = home / "Library" / "LaunchAgents" / "local.mlxkv.serve.plist"
    domain = f"gui/{os.getuid()}"
    made = cli("service", "install", "--port", 4321)
    assert made.code == 0 and str(file) in made.out and "linger" not in made.out
    started = [f"enable {domain}/local.mlxkv.serve", f"bootstrap {domain} {file}"]
    assert asked() == [f"print {domain}", f"print {domain}/local.mlxkv.serve", *started]
    found = plistlib.loads(file.read_bytes())
    assert found["Label"] == "local.mlxkv.serve" and found["ProgramArguments"][-3:-1] == ["serve", "--port=4321"]
    assert found["KeepAlive"] == {"SuccessfulExit": False} and found["RunAtLoad"] is True
    assert found["StandardErrorPath"] == str(home / "Library" / "Logs" / "mlxkv" / "serve.err")
    state = cli("service", "status", "--json").json
    assert (state["running"], state["pid"], state["exit"], state["state"]) == (True, 12, None, "running")
    # again, with other options: the old one must have ended before
    asked()
    assert cli("service", "install", "--port", 4322).code == 0
    calls = asked()
    assert calls[2] == f"bootout {domain}/local.mlxkv.serve" and calls[-2:] == started
    assert calls[3:-2] == [f"print {domain}/local.mlxkv.serve"] * 2  # once while it ended, once when it had
    assert cli("service", "uninstall").code == 0 and not file.exists() and not (home / "loaded").exists()


def test_what_the_manager_refuses_leaves_things_as_they_were(cli, launchd, home):
    file = home / "Library" / "LaunchAgents" / "local.mlxkv.serve.plist"
    (home / "refuse").touch()
    made = cli("service", "install", "--port", 4321)
    assert made.code == 1 and "Bootstrap failed: 5: Input/output error" in made.err and not file.exists()
    (home / "refuse").unlink()
    cli("service", "install", "--port", 4321)
    before = file.read_bytes()
    (home / "refuse").touch()
    assert cli("service", "install", "--port", 4322).code == 1 and file.read_bytes() == before
    (home / "loaded").touch()
    (home / "keep").touch()
    kept = cli("service", "uninstall")
    assert kept.code == 1 and "Not permitted" in kept.err and file.exists()


@pytest.mark.parametrize(("platform", "name"), [("darwin", "launchctl"), ("linux", "systemctl")])
def test_without_a_manager(cli, tool, monkeypatch, home, platform, name):
    monkeypatch.setattr(sys, "platform", platform)
    found = cli("service", "install")
    assert found.code == 2 and f"no {name} here" in found.err and "--dry-run" in found.err
    tool(name, 'echo "Failed to connect to bus: No medium found." >&2; exit 1')
    found = cli("service", "install")
    assert found.code == 1 and "No medium found. " in found.err and "Log in" in found.err
    assert not (home / "config").exists() and not (home / "Library").exists()
    monkeypatch.setattr(sys, "platform", "sunos5")
    assert cli("service", "install").code == 2


def test_dry_run_changes_nothing_and_shows_no_secret(cli, tool, asked, home, monkeypatch):
    monkeypatch.setenv("MLXKV_API_KEY", "hidden")
    monkeypatch.setenv("MLXKV_TOP_P", "0.5")
    found = cli("service", "install", "--dry-run", "--port", 4321)
    assert found.code == 0 and "ExecStart=" in found.out and "# systemctl --user restart mlxkv.service" in found.out
    assert "MLXKV_TOP_P=0.5" in found.out and "hidden" not in found.out + found.err
    assert "# rm " in cli("service", "uninstall", "--dry-run").out
    monkeypatch.setattr(sys, "platform", "darwin")
    found = cli("service", "install", "--dry-run")
    assert "<plist" in found.out and "# launchctl bootstrap" in found.out and "hidden" not in found.out
    assert asked() == [] and not (home / "Library").exists() and not (home / "config" / "systemd").exists()


def test_options_are_those_of_serve(cli, systemd, asked, home, monkeypatch):
    for args, code, says in (
        (["--prot", 1], 2, "No such option: --prot"),
        (["--port", "x"], 2, "valid integer"),
        (["--port", 0], 2, "a port of its own"),
        (["--top-p", 3], 2, "from 0 to 1"),
        (["--model", "./nowhere"], 2, "./nowhere"),
        (["extra"], 2, "extra"),
        (["--cache-salt", "s"], 2, "MLXKV_CACHE_SALT"),
        (["--model", "a\nb"], 2, "'--model=a\\nb'"),
    ):
        found = cli("service", "install", *args)
        assert found.code == code and says in found.err, found
    assert asked() == []


def test_values_come_back_as_they_were(cli, systemd, home, monkeypatch, model):
    """Odd characters, paths from another folder, and variables; whatever is in the environment when status is asked."""
    shutil.copytree(model, home / "here" / ODD)
    monkeypatch.chdir(home / "here")
    monkeypatch.setenv("MLXKV_CACHE_SALT", ODD)
    monkeypatch.setenv("MLXKV_CACHE_DIR", "relative")
    monkeypatch.setenv("MLXKV_URL", "http://elsewhere")
    monkeypatch.setenv("MLXKV_HOST", "0.0.0.0")
    made = cli(
        "service",
        "install",
        "-m",
        ODD,
        "--temp",
        0.5,
        "--legacy-dirs",
        f"a{os.pathsep}b",
        "--log-file",
        "x.log",
        "--grace",
        "100s",
    )
    assert made.code == 0, made.err
    file = home / "config" / "systemd" / "user" / "mlxkv.service"
    job = Job.read(file.read_bytes())
    assert job.command[job.command.index("serve") + 1 :] == (
        f"--model={home}/here/{ODD}",
        "--grace=100s",
        f"--log-file={home}/here/x.log",
        "--temp=0.5",
        f"--legacy-dirs={home}/here/a{os.pathsep}{home}/here/b",
    )
    assert job.stop_s == 160
    assert job.environment["MLXKV_CACHE_SALT"] == ODD and job.environment["MLXKV_CACHE_DIR"] == f"{home}/here/relative"
    assert "MLXKV_URL" not in job.environment and Job.read(job.plist("x")) == Job.read(job.unit()) == job
    monkeypatch.setenv("MLXKV_PORT", "1")
    assert cli("service", "status", "--json").json["url"] == "http://127.0.0.1:8642"
    analyze = shutil.which("systemd-analyze", path=os.defpath)
    if analyze:
        verify = [analyze, "verify", "--user", "--man=no", file]
        done = subprocess.run(verify, capture_output=True, text=True, env=os.environ | {"XDG_RUNTIME_DIR": str(home)})
        assert done.returncode == 0 and "mlxkv.service" not in done.stderr, done.stderr
    file.write_text("[Service]\n")
    broken = cli("service", "status")
    assert broken.code == 2 and "mlxkv service install" in broken.err


def test_the_command_in_the_file_is_a_server(cli, systemd, home, model):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert cli("service", "install", "--port", port, "--model", model).code == 0
    job = Job.read((home / "config" / "systemd" / "user" / "mlxkv.service").read_bytes())
    environment = {"HOME": str(home), "PATH": os.defpath, "PYTHONPATH": str(ROOT)} | job.environment
    with job.errors.open("ab") as err, subprocess.Popen(job.command, env=environment, cwd=home, stderr=err) as process:
        until = time.monotonic() + 60
        while (found := cli("service", "status", "--json")).code:
            assert process.poll() is None and time.monotonic() < until, (found, job.errors.read_text())
            time.sleep(0.1)
        assert found.json["ready"] and found.json["reason"] is None
        shown = cli("service", "status")
        assert shown.code == 0 and f"http://127.0.0.1:{port}: ready" in shown.out
        asked = {"model": model.name, "messages": [{"role": "user", "content": "private"}], "max_tokens": 2}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=asked, timeout=30).json()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert f"http://127.0.0.1:{port}/v1  model: {model.name}" in job.errors.read_text()
    log = Path(found.json["log"])
    assert answer["id"] in log.read_text() and "private" not in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert json.loads(cli("service", "status", "--json").out)["ready"] is False
