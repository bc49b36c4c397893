"""``/v1/models``: what can be asked for."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from .server import Serving

router = APIRouter()


@router.get("/v1/models")
async def models(server: Serving) -> dict[str, Any]:
    """All models that may be named in a request, loaded or not; one list for both APIs, and all of it at once."""
    data = [server.model_object(state) for state in server.models.states()]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, "has_more": False} | ends


@router.get("/v1/models/{model:path}")
async def model(server: Serving, model: str) -> dict[str, Any]:
    """One model by its name or an alias."""
    entry = server.models.registry[model]
    return server.model_object(next(s for s in server.models.states() if s.entry is entry))
