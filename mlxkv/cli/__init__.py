"""The command line: ``mlxkv run | chat | serve | service | doctor | convert | cache``.

Nothing heavy is imported here or at the top of any module of this folder: ``mlxkv --help`` must come at once. Exit
codes: 0 done, 1 unexpected (or a failed check of ``doctor``), 2 usage or configuration, 3 model cannot be loaded,
4 request refused, 5 generation failed, 70 the device failed twice, 130 interrupted, 141 the reader of a pipe left.
"""

from __future__ import annotations

import typer

from . import cache, chat, convert, doctor, run, serve, service

app = typer.Typer(
    name="mlxkv",
    help="Run hybrid language models, remember their state on SSD, serve them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Settings: flag > MLXKV_* variable > config.toml. Exit codes: 0 done, 1 unexpected, 2 usage, 3 model, "
    "4 request, 5 generation, 70 device, 130 interrupted.",
)
app.command()(run.run)
app.command()(chat.chat)
app.command()(serve.serve)
app.command()(doctor.doctor)
app.command()(convert.convert)
app.add_typer(service.app, name="service")
app.add_typer(cache.app, name="cache")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"mlxkv {version('mlxkv')}")
        raise typer.Exit()


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    pass


def main() -> None:
    """The entry point of the ``mlxkv`` command."""
    app()
