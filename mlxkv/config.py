"""Settings: where each value comes from (flag > environment > config.toml > default) and what it may be.

A value is checked wherever it stands, also where a stronger source hides it, so that a wrong line in a file is found
the first time it is read. Unknown keys are errors that name the nearest valid one.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .config_tables import ModelTable, adapter_table, model_tables
from .config_values import (
    a_number,
    a_path,
    a_switch,
    a_text,
    api_keys,
    choice,
    depth,
    origins,
    parse_size,
    paths,
    plain,
    seconds,
    seconds_or_never,
    some_seconds,
    store_bits,
    store_url,
    timeout,
    whole,
    words,
)
from .decode.request import SamplingParams
from .errors import ConfigError, RequestError

#: Variables named MLXKV_* that belong to the tools around mlxkv and are no settings.
OTHER_VARIABLES = ("MLXKV_CONFIG", "MLXKV_PYTHON", "MLXKV_VENV")
_OTHER_PREFIX = "MLXKV_TEST_"
#: settings that are never shown
SECRET = ("cache_salt", "api_key", "object_secret")
#: the demo model, which comes with the package
EMBEDDED = Path(__file__).resolve().parent / "models" / "mlxkv-demo"


@dataclass(frozen=True)
class Source:
    """Where a value comes from. kind: ``flag | env | file | default``; name: the flag, variable or file."""

    kind: str = "default"
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".strip()


def _sampling(key: str, convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """SamplingParams says what is allowed; it is asked, so that there is one place for the ranges."""

    def parse(value: Any) -> Any:
        try:
            return getattr(SamplingParams(**{key: convert(value)}), key)
        except RequestError as error:
            raise ValueError(error.cure) from None

    return parse


def _compile(value: Any) -> str:
    """auto, on or off; a file may say true or false."""
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    return "on" if a_switch(value) else "off"


_DRAFTS = {name: name for name in ("auto", "mtp", "ngram", "model", "off")}


def _draft(value: Any) -> str:
    """What drafts; a file may say false."""
    return "off" if value is False else choice(_DRAFTS)(value)


_DTYPES = {"auto": "auto", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
_DTYPES |= {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

_PINGS = {name: name for name in ("comment", "chunk", "off")}


def _ping(value: Any) -> str:
    """What a silent stream sends; a file may say false."""
    return "off" if value is False else choice(_PINGS)(value)


#: key -> (parser that raises ValueError, what is allowed)
KEYS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "model": (a_text, "a model folder or a Hugging Face id"),
    "adapter": (a_text, "a folder with LoRA weights"),
    "cache_dir": (a_path, "a folder"),
    "cache": (a_switch, "true or false"),
    "cache_budget": (parse_size, "a size such as 20GB"),
    "store_bits": (store_bits, "4, 8 or off"),
    "cache_salt": (plain, "a text"),
    "max_tokens": (_sampling("max_tokens", whole(-(2**63))), "a whole number, at least 1"),
    "temperature": (_sampling("temperature", a_number), "a number from 0 to 100"),
    "top_p": (_sampling("top_p", a_number), "a number from 0 to 1"),
    "top_k": (_sampling("top_k", whole(-(2**63))), "a whole number, 0 for off"),
    "min_p": (_sampling("min_p", a_number), "a number from 0 to 1"),
    "seed": (_sampling("seed", whole(-(2**63), 2**64 - 1)), "a 64-bit whole number"),
    "system": (plain, "a text"),
    "dtype": (choice(_DTYPES), "auto, bf16, fp16 or fp32"),
    "host": (a_text, "a host name or address"),
    "port": (whole(0, 65535), "a port from 0 (any free one) to 65535"),
    "url": (plain, "a server's URL, such as http://127.0.0.1:8642"),
    "api_key": (api_keys, "one or more keys of visible ASCII characters, with commas between them"),
    "api_key_file": (a_path, "a file with one key a line"),
    "allow_hosts": (words, "host names: a list, or a text with commas between them"),
    "cors_origins": (origins, "web origins such as https://app.example, or *: a list, or a text with commas"),
    "aliases": (words, "names: a list, or a text with commas between them"),
    "models": (lambda value: model_tables(value, KEYS), 'tables such as [models.small] with path = "..."'),
    "adapters": (adapter_table, "a table of names and folders with LoRA weights"),
    "models_dir": (paths, f"folders of model folders: a list, or a text with {os.pathsep} between them"),
    "hf_models": (a_switch, "true or false"),
    "max_loaded": (whole(1, 64), "a whole number from 1 to 64"),
    "idle_ttl": (seconds_or_never, "a time such as 10m, or never"),
    "max_queue": (whole(1, 2**20), "a whole number, at least 1"),
    "max_body": (parse_size, "a size such as 32MB"),
    "max_connections": (whole(1, 2**20), "a whole number, at least 1"),
    "request_timeout": (timeout, "a time such as 10m, or off"),
    "ping": (_ping, "comment, chunk or off"),
    "ping_interval": (some_seconds, "a time such as 10s"),
    "grace": (seconds, "a time such as 10s"),
    "log_json": (a_switch, "true or false"),
    "async_kv_limit": (parse_size, "a size such as 512MB or 2GiB; 0 for off"),
    "memory_limit": (parse_size, "a size such as 16GB or 12GiB"),
    "wired": (parse_size, "a size such as 512MB or 2GiB"),
    "log_file": (a_path, "a file"),
    "keep_awake": (a_switch, "true or false"),
    "allow_unprotected": (a_switch, "true or false"),
    "numerics": (choice({"fast": "fast", "exact": "exact"}), "fast or exact"),
    "blas": (a_text, "auto, none or the path of a BLAS library"),
    "ram_budget": (parse_size, "a size such as 512MB or 2GiB; 0 for off"),
    "write_budget": (parse_size, "a size such as 100GB; 0 to write nothing"),
    "legacy_dirs": (paths, f"folders of oMLX's cache: a list, or a text with {os.pathsep} between them"),
    "object_store": (store_url, "a URL such as s3://bucket/prefix or file:///folder; off for none"),
    "object_timeout": (some_seconds, "a time such as 5s"),
    "object_secret": (plain, "a text of at least 16 characters"),
    "object_secret_file": (a_path, "a file with the secret in it"),
    "prefill_chunk": (whole(1, 2**20), "a whole number of tokens, at least 1"),
    "split": (choice({name: name for name in ("auto", "always", "never")}), "auto, always or never"),
    "max_gap_ms": (whole(1, 600_000), "a whole number of milliseconds, from 1 to 600,000"),
    "max_rows": (whole(1, 256), "a whole number from 1 to 256"),
    "compile": (_compile, "auto, on or off"),
    "draft": (_draft, "auto, mtp, ngram, model or off"),
    "draft_model": (plain, "a model folder or a Hugging Face id"),
    "draft_depth": (depth, "a whole number from 1 to 8, or auto"),
    "ring_spare": (whole(1, 256), "a whole number of rows, from 1 to 256"),
}
#: other spellings, in files and after MLXKV_; ``no_cache`` turns its value round
ALIASES = {"api_keys": "api_key", "alias": "aliases", "cors_origin": "cors_origins", "allow_host": "allow_hosts"}
ALIASES |= {"temp": "temperature", "no_cache": "cache", "system_prompt": "system", "adapter_path": "adapter"}


@dataclass(frozen=True)
class Settings:
    """All settings after resolving. Sizes in bytes; None where the part that uses a value has its own default."""

    model: str | None = None
    adapter: str | None = None
    cache_dir: Path = field(default_factory=lambda: default_cache_dir())
    cache: bool = True
    cache_budget: int | None = None
    store_bits: int | None = None
    cache_salt: str = ""
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    system: str | None = None
    dtype: str = "auto"
    host: str = "127.0.0.1"
    port: int = 8642
    url: str | None = None
    async_kv_limit: int = 0
    memory_limit: int | None = None
    wired: int | None = None
    allow_unprotected: bool = False
    numerics: str = "fast"
    blas: str = "auto"
    prefill_chunk: int | None = None
    split: str = "auto"
    max_gap_ms: int | None = None
    max_rows: int = 16
    compile: str = "auto"
    draft: str = "auto"
    draft_model: str | None = None
    draft_depth: int | None = None
    ring_spare: int = 8
    ram_budget: int | None = None
    write_budget: int | None = None
    legacy_dirs: tuple[Path, ...] = ()
    object_store: str | None = None
    object_timeout: float = 5.0
    object_secret: str | None = None
    object_secret_file: Path | None = None
    api_key: str | None = None
    api_key_file: Path | None = None
    allow_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    models: Mapping[str, ModelTable] = field(default_factory=dict)
    adapters: Mapping[str, Path] = field(default_factory=dict)
    models_dir: tuple[Path, ...] = ()
    hf_models: bool = False
    max_loaded: int = 1
    idle_ttl: float | None = None
    max_queue: int = 256
    max_body: int = 32 * 2**20
    max_connections: int = 512
    request_timeout: float | None = None
    ping: str = "comment"
    ping_interval: float = 10.0
    grace: float = 10.0
    keep_awake: bool = True
    log_json: bool = False
    log_file: Path | None = None
    sources: Mapping[str, Source] = field(default_factory=dict, compare=False)

    @classmethod
    def load(cls, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
        """Resolve. ``flags`` maps keys to values; None means that the flag was not given. Raises ConfigError."""
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        sources: dict[str, Source] = {}
        file = config_file(environ)
        layers = [
            (_read_file(file, required="MLXKV_CONFIG" in environ), "file", lambda key: f"{key} in {file}"),
            (_read_environ(environ), "env", lambda key: "MLXKV_" + key.upper()),
            ({k: v for k, v in (flags or {}).items() if v is not None}, "flag", lambda key: "--" + _dashes(key)),
        ]
        for layer, kind, spell in layers:
            seen: dict[str, str] = {}
            for written, raw in layer.items():
                key = _canonical(written, kind, spell(written))
                if key in seen:
                    raise ConfigError(
                        f"{spell(seen[key])} and {spell(written)} set the same thing.", "Keep one of them."
                    )
                seen[key] = written
                values[key] = _parse(key, written, raw, spell(written))
                sources[key] = Source(kind, str(file) if kind == "file" else spell(written))
        if "cache_dir" not in values:
            values["cache_dir"] = default_cache_dir(environ)
        if values.get("object_store") and environ.get("MLXKV_OBJECT_SECRET", "unset") == "":
            raise ConfigError(  # what was to be a secret came to nothing, and all would be sent in the clear
                "MLXKV_OBJECT_SECRET is set, and empty.", "Unset it to send records as they are, or give it a secret."
            )
        return cls(**values, sources=sources)

    def source(self, key: str) -> Source:
        """Where the value of ``key`` comes from."""
        return self.sources.get(key, Source())

    def require_model(self) -> str:
        """The model to run: the one that was named, else the embedded demo. Raises ConfigError."""
        if self.model is not None:
            return os.path.expanduser(self.model)
        if (EMBEDDED / "config.json").is_file():
            return str(EMBEDDED)
        raise ConfigError(
            "No model was named, and the demo model is missing from this installation.",
            f"Give --model with a model folder or a Hugging Face id, or set MLXKV_MODEL or `model` in {config_file()}.",
        )

    def sampling(self, **more: Any) -> SamplingParams:
        """The sampling parameters these settings ask for, with ``more`` on top."""
        names = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")
        return SamplingParams(**({name: getattr(self, name) for name in names} | more))

    def api_keys(self) -> tuple[str, ...]:
        """The keys that were set, and those of the file, one a line. Raises ConfigError."""
        found = [key for key in (self.api_key or "").split(",") if key]
        if self.api_key_file is not None:
            try:
                lines = self.api_key_file.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"The key file {self.api_key_file} cannot be read: {error}.", "Write one key a line there."
                ) from None
            there = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
            if not there:
                raise ConfigError(f"The key file {self.api_key_file} has no key.", "Write one key a line there.")
            found += there
        return tuple(dict.fromkeys(found))

    def object_store_secret(self) -> str | None:
        """The secret that was set, or what is in its file. Raises ConfigError."""
        if self.object_secret or self.object_secret_file is None:
            return self.object_secret or None
        try:
            return self.object_secret_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"The secret file {self.object_secret_file} cannot be read: {error}.",
                "`openssl rand -base64 32` makes what belongs there.",
            ) from None

    def apply_environment(self) -> None:
        """Hand numerics and BLAS to ``mlxkv.numerics``, which reads the environment. Call before MLX is imported."""
        for key in ("numerics", "blas"):
            if self.source(key).kind != "default":
                os.environ["MLXKV_" + key.upper()] = getattr(self, key)

    def engine_options(self) -> dict[str, Any]:
        """Keyword arguments of ``mlxkv.decode.engine.Engine``."""
        return {
            "dtype": self.dtype,
            "adapter": self.adapter,
            "cache_dir": self.cache_dir,
            "cache": self.cache,
            "cache_budget": self.cache_budget,
            "store_bits": self.store_bits,
            "prefill_chunk": self.prefill_chunk,
            "split": self.split,
            "max_gap_ms": self.max_gap_ms,
            "max_rows": self.max_rows,
            "compile": self.compile,
            "draft": self.draft,
            "draft_model": os.path.expanduser(self.draft_model) if self.draft_model else None,
            "draft_depth": self.draft_depth,
            "ring_spare": self.ring_spare,
            "async_kv_limit": self.async_kv_limit,
            "memory_limit": self.memory_limit,
            "wired": self.wired,
            "allow_unprotected": self.allow_unprotected,
            "ram_budget": self.ram_budget,
            "write_budget": self.write_budget,
            "legacy_dirs": self.legacy_dirs,
            "object_store": self.object_store,
            "object_timeout": self.object_timeout,
            "object_secret": self.object_store_secret() if self.object_store else None,
        }


NAMES = tuple(f.name for f in fields(Settings) if f.name != "sources")


def _home(variable: str, fallback: str, mac: str | None, environ: Mapping[str, str]) -> Path:
    """XDG where it is set (it must be absolute to count), the Mac's own place on a Mac, else the XDG default."""
    home = Path(environ.get("HOME") or Path.home())
    xdg = environ.get(variable, "")
    if os.path.isabs(xdg):
        return Path(xdg) / "mlxkv"
    if sys.platform == "darwin" and mac:
        return home / mac / "mlxkv"
    return home / fallback / "mlxkv"


def default_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """``~/Library/Caches/mlxkv`` on macOS, else ``$XDG_CACHE_HOME/mlxkv`` (``~/.cache``)."""
    return _home("XDG_CACHE_HOME", ".cache", "Library/Caches", environ)


def data_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Chat sessions: ``~/Library/Application Support/mlxkv`` on macOS, else ``$XDG_DATA_HOME/mlxkv``."""
    return _home("XDG_DATA_HOME", ".local/share", "Library/Application Support", environ)


def config_file(environ: Mapping[str, str] = os.environ) -> Path:
    """``$MLXKV_CONFIG``, else ``$XDG_CONFIG_HOME/mlxkv/config.toml``, else ``~/.config/mlxkv/config.toml``."""
    if environ.get("MLXKV_CONFIG"):
        return Path(os.path.expanduser(environ["MLXKV_CONFIG"]))
    return _home("XDG_CONFIG_HOME", ".config", None, environ) / "config.toml"


def log_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Logs of a service: ``~/Library/Logs/mlxkv`` on macOS, else ``$XDG_STATE_HOME/mlxkv`` (``~/.local/state``)."""
    return _home("XDG_STATE_HOME", ".local/state", "Library/Logs", environ)


def config_home(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CONFIG_HOME``, else ``~/.config``."""
    return _home("XDG_CONFIG_HOME", ".config", None, environ).parent


def _dashes(key: str) -> str:
    return key.replace("_", "-")


def _canonical(written: str, kind: str, spelled: str) -> str:
    key = written.lower().replace("-", "_")
    key = ALIASES.get(key, key)
    if key in KEYS:
        return key
    near = difflib.get_close_matches(key, [*KEYS, *ALIASES], n=1, cutoff=0.0)
    nearest = "MLXKV_" + near[0].upper() if kind == "env" else near[0]
    raise ConfigError(f"{spelled} is not a setting.", f"Did you mean {nearest}? Valid: {', '.join(KEYS)}.")


def _parse(key: str, written: str, raw: Any, spelled: str) -> Any:
    parser, allowed = KEYS[key]
    try:
        value = parser(raw)
    except (ValueError, TypeError, OverflowError):
        secret = key in SECRET and isinstance(raw, (str, list))
        shown = "not valid" if secret else repr(raw if not isinstance(raw, Path) else str(raw))
        raise ConfigError(f"{spelled} is {shown[:200]}.", f"It must be {allowed}.") from None
    return not value if written.lower().replace("-", "_") == "no_cache" else value


def _read_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that look like settings; an empty one counts as unset."""
    found = {}
    for name, value in sorted(environ.items()):
        other = name in OTHER_VARIABLES or name.startswith(_OTHER_PREFIX)
        if name.startswith("MLXKV_") and not other and value != "":
            found[name.removeprefix("MLXKV_").lower()] = value
    return found


def _read_file(path: Path, required: bool) -> dict[str, Any]:
    import tomllib

    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        if required:
            raise ConfigError(f"MLXKV_CONFIG names {path}, which does not exist.", "Create it or unset it.") from None
        return {}
    except NotADirectoryError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}.", "Make it a readable UTF-8 file or move it away."
        ) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.", "A line looks like: temperature = 0.7") from None
