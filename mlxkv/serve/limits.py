"""What a server allows, and how long it waits: plain values, which a reload may change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: how a silent stream shows that somebody is there: a comment line, an empty chunk, or not at all
Pings = Literal["comment", "chunk", "off"]


@dataclass(frozen=True)
class Limits:
    """max_body: bytes of a request's body; a million tokens of text are about 4 MB. max_connections: sockets open at
    the same time. header_s, body_s: seconds that a client may take to send its headers, and between two pieces of its
    body. timeout_s: seconds that a request may take in all where it does not say itself; None for any. ping, ping_s:
    what a stream sends after so many seconds of silence. grace_s: seconds that running requests have once the server
    was told to stop."""

    max_body: int = 32 * 2**20
    max_connections: int = 512
    header_s: float = 15.0
    body_s: float = 30.0
    timeout_s: float | None = None
    ping: Pings = "comment"
    ping_s: float = 10.0
    grace_s: float = 10.0
