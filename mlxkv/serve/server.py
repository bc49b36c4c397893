"""What a server offers: one engine, its name, and what a request gets that it leaves out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..decode.request import SamplingParams
from ..errors import DeviceError
from .metrics import Metrics
from .record import Record

if TYPE_CHECKING:
    from ..decode.engine import Engine


@dataclass
class Server:
    """One engine and how it is offered. ``defaults`` and ``cache_salt``: what a request gets for the sampling fields
    and the salt that it leaves out."""

    engine: Engine
    model_name: str
    defaults: SamplingParams = field(default_factory=SamplingParams)
    use_cache: bool = True
    cache_salt: str = ""
    on_device_error: Callable[[DeviceError], None] | None = None
    started: int = field(default_factory=lambda: int(time.time()))
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(lambda: {self.model_name: self.engine})

    def observe(self, record: Record) -> None:
        """A request is over: one log line, and the counters."""
        self.metrics.observe(record)

    def serves(self, model: str) -> bool:
        """Whether a request's ``model`` is the one that runs here: its name, its path, or the last part of either."""
        path = str(self.engine.info.path)
        return model in {self.model_name, path, Path(self.model_name).name, Path(path).name}

    def model_object(self) -> dict[str, Any]:
        """The model as ``/v1/models`` lists it."""
        return {"id": self.model_name, "object": "model", "created": self.started, "owned_by": "mlxkv"}
