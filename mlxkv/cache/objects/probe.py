"""Whether an object store answers: asked by ``mlxkv doctor``."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import Literal

from ...errors import ConfigError
from .place import Loop, Place, describe
from .seal import Secret

_CURE = "Check the URL, the credentials and the endpoint: docs/object-store.md."
_PROBE = b"mlxkv doctor"


@dataclass(frozen=True)
class Probed:
    status: Literal["ok", "warn", "fail"]
    detail: str
    cure: str = ""


def probe(url: str, secret: str | None, seconds: float) -> Probed:
    """List, put, read and remove an object of our own. Takes at most a few times ``seconds``. Never raises."""
    loop = Loop("mlxkv-probe")
    try:
        place = Place(url)
        kept = "payloads are encrypted" if secret is not None and Secret(secret) else "payloads are in the clear"
        path = f"probe/{os.urandom(8).hex()}"

        def run(work) -> object:  # noqa: ANN001 - a coroutine
            return loop.run(work, time.monotonic() + seconds)

        started = time.monotonic()
        run(place.names("probe", seconds))
        listed = time.monotonic() - started
        try:
            run(place.put(path, _PROBE, seconds))
        except Exception as e:
            why = f"{url} can be listed, but not written: {describe(e)}"
            return Probed("warn", why, "What others have put there is used; nothing is sent.")
        try:
            same = bytes(run(place.get(path, seconds))) == _PROBE  # type: ignore[call-overload]
        except BaseException:
            with contextlib.suppress(Exception):
                run(place.delete(path, seconds))
            raise
        run(place.delete(path, seconds))
        if not same:
            return Probed("fail", f"{url} returns other bytes than were put there", "Do not use it.")
        return Probed("ok", f"{url} (answers within {1000 * listed:.0f} ms; {kept})")
    except ConfigError as e:
        return Probed("fail", e.message, e.cure)
    except Exception as e:
        return Probed("fail", f"{url}: {describe(e)}", _CURE)
    finally:
        loop.close(1.0)
