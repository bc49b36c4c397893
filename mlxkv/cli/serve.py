"""``mlxkv serve``: the OpenAI-compatible server."""

from __future__ import annotations

import errno
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import typer

from ..errors import ConfigError, DeviceError
from .options import ADDRESS, DRAFTS, ENGINE, INTERRUPTED, MANY, MODEL, SALT, SAMPLING, Flags, command, warn

if TYPE_CHECKING:
    from ..config import Settings

#: seconds that answers have to come to their end once the server was told to stop
GRACE = 3


@command(MODEL, ADDRESS, SAMPLING, ENGINE, MANY, DRAFTS, SALT)
def serve(flags: Flags) -> None:
    """Serve a model over HTTP, as OpenAI's API does. The sampling options, and the salt, are what a request gets that
    names none."""
    settings = flags.settings()
    if settings.system:
        warn("a system prompt is set; the server does not add it to requests.")
    settings.require_model()
    with listen(settings) as listener:
        _serve(settings, listener)


def _serve(settings: Settings, listener: socket.socket) -> None:
    import logging

    import uvicorn

    from ..serve import Server as Offered
    from ..serve import create_app
    from .interrupt import Interrupt
    from .start import running_engine

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("mlxkv").setLevel(logging.INFO)

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # what still runs then is cancelled at a step edge and told so, not cut off in the middle of a stream
            closing = threading.Timer(GRACE, engine.close)
            closing.daemon = True
            closing.start()
            try:
                await super().shutdown(sockets)
            finally:
                closing.cancel()

    failed: list[DeviceError] = []
    stopped: list[int] = []

    def on_device_error(error: DeviceError) -> None:
        failed.append(error)
        server.should_exit = True

    # uvicorn raises a signal again once it has shut down; by then the engine still has state to write.
    before = signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    try:
        with Interrupt() as interrupt, running_engine(settings, interrupt) as engine:
            offered = Offered.around(
                engine,
                defaults=settings.sampling(),
                use_cache=settings.cache,
                cache_salt=settings.cache_salt,
                on_device_error=on_device_error,
            )
            app = create_app(offered, host=settings.host)
            server = Server(
                uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE + 6, server_header=False)
            )
            engine.warm_up()
            _say_where(settings, listener, engine.info)
            if not stopped:
                try:
                    server.run(sockets=[listener])
                except KeyboardInterrupt:
                    stopped.append(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)
    if failed:
        raise failed[0]
    # SIGTERM is how a supervisor stops a service: done, not an error.
    if signal.SIGINT in stopped:
        raise typer.Exit(INTERRUPTED)


def _say_where(settings: Settings, listener: socket.socket, info: Any) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    where = f"cache: {info.cache_dir}" if info.cache_dir and not info.store_off else "cache: off"
    if info.disk_off and not info.store_off:
        where = f"{where} (read only)" if info.reads_disk else "cache: in RAM only"
    typer.echo(f"http://{shown}:{port}/v1  model: {info.name}  {where}", err=True)
    typer.echo("Ctrl-C stops it.", err=True)
    sys.stderr.flush()
    if not _is_loopback(host):
        warn(
            f"{host} can be reached from other machines, and everybody there may use this model: there is no key "
            "and no encryption. Use --host 127.0.0.1 unless you want that."
        )


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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
