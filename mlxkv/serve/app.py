"""The FastAPI application: routes, error answers, and who may ask."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response

from . import errors, health, listing
from .chat import complete
from .guard import Guard
from .schema import ChatRequest
from .server import Server, Serving

chat = APIRouter()


@chat.post("/v1/chat/completions")
async def chat_completions(server: Serving, body: ChatRequest, request: Request) -> Response:
    """A chat completion, whole or as a stream of server-sent events."""
    return await complete(server, body, request)


def routers() -> list[APIRouter]:
    """Every route of this server. A route gets its server by an argument of type ``Serving``."""
    return [chat, listing.router, health.router]


def create_app(server: Server) -> FastAPI:
    """The application around ``server``."""
    app = FastAPI(title="mlxkv", docs_url=None, redoc_url=None)
    app.state.server = server
    app.add_middleware(Guard, server=server)
    errors.install(app, server.on_device_error)
    for router in routers():
        app.include_router(router)
    return app
