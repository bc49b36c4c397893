"""A running server as the command line's partner: its models, its state, and answers as the events of a ticket.

It speaks OpenAI's chat API, so that any such server will do; what mlxkv's own adds (the ``mlxkv`` field, chunks that
tell how much of a prompt is read) is used where it comes. Plain ``http.client``: no proxy stands between a chat and a
server on this machine.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any
from urllib.parse import quote, urlsplit

from ..decode.request import (
    CacheReport,
    Completion,
    Delta,
    DraftReport,
    Event,
    Finished,
    Progress,
    Started,
    Timings,
    Usage,
)
from ..errors import ConfigError, EngineError, MlxkvError, ModelError, RequestError
from .render import Thought, Waiting, printable

#: seconds to reach the server, and to hear what is not an answer of a model
PATIENCE = 10.0
#: bytes of a line or a body at most; no server of good will sends more
MOST = 16 * 2**20


class ServerError(EngineError):
    """The server cannot be reached, broke off, or says something that is no answer."""

    code = "server_unreachable"


class Remote:
    """The server at ``url`` (with or without ``/v1``), asked with ``key`` if there is one. Raises ConfigError."""

    def __init__(self, url: str, key: str | None = None) -> None:
        if "://" not in url:
            url = f"http://{url}"
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is no URL: {error}.", _LIKE) from None
        if parts.scheme not in ("http", "https") or not self._host or parts.query or parts.fragment or parts.username:
            raise ConfigError(f"{url!r} is no server's URL.", _LIKE)
        self._tls = parts.scheme == "https"
        #: nobody on the way can read along
        self.protected = self._tls or self._host == "localhost" or self._host.startswith("127.") or self._host == "::1"
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._key = key
        #: whether it is mlxkv that runs there, as ``models`` has seen
        self.is_mlxkv = False
        place = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"{parts.scheme}://{place}{f':{self._port}' if self._port else ''}{self._path}"

    def models(self) -> list[str]:
        """Names of the models there, as it lists them. Raises MlxkvError."""
        found = self.get("/v1/models").get("data")
        entries = [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
        self.is_mlxkv = any(entry.get("owned_by") == "mlxkv" for entry in entries)
        return [entry["id"] for entry in entries if isinstance(entry.get("id"), str)]

    def model(self, name: str) -> str | None:
        """What the server calls the model ``name``, which may be an alias; None if it has none. Raises MlxkvError."""
        try:
            found = self.get(f"/v1/models/{name}").get("id")
        except (ModelError, RequestError, ServerError):  # one that is told apart from others by its name alone
            return None
        return found if isinstance(found, str) else None

    def get(self, path: str) -> dict[str, Any]:
        """The object at ``path``. Raises MlxkvError."""
        with contextlib.closing(self._connect()) as connection:
            try:
                connection.request("GET", f"{self._path}{quote(path)}", headers=self._headers())
                answer = connection.getresponse()
                body = answer.read(MOST)
            except (OSError, http.client.HTTPException) as error:
                raise self._lost(error) from None
        if answer.status != 200:
            raise self._refused(answer, body)
        return _object(body) or self._strange(body)

    def ask(self, body: dict[str, Any]) -> RemoteTicket:
        """Have a chat request answered as a stream. It is sent on another thread; what goes wrong is raised from the
        ticket."""
        options = {"include_usage": True} | ({"include_progress": True} if self.is_mlxkv else {})
        sent = body | {"stream": True, "stream_options": options}
        return RemoteTicket(self, json.dumps(sent, ensure_ascii=False).encode("utf-8"))

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=PATIENCE)
        try:
            connection.connect()
        except OSError as error:
            raise ServerError(
                f"There is no server at {self.url}: {_reason(error)}.", "Start one with mlxkv serve, or check the URL."
            ) from None
        return connection

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def _lost(self, error: BaseException) -> ServerError:
        return ServerError(f"The connection to {self.url} broke: {_reason(error)}.", "See what the server says.")

    def _strange(self, body: bytes) -> Any:
        shown = printable(body[:80].decode("utf-8", "replace"))
        raise ServerError(f"{self.url} answered {shown!r}, which is no answer of a model's server.", "Check the URL.")

    def _refused(self, answer: http.client.HTTPResponse, body: bytes) -> MlxkvError:
        """The server's own words, as the error that the command line knows what to do with."""
        return _error(answer.status, _object(body), answer.getheader("Retry-After"), self.url)


class RemoteTicket:
    """Iterate it for events: ``Started`` and ``Progress`` where the server tells, ``Waiting`` in silence, ``Thought``,
    ``Delta``, and ``Finished`` last; failures are raised. ``cancel`` may be called from any thread or a signal handler:
    the connection is closed, and what has come is in ``Finished``."""

    def __init__(self, remote: Remote, body: bytes) -> None:
        self._remote, self._body = remote, body
        self._lines: queue.SimpleQueue[bytes | BaseException | None] = queue.SimpleQueue()
        self._socket: socket.socket | None = None
        self._cancelled = False
        self._sent = time.monotonic()
        self._text, self._finish = "", ""
        self._usage: dict[str, Any] = {}
        self._extra: dict[str, Any] = {}
        self._first: float | None = None
        self._started = False
        threading.Thread(target=self._read, name="mlxkv-remote", daemon=True).start()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """Hang up, which is how the server learns that it may stop."""
        self._cancelled = True
        self._lines.put(None)
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def __iter__(self) -> Iterator[Event | Thought | Waiting]:
        while True:
            try:
                line = self._lines.get(timeout=1.0)
            except queue.Empty:
                if self._first is None:
                    yield Waiting(time.monotonic() - self._sent)
                continue
            if self._cancelled:
                self._finish = "cancelled"
                break
            if isinstance(line, BaseException):
                raise line
            if line is None:
                if not self._finish:
                    raise ServerError(
                        f"{self._remote.url} ended in the middle of an answer.", "See what the server says."
                    )
                break
            yield from self._line(line)
        yield Finished(self._completion())

    # the thread that reads

    def _read(self) -> None:
        try:
            with contextlib.closing(self._remote._connect()) as connection:
                assert connection.sock is not None
                self._socket = connection.sock
                connection.sock.settimeout(None)  # a long prompt may take minutes; Ctrl-C ends the wait
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                if not self._cancelled:
                    self._stream(connection)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._lines.put(self._remote._lost(error))
        except BaseException as error:
            self._lines.put(error)
        else:
            self._lines.put(None)

    def _stream(self, connection: http.client.HTTPConnection) -> None:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"} | self._remote._headers()
        connection.request("POST", f"{self._remote._path}/v1/chat/completions", self._body, headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise self._remote._refused(answer, answer.read(MOST))
        if not (answer.getheader("Content-Type") or "").startswith("text/event-stream"):
            self._remote._strange(answer.read(80))
        while line := answer.readline(MOST):
            line = line.rstrip(b"\r\n")
            if line == b"data: [DONE]":
                return
            if line:
                self._lines.put(line)

    # the thread that asked

    def _line(self, line: bytes) -> Iterator[Event | Thought]:
        if not line.startswith(b"data:"):
            return
        chunk = _object(line[5:]) or self._remote._strange(line)
        if "error" in chunk:
            raise _error(500, chunk, None, self._remote.url)
        self._usage = _dict(chunk.get("usage")) or self._usage
        told = _dict(chunk.get("mlxkv"))
        if progress := _dict(told.get("progress")):
            yield from self._progress(_count(progress.get("done")), _count(progress.get("total")))
        else:
            self._extra = told or self._extra
        choices = chunk.get("choices")
        choice = _dict(choices[0]) if isinstance(choices, list) and choices else {}
        delta = _dict(choice.get("delta"))
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if isinstance(thought, str) and thought:
            self._first = self._first or time.monotonic()
            yield Thought(thought)
        text = delta.get("content")
        if isinstance(text, str) and text:
            self._first = self._first or time.monotonic()
            self._text += text
            yield Delta(text, [])
        self._finish = choice.get("finish_reason") or self._finish

    def _progress(self, done: int, total: int) -> Iterator[Event]:
        if not self._started:
            self._started = True
            yield Started(total, done)
        yield Progress(done, total)

    def _completion(self) -> Completion:
        """With the server's own numbers; of a server that tells no timings, those that were seen from here."""
        details = _dict(self._usage.get("prompt_tokens_details"))
        usage = Usage(
            _count(self._usage.get("prompt_tokens")),
            _count(self._usage.get("completion_tokens")),
            _count(details.get("cached_tokens")),
        )
        first = self._first or time.monotonic()
        spent = time.monotonic() - first
        speed = (usage.completion_tokens - 1) / spent if usage.completion_tokens > 1 and spent > 0 else 0.0
        seen = Timings(0.0, 0.0, 0.0, 0.0, first - self._sent, speed)
        drafts = _dict(self._extra.get("drafts"))
        finish: Any = self._finish if self._finish in ("length", "cancelled") else "stop"
        return Completion(
            self._text,
            finish,
            [],
            usage,
            _cache(self._extra.get("cache")),
            _timings(seen, self._extra.get("timings")),
            DraftReport(_count(drafts.get("drafted")), _count(drafts.get("accepted"))),
        )


_LIKE = "It looks like http://127.0.0.1:8642."


def _error(status: int, body: dict[str, Any] | None, retry: str | None, url: str) -> MlxkvError:
    found = _dict((body or {}).get("error"))
    message = found.get("message") or (body or {}).get("reason")  # /ready has no error, but a reason
    text = printable(message) if isinstance(message, str) and message else f"{url} answered with status {status}."
    code = found.get("code")
    if status in (401, 403):
        cure = "Give its key in MLXKV_API_KEY, or with --api-key." if status == 401 or not message else ""
        made: MlxkvError = ConfigError(text, cure)
    elif code == "model_not_found":
        made = ModelError(text)
    elif status == 404 and not message:
        made = ServerError(f"{url} has no chat API.", "Check the URL.")
    elif status in (400, 404, 413, 422):
        made = RequestError(text)
    else:
        made = ServerError(text, f"It says to try again in {retry} s." if retry else "")
    if isinstance(code, str):
        made.code = code
    return made


def _cache(told: Any) -> CacheReport:
    told = _dict(told)
    reason, position, source = told.get("miss_reason"), told.get("miss_position"), told.get("source")
    return CacheReport(
        source if isinstance(source, str) else "none",
        reason if isinstance(reason, str) else None,
        position if type(position) is int else None,
        _count(told.get("stored_tokens")),
    )


def _timings(seen: Timings, told: Any) -> Timings:
    """``seen`` with the numbers that the server told."""
    told = {name: value for name, value in _dict(told).items() if type(value) in (int, float) and name in asdict(seen)}
    return replace(seen, **told)


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
