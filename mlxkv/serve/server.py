"""What a server offers: its models, what a request gets that it leaves out, its limits, and where it is in its life."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from anyio import CapacityLimiter
from fastapi import Depends, Request

from ..cache.tree import Accounts
from ..decode.request import SamplingParams
from ..errors import DeviceError
from .limits import Limits
from .metrics import Metrics
from .models import Models, ModelState
from .record import Record
from .safety import Safety

if TYPE_CHECKING:
    from ..decode.engine import Engine


@dataclass
class Server:
    """``defaults``, ``use_cache`` and ``cache_salt``: what a request gets for the fields that it leaves out. All of
    these, ``limits`` and ``safety`` may change while it runs: read them when they are needed. ``on_device_error`` is
    called when the device has failed for good; the process should then end. started: seconds since 1970. draining: it
    was told to stop, and takes no new work. loading: the model that it waits for before it is ready the first time.
    working: requests that are being answered, those for work only (POST)."""

    models: Models
    defaults: SamplingParams = field(default_factory=SamplingParams)
    use_cache: bool = True
    cache_salt: str = ""
    limits: Limits = field(default_factory=Limits)
    safety: Safety = field(default_factory=Safety)
    on_device_error: Callable[[DeviceError], None] | None = None
    started: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    loading: str | None = None
    working: int = 0
    metrics: Metrics = field(init=False)
    #: questions about an engine, which wait for its turn, on threads
    questions: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(2))
    accounts: Accounts = field(default_factory=Accounts)

    def __post_init__(self) -> None:
        self.metrics = Metrics(lambda: dict(self.models.engines()))

    @classmethod
    def around(cls, engine: Engine, **more: Any) -> Server:
        """A server of one engine, which the caller closes. ``more``: the fields of this class."""
        return cls(Models.around(engine), **more)

    def lease(self, name: str) -> AbstractAsyncContextManager[Engine]:
        """The engine of the model that a request names; it stays while the block runs, and is loaded first if it has to
        be, which may take minutes (``models.ready`` tells). Raises ModelError: an unknown name, or one that cannot be
        loaded; QueueFull where too many wait for it."""
        return self.models.lease(name)

    @property
    def tells_text(self) -> bool:
        """Whether /v1/cache may tell what is stored: with keys there may be several people, who do not see each
        other's words."""
        return not self.safety.keys

    def observe(self, record: Record) -> None:
        """A request is over: one log line, and the counters. On the event loop."""
        registry = self.models.registry
        self.metrics.observe(record, registry[record.model].name if record.model in registry else "")

    def model_object(self, state: ModelState) -> dict[str, Any]:
        """A model as ``/v1/models`` lists it: OpenAI's fields, Anthropic's (type, display_name, created_at), ours. The
        path of its folder is a name that is taken, but nobody is told where things are on this machine."""
        entry = state.entry
        aliases = [alias for alias in entry.aliases if not os.path.isabs(alias)]
        more = {"state": state.state, "aliases": aliases, "adapter": entry.adapter, "pinned": entry.pinned}
        made = {"id": entry.name, "object": "model", "created": self.started, "owned_by": "mlxkv"}
        created = datetime.fromtimestamp(self.started, UTC).isoformat().replace("+00:00", "Z")
        return made | {"type": "model", "display_name": entry.name, "created_at": created, "mlxkv": more}


def server_of(request: Request) -> Server:
    """The server that a request came to."""
    return request.app.state.server


#: the type of a route's argument that is its server: ``async def route(server: Serving, body: Body) -> ...``
Serving = Annotated[Server, Depends(server_of)]
