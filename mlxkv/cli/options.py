"""The options that commands share, and the wrapper that gathers them and turns errors into exit codes."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import MlxkvError

if TYPE_CHECKING:
    from ..config import Settings

#: what ``run`` and ``chat`` stop at when nothing says otherwise
DEFAULT_MAX_TOKENS = 1024

INTERRUPTED, PIPE_CLOSED = 130, 141


def _option(kind: Any, *names: str, help: str, panel: str, **more: Any) -> Any:
    return Annotated[kind, typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **more)]


def _group(panel: str, options: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {
        key: _option(kind, *names, help=text, panel=panel, **(more[0] if more else {}))
        for key, (kind, names, text, *more) in options.items()
    }


#: what ``run`` and ``cache explain`` are asked
Question = Annotated[str | None, typer.Argument(help="The question; - reads it from stdin.", show_default=False)]
Messages = Annotated[
    str | None,
    typer.Option("--messages", metavar="FILE", help="An OpenAI message list as JSON; - for stdin.", show_default=False),
]
PromptTokens = Annotated[
    str | None,
    typer.Option("--prompt-tokens", metavar="FILE", help="A JSON list of token ids; - for stdin.", show_default=False),
]
Raw = Annotated[bool, typer.Option("--raw", help="Give the prompt to the model without a chat template.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

MODEL = _group(
    "Model",
    {
        "model": (str | None, ("--model", "-m"), "Model folder or Hugging Face id."),
        "adapter": (
            str | None,
            ("--adapter",),
            "Folder with LoRA weights, as mlx-lm writes them, or its name in config.toml.",
            {"metavar": "DIR"},
        ),
        "dtype": (str | None, ("--dtype",), "auto, bf16, fp16 or fp32.", {"metavar": "DTYPE"}),
    },
)
CACHE_DIR = _group("Cache", {"cache_dir": (str | None, ("--cache-dir",), "Cache folder.", {"metavar": "DIR"})})
ENGINE = CACHE_DIR | _group(
    "Cache",
    {
        "cache_budget": (
            str | None,
            ("--cache-budget",),
            "What the cache folder may weigh, all files counted (default: a tenth of the free disk, at most 32GB).",
            {"metavar": "SIZE"},
        ),
        "no_cache": (bool | None, ("--no-cache/--cache",), "Neither look up nor store state."),
        "store_bits": (
            str | None,
            ("--store-bits",),
            "Store rows of keys and values in 4 or 8 bits: less room, but text may differ (default: off, exact).",
            {"metavar": "4|8|off"},
        ),
        "ram_budget": (str | None, ("--ram-budget",), "Records kept in RAM, above the disk.", {"metavar": "SIZE"}),
        "write_budget": (str | None, ("--write-budget",), "Bytes written to disk a day.", {"metavar": "SIZE"}),
        "legacy_dirs": (
            str | None,
            ("--legacy-dirs",),
            f"Cache folders of oMLX to read where nothing is stored yet, {os.pathsep} between them.",
            {"metavar": "DIRS"},
        ),
        "object_store": (
            str | None,
            ("--object-store",),
            "Store shared by machines: s3://bucket/prefix (with AWS_* variables), gs://, az:// or file:///folder; "
            "off for none.",
            {"metavar": "URL"},
        ),
        "object_timeout": (
            str | None,
            ("--object-timeout",),
            "How long a request waits for the object store at most (default 5s).",
            {"metavar": "TIME"},
        ),
        "object_secret_file": (
            str | None,
            ("--object-secret-file",),
            "A file with the secret that encrypts what is in the object store; or MLXKV_OBJECT_SECRET.",
            {"metavar": "FILE"},
        ),
        "split": (
            str | None,
            ("--split",),
            "Whether a boundary cuts a prefill: auto, always or never.",
            {"metavar": "WHEN"},
        ),
        "async_kv_limit": (
            str | None,
            ("--async-kv-limit",),
            "Submit steps early while live KV is below this size (Mac; off by default).",
            {"metavar": "SIZE"},
        ),
        "memory_limit": (
            str | None,
            ("--memory-limit",),
            "What weights, live caches and records in RAM may take (default: what the system recommends).",
            {"metavar": "SIZE"},
        ),
        "wired": (
            str | None,
            ("--wired",),
            "Raise Metal's wired limit. Can make a Mac unstable; never set by default.",
            {"metavar": "SIZE"},
        ),
        "allow_unprotected": (
            bool | None,
            ("--allow-unprotected",),
            "Keep state on a volume where file modes do not stick.",
        ),
    },
)
MANY = _group(
    "Many at once",
    {
        "max_gap_ms": (
            str | None,
            ("--max-gap-ms",),
            "Milliseconds between two tokens of an answer at most while other prompts are read "
            "(default: 250 on a GPU, 500 on a CPU).",
            {"metavar": "MS"},
        ),
        "max_rows": (
            str | None,
            ("--max-rows",),
            "Requests that run at the same time (default 16).",
            {"metavar": "N"},
        ),
        "compile": (
            str | None,
            ("--compile",),
            "Whether decoding steps are compiled: auto (where it is faster), on or off.",
            {"metavar": "WHEN"},
        ),
    },
)
DRAFTS = _group(
    "Drafts",
    {
        "draft": (
            str | None,
            ("--draft",),
            "What proposes tokens that are then checked several at a time, the text staying the same: mtp (the model's "
            "own head), model (--draft-model), ngram (earlier text), off, or auto (default).",
            {"metavar": "WHAT"},
        ),
        "draft_model": (
            str | None,
            ("--draft-model",),
            "Smaller model with the same tokenizer that proposes tokens: a folder or a Hugging Face id.",
            {"metavar": "MODEL"},
        ),
        "draft_depth": (
            str | None,
            ("--draft-depth",),
            "Tokens proposed at a time, 1 to 8 (default: auto, as many as pay).",
            {"metavar": "N"},
        ),
        "ring_spare": (
            str | None,
            ("--ring-spare",),
            "Rows that sliding windows keep beside themselves for proposed tokens (default 8).",
            {"metavar": "ROWS"},
        ),
    },
)
SAMPLING = _group(
    "Sampling",
    {
        "max_tokens": (int | None, ("--max-tokens", "-n"), "Tokens to sample at most."),
        "temperature": (float | None, ("--temp", "--temperature"), "0 takes the likeliest token (default)."),
        "top_p": (float | None, ("--top-p",), "Keep the likeliest tokens up to this probability mass."),
        "top_k": (int | None, ("--top-k",), "Keep this many of the likeliest tokens; 0 is off."),
        "min_p": (float | None, ("--min-p",), "Drop tokens below this share of the likeliest one."),
        "seed": (int | None, ("--seed",), "The same seed gives the same text."),
    },
)
SALT = _group(
    "Cache",
    {
        "cache_salt": (
            str | None,
            ("--cache-salt",),
            "Share state only with requests of the same salt. Others can see arguments: better in MLXKV_CACHE_SALT.",
            {"metavar": "TEXT"},
        )
    },
)
SYSTEM = _group("Sampling", {"system": (str | None, ("--system",), "System prompt.")})
ADDRESS = _group(
    "Address",
    {
        "host": (str | None, ("--host",), "Address to listen on (default 127.0.0.1)."),
        "port": (int | None, ("--port",), "Port to listen on (default 8642); 0 takes any free one."),
    },
)
MODELS = _group(
    "Models",
    {
        "aliases": (
            list[str] | None,
            ("--alias",),
            "One more name for the model; repeatable.",
            {"metavar": "NAME"},
        ),
        "models_dir": (
            str | None,
            ("--models-dir",),
            f"Offer every model folder in here by its name, {os.pathsep} between several.",
            {"metavar": "DIRS"},
        ),
        "hf_models": (bool | None, ("--hf-models/--no-hf-models",), "Offer what is in the Hugging Face cache."),
        "max_loaded": (
            int | None,
            ("--max-loaded",),
            "Models in memory at a time (default 1).",
            {"metavar": "N"},
        ),
        "idle_ttl": (
            str | None,
            ("--idle-ttl",),
            "Unload a model that nobody has asked for this long, such as 10m (default: never).",
            {"metavar": "TIME"},
        ),
    },
)
ACCESS = _group(
    "Access",
    {
        "api_key": (
            list[str] | None,
            ("--api-key",),
            "Answer only who sends this key; may be repeated. Others can see arguments: better in MLXKV_API_KEY.",
            {"metavar": "KEY"},
        ),
        "api_key_file": (str | None, ("--api-key-file",), "Keys that may be used, one a line.", {"metavar": "FILE"}),
        "cors_origins": (
            list[str] | None,
            ("--cors-origin",),
            "Let pages of this origin (https://app.example) use the server; * for all; may be repeated.",
            {"metavar": "ORIGIN"},
        ),
        "allow_hosts": (
            list[str] | None,
            ("--allow-host",),
            "Answer requests for this host name too; may be repeated.",
            {"metavar": "NAME"},
        ),
    },
)
LIMITS = _group(
    "Limits",
    {
        "max_queue": (int | None, ("--max-queue",), "Requests that may wait (default 256).", {"metavar": "N"}),
        "max_body": (str | None, ("--max-body",), "Size of a request's body (default 32MiB).", {"metavar": "SIZE"}),
        "max_connections": (
            int | None,
            ("--max-connections",),
            "Sockets open at the same time (default 512).",
            {"metavar": "N"},
        ),
        "request_timeout": (
            str | None,
            ("--request-timeout",),
            "End a request that takes longer, such as 10m (default: never).",
            {"metavar": "TIME"},
        ),
        "ping": (
            str | None,
            ("--ping",),
            "What a silent stream sends: comment (default), chunk or off.",
            {"metavar": "WHAT"},
        ),
        "ping_interval": (
            str | None,
            ("--ping-interval",),
            "Silence after which it does so (default 10s).",
            {"metavar": "TIME"},
        ),
        "grace": (
            str | None,
            ("--grace",),
            "How long running answers may go on once the server was told to stop (default 10s).",
            {"metavar": "TIME"},
        ),
    },
)
LIFE = _group(
    "Process",
    {
        "log_json": (bool | None, ("--log-json/--no-log-json",), "Write the log as one JSON object a line."),
        "log_file": (
            str | None,
            ("--log-file",),
            "Write the log to this file, at most 10 MB and as much of what was before, instead of stderr.",
            {"metavar": "FILE"},
        ),
        "keep_awake": (
            bool | None,
            ("--keep-awake/--let-sleep",),
            "Keep a Mac from falling asleep by itself while it serves (default).",
        ),
    },
)
SERVED = _group(
    "Server",
    {
        "url": (
            str | None,
            ("--url",),
            "Have a running server answer, http://127.0.0.1:8642 for one; --model is then a name of its.",
            {"metavar": "URL"},
        ),
        "api_key": (
            str | None,
            ("--api-key",),
            "The server's key. Others can see arguments: better in MLXKV_API_KEY.",
            {"metavar": "KEY"},
        ),
        "api_key_file": (
            str | None,
            ("--api-key-file",),
            "A file with the key.",
            {"metavar": "FILE"},
        ),
    },
)
DEBUG = _group("Output", {"debug": (bool, ("--debug",), "Show the traceback of an unexpected error.")})


class Flags(dict[str, Any]):
    """The shared options as given on the command line; None where an option was not given."""

    def settings(self) -> Settings:
        """Resolve them against environment and file, and hand numerics and BLAS on. Raises ConfigError."""
        from ..config import Settings

        settings = Settings.load(self)
        settings.apply_environment()
        return settings


def command(*groups: dict[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of ``groups`` as its first argument, a ``Flags``, and handle its errors."""
    shared = {key: kind for group in groups for key, kind in group.items()} | DEBUG

    def wrap(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        own = [p for name, p in signature.parameters.items() if name != "flags"]
        more = [
            inspect.Parameter(
                key, inspect.Parameter.KEYWORD_ONLY, default=False if key == "debug" else None, annotation=a
            )
            for key, a in shared.items()
        ]

        @wraps(function)
        def called(**given: Any) -> None:
            debug = given.pop("debug")
            taken = {key: given.pop(key) for key in shared if key in given}
            flags = Flags({key: None if value == [] else value for key, value in taken.items()})  # [] is Typer's None
            guarded(lambda: function(flags, **given), debug)

        called.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in [*own, *more]}
        return called

    return wrap


def guarded(work: Callable[[], None], debug: bool) -> None:
    """Run ``work``; an error becomes one clear line on stderr and the exit code that belongs to it."""
    try:
        work()
        sys.stdout.flush()
    except MlxkvError as error:
        if debug:
            _traceback()
        show_error(error)
        raise typer.Exit(error.exit_code) from None
    except BrokenPipeError:
        # Python flushes stdout once more when it ends; there must be something to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(PIPE_CLOSED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if debug:
            _traceback()
        typer.echo(paint(f"error: unexpected {type(error).__name__}: {error}", "31"), err=True)
        if not debug:
            typer.echo("Run again with --debug for the traceback.", err=True)
        raise typer.Exit(1) from None


def show_error(error: MlxkvError, label: str = "error") -> None:
    """``error: message`` in red, and what to do about it, on stderr."""
    typer.echo(f"{paint(label + ': ' + error.message, '31')}{' ' + error.cure if error.cure else ''}", err=True)


def warn(message: str) -> None:
    """A yellow warning on stderr."""
    typer.echo(paint(f"warning: {message}", "33"), err=True)


def paint(text: str, code: str) -> str:
    """ANSI colour where stderr is a terminal that takes it."""
    plain = not sys.stderr.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[{code}m{text}\x1b[0m"


def _traceback() -> None:
    import traceback

    traceback.print_exc()
