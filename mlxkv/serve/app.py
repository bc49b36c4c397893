"""The FastAPI application: routes, error answers, and who may ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from ..decode.request import SamplingParams
from ..errors import DeviceError, ModelError
from . import chat, errors
from .guard import BodyLimit, HostGuard
from .server import Server

if TYPE_CHECKING:
    from ..decode.engine import Engine

#: bytes of a request body; a million tokens of text are about 4 MB
MAX_BODY = 32 * 2**20


def create_app(
    engine: Engine,
    model_name: str,
    *,
    defaults: SamplingParams | None = None,
    host: str = "127.0.0.1",
    use_cache: bool = True,
    cache_salt: str = "",
    max_body: int = MAX_BODY,
    on_device_error: Callable[[DeviceError], None] | None = None,
) -> FastAPI:
    """The application around ``engine``, which the caller closes.

    ``defaults`` is used for sampling fields that a request leaves out (greedy, like ``mlxkv run``, unless set),
    ``cache_salt`` where it names no salt of its own.
    ``host``: a name this server is reached by, beside the loopback names. ``max_body``: bytes of a body at most.
    ``on_device_error`` is called when the device has failed for good; the process should then end.
    """
    server = Server(engine, model_name, defaults or SamplingParams(), use_cache, cache_salt, on_device_error)
    app = FastAPI(title="mlxkv", docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, limit=max_body)
    app.add_middleware(HostGuard, host=host)
    errors.install(app, on_device_error)
    app.state.server = server
    app.include_router(chat.router)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that runs here."""
        return {"object": "list", "data": [server.model_object()]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """One model by its name."""
        if not server.serves(model):
            raise ModelError(f"There is no model {model[:200]!r} here.", f"This server runs {model_name}.")
        return server.model_object()

    @app.get("/health")
    async def health() -> JSONResponse:
        """200 while the engine takes requests, else 503 with the reason."""
        now = engine.health()
        body = {
            "status": "ok" if now.ok else "unavailable",
            "reason": now.reason,
            "model": model_name,
            "active": now.active,
            "queued": now.queued,
        }
        return JSONResponse(body, 200 if now.ok else 503)

    return app
