"""``/health`` and ``/ready``: the truth about the process, for supervisors and balancers.

``/health`` is about the process: 503 once an engine is dead or hangs, when only a restart may help. ``/ready`` is about
requests: 503 also while the server starts or stops.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from .server import Server, Serving

router = APIRouter()


class Health(BaseModel):
    """``reason``: why it is not ok. ``model``: the first of ``models``, those that are loaded. ``active`` and
    ``queued``: requests of all of them."""

    status: Literal["ok", "unavailable", "loading", "draining"]
    reason: str | None
    model: str | None
    models: list[str]
    active: int
    queued: int


#: for the OpenAPI document: both answers have the same form
_DOWN: dict[int | str, dict[str, Any]] = {503: {"description": "Not now; `reason` says why.", "model": Health}}


@router.head("/health", include_in_schema=False)
@router.get("/health", response_model=Health, responses=_DOWN)
async def health(server: Serving) -> JSONResponse:
    """200 while every engine that is loaded takes requests, else 503 with the reason."""
    body, reason = look(server)
    return JSONResponse(body, 200 if reason is None else 503)


@router.head("/ready", include_in_schema=False)
@router.get("/ready", response_model=Health, responses=_DOWN)
async def ready(server: Serving) -> JSONResponse:
    """200 if a request that comes now would be answered, else 503 with the reason."""
    body, _ = look(server)
    return JSONResponse(body, 200 if body["status"] == "ok" else 503)


def look(server: Server) -> tuple[dict[str, Any], str | None]:
    """What is told, and why an engine cannot answer, None if all can. status: ``ok | unavailable | loading |
    draining``."""
    active = queued = 0
    reason = None
    for name, engine in server.models.engines():
        now = engine.health()
        active, queued = active + now.active, queued + now.queued
        reason = reason or (now.reason and f"{name}: {now.reason}")
    states = server.models.states()
    loaded = [s.entry.name for s in states if s.state == "ready"]
    status, told = "ok", reason
    if reason is not None:
        status = "unavailable"
    elif server.draining:
        status, told = "draining", "the server is stopping"
    elif server.loading is not None:
        status, told = "loading", f"{server.loading} is loading"
    body = {"status": status, "reason": told, "model": loaded[0] if loaded else None, "models": loaded}
    return body | {"active": active, "queued": queued}, reason
