"""The FastAPI application: routes, error answers, and who may ask."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI

from . import anthropic, chat, completions, errors, health, listing, openapi, page, responses, status, tokens
from .guard import Guard
from .metrics import CountHttp
from .server import Server


def routers() -> list[APIRouter]:
    """Every route of this server. A route gets its server by an argument of type ``Serving``."""
    modules = [
        chat,
        completions,
        responses,
        anthropic,
        tokens,
        listing,
        health,
        status,
        page,
    ]
    return [module.router for module in modules]


def create_app(server: Server) -> FastAPI:
    """The application around ``server``."""
    app = FastAPI(title="mlxkv", docs_url=None, redoc_url=None)
    app.state.server = server
    every = routers()
    errors.install(app, server.on_device_error, {getattr(route, "path", "") for r in every for route in r.routes})
    app.add_middleware(Guard, server=server)
    app.add_middleware(CountHttp, metrics=server.metrics)  # the last one added sees every request first
    for router in every:
        app.include_router(router)
    openapi.install(app)
    return app
