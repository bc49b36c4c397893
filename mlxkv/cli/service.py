"""``mlxkv service``: the server as something that is always there, kept running by launchd or systemd."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, MlxkvError
from .options import AsJson, Flags, command, paint

if TYPE_CHECKING:
    from ..config import Settings
    from .service_job import Job
    from .service_manager import Manager

app = typer.Typer(help="Have the server run in the background, from login on.", no_args_is_help=True)

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")]

#: variables beside MLXKV_* that decide where files are
_PLACES = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "HF_HOME", "HF_HUB_CACHE")
#: variables that are about the command line, not the server
_NOT_ITS = ("MLXKV_URL", "MLXKV_PYTHON", "MLXKV_VENV")
#: lines of a log that ``status`` shows of a service that does not run
TAIL = 5


@app.callback()
def _group() -> None:
    pass


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Any option of mlxkv serve may follow, such as --model and --port. They and the MLXKV_* variables of now "
    "are written into the service's file; config.toml is read when the server starts.",
    options_metavar="[OPTIONS] [OPTIONS OF MLXKV SERVE]",
)
@command()
def install(flags: Flags, context: typer.Context, dry_run: DryRun = False) -> None:
    """Start mlxkv serve now, at each login, and again when it fails. Installing again changes its options."""
    from ..config import SECRET, Settings
    from .service_manager import manager

    given, options = _serve_options(context.args)
    settings = Settings.load(given)
    for key in SECRET:
        if key in given:
            raise ConfigError(
                f"--{key.replace('_', '-')} would be seen by everybody who lists processes.",
                f"Set {key} in config.toml, or MLXKV_{key.upper()} while installing.",
            )
    if settings.port == 0:
        raise ConfigError("A service has a port of its own.", "Give one with --port.")
    _check_model(settings)
    job = _job(_typed(given, options), settings)
    keeper = manager()
    if dry_run:
        typer.echo(f"# {keeper.path}")
        typer.echo(keeper.text(_without_secrets(job)).decode("utf-8"))
        for words in keeper.commands("install"):
            typer.echo(f"# {shlex.join(words)}")
        return
    keeper.check()
    _put(keeper, job)
    typer.echo(f"Installed and started: {keeper.path}")
    typer.echo(f"It will answer at {_url(settings)} once its model is loaded; mlxkv service status says when.")
    typer.echo(f"Its log: {settings.log_file or job.errors.with_suffix('.log')}")
    if sys.platform == "linux":
        typer.echo("It ends when you log out, unless `loginctl enable-linger` was run once.")


@app.command()
@command()
def uninstall(flags: Flags, dry_run: DryRun = False) -> None:
    """Stop the server and do not start it any more. Its log, what it remembers and config.toml stay."""
    from .service_manager import manager

    keeper = manager()
    if dry_run:
        for words in keeper.commands("uninstall"):
            typer.echo(f"# {shlex.join(words)}")
        typer.echo(f"# rm {shlex.quote(str(keeper.path))}")
        return
    if not keeper.path.exists():
        typer.echo("It is not installed.")
        return
    keeper.check()
    keeper.stop()
    keeper.path.unlink(missing_ok=True)
    keeper.forget()
    typer.echo(f"Stopped, and removed: {keeper.path}")


@app.command()
@command()
def status(flags: Flags, as_json: AsJson = False) -> None:
    """Whether it is installed, runs and answers. Ends with 1 if it does not answer."""
    from .service_manager import manager

    keeper = manager()
    found: dict[str, Any] = {"installed": keeper.path.exists(), "file": str(keeper.path), "running": False}
    found |= {
        "pid": None,
        "exit": None,
        "state": None,
        "url": None,
        "ready": False,
        "reason": None,
        "log": None,
        "errors": None,
    }
    job = settings = None
    if found["installed"]:
        job, settings = _installed(keeper)
        keeper.check()
        now = keeper.state()
        found |= {"running": now.running, "pid": now.pid, "exit": now.exit, "state": now.word}
        found |= {"url": _url(settings), "log": str(settings.log_file), "errors": str(job.errors)}
        found["ready"], found["reason"] = _ask(settings)
    if as_json:
        from .render import print_json

        print_json(found)
    else:
        _show(found)
    if not found["ready"]:
        raise typer.Exit(1)


def _show(found: Mapping[str, Any]) -> None:
    if not found["installed"]:
        typer.echo("It is not installed: mlxkv service install")
        return
    ended = f", last ended with {found['exit']}" if found["exit"] is not None else ""
    typer.echo(f"file     {found['file']}")
    typer.echo(f"process  {found['pid'] if found['running'] else 'none'} ({found['state']}{ended})")
    typer.echo(f"address  {found['url']}: {'ready' if found['ready'] else found['reason']}")
    typer.echo(f"log      {found['log']}")
    if not found["running"]:
        for line in _tail(Path(found["errors"])):
            typer.echo(paint(f"  {line}", "2"), err=True)


def _serve_options(args: list[str]) -> tuple[Flags, list[Any]]:
    """What ``mlxkv serve`` makes of ``args``, and what it knows about its options. Raises ConfigError with its own
    words."""
    from . import serve

    made = typer.Typer(add_completion=False)
    made.command()(serve.serve)
    parser = typer.main.get_command(made)
    try:
        found = parser.make_context("mlxkv serve", list(args)).params
    except Exception as error:  # typer may bring the parser's errors under a name of its own
        words = getattr(error, "format_message", None)
        if words is None:
            raise
        raise ConfigError(f"{words().rstrip('.')}.", "See mlxkv serve --help.") from None
    given = Flags({key: value for key, value in found.items() if value not in (None, [], ()) and key != "debug"})
    return given, parser.params


def _typed(given: Flags, options: list[Any]) -> list[str]:
    """Checked options as they are typed, with every path as it is from here."""
    typed: list[str] = []
    for option in options:
        value = given.get(str(option.name))
        name = next((name for name in option.opts if name.startswith("--")), "")
        if value is True:
            typed.append(name)
        elif value is False:
            typed += option.secondary_opts[:1]
        elif value is not None:
            values = value if isinstance(value, list) else [value]
            typed += [f"{name}={_from_here(str(option.name), str(each))}" for each in values]
    return typed


def _from_here(key: str, value: str) -> str:
    """A setting's value, as it must be written where the working folder is another one."""
    from ..config import ALIASES, KEYS

    key = ALIASES.get(key, key)
    if key in ("model", "draft_model", "adapter"):  # a folder, if there is one of that name, or a name on the network
        path = os.path.abspath(os.path.expanduser(value))
        return path if os.path.exists(path) else value
    found = KEYS[key][0](value)
    if isinstance(found, Path):
        return str(found)
    if isinstance(found, tuple) and found and all(isinstance(part, Path) for part in found):
        return os.pathsep.join(map(str, found))
    return value


def _job(typed: list[str], settings: Settings) -> Job:
    """What the service runs, and its environment."""
    from ..config import OTHER_VARIABLES, log_dir
    from .service_job import WRITING, Job

    environment = {name: os.environ[name] for name in _PLACES if os.environ.get(name)}
    for name, value in sorted(os.environ.items()):
        if name == "MLXKV_CONFIG":
            environment[name] = os.path.abspath(os.path.expanduser(value))
        elif name.startswith("MLXKV_") and value and name not in (*OTHER_VARIABLES, *_NOT_ITS):
            key = name.removeprefix("MLXKV_").lower()
            if not key.startswith("test_"):
                environment[name] = _from_here(key, value)
    folder = log_dir()
    if settings.log_file is None:
        typed = [*typed, f"--log-file={folder / 'serve.log'}"]
    job = Job((*_executable(), "serve", *typed), folder / "serve.err", environment, math.ceil(settings.grace) + WRITING)
    for text in (*job.command, *environment.values(), str(job.errors)):
        if not text.isprintable():
            raise ConfigError(f"{text!r} has a character that a service's file cannot hold.", "Leave it out.")
    return job


def _executable() -> list[str]:
    """This very installation, whatever PATH says when the service starts."""
    script = Path(sys.executable).parent / "mlxkv"
    return [str(script)] if os.access(script, os.X_OK) else [sys.executable, "-P", "-m", "mlxkv"]


def _check_model(settings: Settings) -> None:
    model = settings.require_model()
    if model.startswith(("/", ".")) and not os.path.isdir(model):
        raise ConfigError(f"There is no folder {model}.", "Give --model with a model folder or a Hugging Face id.")


def _put(keeper: Manager, job: Job) -> None:
    """Write the file and have it run. Where that fails, the file that was there before is there again."""
    from .session import write_private

    try:
        before = keeper.path.read_bytes() if keeper.path.exists() else None
        job.errors.parent.mkdir(parents=True, exist_ok=True)
        job.errors.write_bytes(b"")  # what an earlier one said is of no use any more
        keeper.path.parent.mkdir(parents=True, exist_ok=True)
        write_private(keeper.path, keeper.text(job))
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}.", "Check its permissions.") from None
    try:
        keeper.start()
    except MlxkvError:
        if before is None:
            keeper.path.unlink()
        else:
            write_private(keeper.path, before)
        raise


def _installed(keeper: Manager) -> tuple[Job, Settings]:
    """What the installed file has the server run, and the settings that come of it now. Raises ConfigError."""
    from ..config import Settings
    from .service_job import Job

    try:
        job = Job.read(keeper.path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{keeper.path} cannot be read: {error}.", "Write it anew: mlxkv service install") from None
    args = list(job.command[job.command.index("serve") + 1 :]) if "serve" in job.command else []
    given, _ = _serve_options(args)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLXKV_") and name not in _PLACES}
    return job, Settings.load(given, kept | job.environment)


def _url(settings: Settings) -> str:
    """Where the server is asked from this machine."""
    host = settings.host.strip("[]")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"


def _ask(settings: Settings) -> tuple[bool, str | None]:
    """Whether the server is ready, and if it is not, why."""
    from .remote import Remote

    keys = settings.api_keys()
    try:
        Remote(_url(settings), keys[0] if keys else None).get("/ready")
    except MlxkvError as error:
        return False, error.message
    return True, None


def _without_secrets(job: Job) -> Job:
    """For people to see."""
    from ..config import ALIASES, SECRET

    def shown(name: str, value: str) -> str:
        key = name.removeprefix("MLXKV_").lower()
        return "…" if ALIASES.get(key, key) in SECRET else value

    return replace(job, environment={name: shown(name, value) for name, value in job.environment.items()})


def _tail(path: Path) -> list[str]:
    """The last lines of a log."""
    from .render import printable

    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [printable(line) for line in lines[-TAIL:]]
