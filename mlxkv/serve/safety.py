"""Who may ask: API keys, names of this server, and the web pages that may speak to it. Plain values."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit


class Keys:
    """API keys, kept as digests. Which of them is right, or how far it is right, cannot be told from the time."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple(dict.fromkeys(_digest(key) for key in keys))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def holds(self, offered: str) -> bool:
        """Whether ``offered`` is one of them; all are compared, each in constant time."""
        digest, found = _digest(offered), False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def own_names(*more: str) -> frozenset[str]:
    """Names by which this machine may be asked, beside addresses and ``*.localhost``."""
    own = socket.gethostname().lower()
    given = {name.strip().strip("[]").rstrip(".").lower() for name in more}
    return frozenset({"localhost", own, f"{own.removesuffix('.local')}.local"} | given) - {""}


@dataclass(frozen=True)
class Safety:
    """keys: none means that nobody is asked for one. hosts: names of this server. origins: web origins
    (``https://app.example``) whose pages may speak to it, beside its own page; ``*`` for all."""

    keys: Keys = field(default_factory=Keys)
    hosts: frozenset[str] = field(default_factory=own_names)
    origins: frozenset[str] = frozenset()

    def knows_host(self, header: str) -> bool:
        """Whether a Host header, with or without a port, is this server's. An address cannot be rebound, a name of
        somebody else's can: that is the whole rule."""
        header = header.strip().lower()
        if not header:  # HTTP/1.0, which no browser speaks
            return True
        if header.startswith("["):
            name, _, port = header[1:].partition("]")
            colon = port[:1]
            port = port[1:]
        else:
            name, colon, port = header.partition(":")
            name = name.rstrip(".")
        if (colon or port) and not (colon == ":" and (not port or port.isdecimal())):
            return False
        if name in self.hosts or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def knows_origin(self, origin: str, host: str) -> bool:
        """Whether a page of ``origin`` may speak to this server, which it called ``host``."""
        return "*" in self.origins or origin.lower() in self.origins or self.is_own(origin, host)

    @staticmethod
    def is_own(origin: str, host: str) -> bool:
        """Whether an origin is that of the server's own page. Schemes are not compared: a proxy may have ended TLS."""
        try:
            return bool(host) and urlsplit(origin).netloc.lower() == host.strip().lower()
        except ValueError:
            return False

    def knows_key(self, headers: Mapping[str, str]) -> bool:
        """Whether a request brings a key, as ``Authorization: Bearer`` or as ``x-api-key``, or needs none."""
        if not self.keys:
            return True
        scheme, _, token = headers.get("authorization", "").partition(" ")
        offered = [token.strip()] if scheme.lower() == "bearer" else []
        return any([self.keys.holds(key) for key in [*offered, headers.get("x-api-key", "")]])
