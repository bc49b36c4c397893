"""Bytes to a socket and back: what no client library would send."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from typing import Any


@dataclass
class Raw:
    """An answer as it came. headers: names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def head(path: str, length: int | None, *more: str, method: str = "POST") -> bytes:
    """A request up to its body."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [] if length is None else [f"Content-Length: {length}"]
    return "\r\n".join([*lines, *more, "", ""]).encode("latin-1")


def connect(port: int, timeout: float = 10.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=timeout)


def answer(sock: socket.socket) -> Raw | None:
    """One answer with a length, or one that ends with the connection; None where it was closed without one."""
    data = b""
    while b"\r\n\r\n" not in data:
        try:
            piece = sock.recv(65536)
        except ConnectionResetError:
            piece = b""
        if not piece:
            assert not data, data
            return None
        data += piece
    top, _, body = data.partition(b"\r\n\r\n")
    lines = top.decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    length = int(headers["content-length"]) if "content-length" in headers else None
    while length is None or len(body) < length:
        piece = sock.recv(65536)
        if not piece:
            break
        body += piece
    return Raw(int(lines[0].split()[1]), headers, body[:length])


def exchange(port: int, *pieces: bytes, end: bool = False) -> Raw | None:
    """Send ``pieces``, each in a packet of its own, and read the answer. ``end``: nothing more will be sent."""
    with connect(port) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for piece in pieces:
                sock.sendall(piece)
            if end:
                sock.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server has answered already
        return answer(sock)
