"""``mlxkv serve``: the server as a process."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import typer

from ..errors import ConfigError, DeviceError
from .awake import awake
from .options import (
    ACCESS,
    ADDRESS,
    DRAFTS,
    ENGINE,
    INTERRUPTED,
    LIFE,
    LIMITS,
    MANY,
    MODEL,
    MODELS,
    SALT,
    SAMPLING,
    Flags,
    command,
    warn,
)

if TYPE_CHECKING:
    from ..config import Settings
    from ..decode.engine import Engine
    from ..serve import Server
    from ..serve.registry import Entry

#: settings that a running process cannot take over
FIXED = ("host", "port", "numerics", "blas", "wired", "log_json", "log_file")


@command(MODEL, MODELS, ADDRESS, ACCESS, LIMITS, LIFE, SAMPLING, ENGINE, MANY, DRAFTS, SALT)
def serve(flags: Flags) -> None:
    """Serve models over HTTP, as OpenAI's and Anthropic's APIs do. The sampling options, and the salt, are what a
    request gets that names none. SIGTERM drains and stops, SIGHUP reads the settings again."""
    settings = flags.settings()
    if settings.system:
        warn("a system prompt is set; the server does not add it to requests.")
    settings.api_keys()  # what is wrong with a setting is told before a socket is opened
    with listen(settings) as listener, awake(settings.keep_awake):
        asyncio.run(_Process(flags, settings, listener).run())


class _Process:
    """One process: ``settings`` are those in force, ``flags`` what the command line adds to a file that is read again.
    Raises what ended it; typer.Exit after Ctrl-C."""

    def __init__(self, flags: Flags, settings: Settings, listener: socket.socket) -> None:
        from ..serve import Server, log
        from ..serve.life import Life
        from ..serve.models import Models
        from ..serve.offer import limits_of, raise_open_files, registry_of, safety_of
        from .start import quiet_libraries

        log.configure(settings.log_json, file=settings.log_file)
        quiet_libraries()
        self.flags, self.settings, self.listener = flags, settings, listener
        self._limits_of, self._registry_of, self._safety_of = limits_of, registry_of, safety_of
        self._raise_open_files = raise_open_files
        self._open_files = raise_open_files()
        self.server = Server(
            Models(registry_of(settings), self._load, max_loaded=settings.max_loaded, check=check),
            defaults=settings.sampling(),
            use_cache=settings.cache,
            cache_salt=settings.cache_salt,
            limits=limits_of(settings, self._open_files),
            safety=safety_of(settings),
            on_device_error=self._device_failed,
        )
        self.life = Life(self.server, listener, on_ready=self._ready, reloaded=self._reload)
        self._signals: list[int] = []

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._told_to_stop, number)
        loop.add_signal_handler(signal.SIGHUP, self.life.reload)
        await self.life.run()
        if not self.life.clean:  # a model is still being loaded, or fetched: nothing of it is needed any more
            sys.stderr.flush()
            os._exit(INTERRUPTED if signal.SIGINT in self._signals else 0)
        # SIGTERM is how a supervisor stops a service: done, not an error.
        if signal.SIGINT in self._signals:
            raise typer.Exit(INTERRUPTED)

    def _told_to_stop(self, number: int) -> None:
        """The first signal drains; the second one ends the process at once, and the first one too while it loads:
        nothing has been computed. The store's files stay whole, because only durable ones are visible."""
        self._signals.append(number)
        if len(self._signals) > 1 or self.server.loading is not None:
            sys.stderr.flush()
            os._exit(INTERRUPTED if number == signal.SIGINT else 0)
        if number == signal.SIGINT:
            again = f" Running answers have {self.settings.grace:g} s." if self.server.working else ""
            tell(self.settings, f"\nStopping and keeping what was computed.{again} Ctrl-C again ends at once.")
        self.life.stop()

    def _device_failed(self, error: DeviceError) -> None:
        self.life.stop(error)

    def _load(self, entry: Entry) -> Engine:
        """An engine that is warm. On a thread of its own."""
        from ..decode.engine import Engine
        from .render import Status
        from .start import Progress, say_about

        status = Status()
        status.show(f"loading {entry.source}")
        try:
            engine = Engine(entry.source, **entry.options, progress=Progress(status, False))
        finally:
            status.clear()
        try:
            self._raise_open_files()  # mlx-lm has lowered it
            say_about(engine, self.settings)
            engine.warm_up()
        except BaseException:
            engine.close()
            raise
        return engine

    def _reload(self) -> None:
        from ..config import Settings

        settings = Settings.load(self.flags)
        limits, safety = self._limits_of(settings, self._open_files), self._safety_of(settings)
        defaults = settings.sampling()
        self.server.models.reload(self._registry_of(settings), settings.max_loaded)
        fixed = [name for name in FIXED if getattr(settings, name) != getattr(self.settings, name)]
        if fixed:
            tell(settings, f"{', '.join(fixed)} changed: that takes a restart.", warning=True)
        self.server.limits, self.server.safety, self.server.defaults = limits, safety, defaults
        self.server.use_cache, self.server.cache_salt = settings.cache, settings.cache_salt
        self.settings = settings

    def _ready(self) -> None:
        loaded = self.server.models.engines()
        name, engine = loaded[0] if loaded else ("", None)
        say_where(self.settings, self.listener, name, engine.info if engine else None, self.server)


def check(entry: Entry) -> None:
    """Have the files of a model here, and see that they are those of a model. May download. Raises ModelError."""
    from ..models import folder

    folder.check(folder.resolve(entry.source))


def say_where(settings: Settings, listener: socket.socket, name: str, info: Any, server: Server) -> None:
    """Where the server is and what it offers, on stderr. ``name``: what requests call the model of ``info``."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    page = f"http://{shown}:{port}/"
    said = f"{page}v1"
    if info is not None:
        where = f"cache: {info.cache_dir}" if info.cache_dir and not info.store_off else "cache: off"
        if info.disk_off and not info.store_off:
            where = f"{where} (read only)" if info.reads_disk else "cache: in RAM only"
        said += f"  model: {name}  {where}"
    others = len(server.models.registry.entries) - 1
    if others:
        said += f"  and {others} more model{'s' if others > 1 else ''}"
    tell(settings, said)
    if not settings.log_json:
        tell(settings, f"A page to chat and to watch is at {page}. Ctrl-C stops it.")
    sys.stderr.flush()
    if not is_loopback(host) and not server.safety.keys:
        tell(
            settings,
            f"{host} can be reached from other machines, and everybody there may use this model: THERE IS NO KEY and "
            "no encryption. Set one with MLXKV_API_KEY, or use --host 127.0.0.1.",
            warning=True,
        )


def tell(settings: Settings, text: str, *, warning: bool = False) -> None:
    """Say something on stderr: to a person, or with --log-json in a line of the log, which nothing else may break."""
    if settings.log_json:
        logging.getLogger("mlxkv.serve").log(logging.WARNING if warning else logging.INFO, "%s", text.strip())
    elif warning:
        warn(text)
    else:
        typer.echo(text, err=True)


def listen(settings: Settings) -> socket.socket:
    """A listening socket at the address of ``settings``; the port is never moved. Raises ConfigError."""
    host, port = settings.host.strip("[]"), settings.port
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"The host {host!r} is no address of this machine: {error}.", "Use 127.0.0.1.") from None
    made = socket.socket(family, kind, proto)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(128)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            who = port_owner(port)
            raise ConfigError(
                f"Port {port} on {host} is in use{f' by {who}' if who else ''}.",
                "Stop that program, or choose another port with --port.",
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM):
            raise ConfigError(f"Port {port} on {host} is not allowed for this user.", "Use one above 1023.") from None
        raise ConfigError(f"Cannot listen on {host}:{port}: {error.strerror}.", "Check --host and --port.") from None
    return made


def port_owner(port: int) -> str:
    """``name (pid 123)`` of who listens on a TCP port; "" where that cannot be seen."""
    lsof = shutil.which("lsof")
    if lsof:
        try:
            found = subprocess.run(
                [lsof, "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-Fpc"], capture_output=True, text=True, timeout=3
            ).stdout.splitlines()
        except (OSError, subprocess.TimeoutExpired):
            return ""
        pid = next((line[1:] for line in found if line.startswith("p")), "")
        name = next((line[1:] for line in found if line.startswith("c")), "")
        return f"{name} (pid {pid})" if pid else ""
    return _owner_in_proc(port)


def _owner_in_proc(port: int) -> str:
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as lines:
                rows = [line.split() for line in lines][1:]
        except OSError:
            continue
        sockets |= {
            f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
        }
    if not sockets:
        return ""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if any(os.readlink(f"/proc/{pid}/fd/{fd}") in sockets for fd in os.listdir(f"/proc/{pid}/fd")):
                with open(f"/proc/{pid}/comm") as name:
                    return f"{name.read().strip()} (pid {pid})"
        except OSError:
            continue
    return ""


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
