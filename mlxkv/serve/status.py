"""What a server is doing and what it remembers: ``/metrics``, ``/v1/status``, ``/v1/cache/explain``,
``/v1/cache/tree``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from anyio import to_thread
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from .. import __version__
from ..cache.index import Entry
from ..cache.tree import Stretch, on_disk, tree
from ..decode.request import Request as Asked
from ..decode.text import decode
from ..errors import RequestError
from ..messages import check_text, normalise
from .fields import Body, template_kwargs
from .health import look as look_after
from .server import Server, Serving
from .tools_schema import asked_tools, template_tools

if TYPE_CHECKING:
    from ..cache.store import PrefixStore
    from ..decode.engine import Engine
    from ..decode.looked import Looked

router = APIRouter()
T = TypeVar("T")

#: seconds that a question may wait for the engine to end its turn
PATIENCE = 20.0
#: tokens of text on either side of the first one that is not covered
AROUND = 12
#: stretches that /v1/cache/tree shows at most
STRETCHES = 1000
#: tokens of a stretch that are shown as text
PREVIEW = 48


_TEXT = {"schema": {"type": "string"}}


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": _TEXT, "application/openmetrics-text": _TEXT}}},
)
async def metrics(server: Serving, request: Request) -> Response:
    """Counters and gauges for Prometheus."""
    body, kind = server.metrics.exposition(request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": kind})


@router.get("/v1/status")
async def status(server: Serving) -> dict[str, Any]:
    """The server, its models and engines, what runs and waits, and the requests that ended last."""
    body, _ = look_after(server)
    engines = dict(server.models.engines())
    models = []
    for state in server.models.states():
        entry, engine = state.entry, engines.get(state.entry.name)
        known = {"name": entry.name, "adapter": entry.adapter, "pinned": entry.pinned, "state": state.state}
        known |= {"leases": state.leases, "waiting": state.waiting, "reason": state.reason}
        models.append(known | _engine(engine))
    return {
        "version": __version__,
        "started": server.started,
        "uptime_s": round(time.time() - server.started, 3),
        "status": body["status"],
        "reason": body["reason"],
        "active": body["active"],
        "queued": body["queued"],
        "models": models,
        "totals": server.metrics.totals(),
        "recent": [record.to_json() for record in reversed(server.metrics.recent)],
    }


def _engine(engine: Engine | None) -> dict[str, Any]:
    """How an engine is, what it has loaded, and what it is doing. The folders of this machine are nobody's business."""
    if engine is None:
        return {"health": None, "info": None, "engine": None}
    info = asdict(engine.info)
    for name in ("path", "cache_dir", "object_store"):
        del info[name]
    now = asdict(engine.status())
    if now["store"] is not None and now["store"]["objects"] is not None:
        del now["store"]["objects"]["why"]  # it may name a folder or an address
    return {"health": engine.health().reason or "ok", "info": info, "engine": now}


class ExplainRequest(Body):
    """A prompt as a request would give it: exactly one of messages, prompt and tokens."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    tokens: list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None


@router.post("/v1/cache/explain")
async def explain(server: Serving, body: ExplainRequest) -> dict[str, Any]:
    """What a prompt would find in the prefix store now, and why not more. Nothing is computed or stored."""
    from ..decode.looked import look  # it brings MLX, which belongs to an engine's thread

    name, engine = loaded(server, body.model)
    asked = Asked(
        messages=normalise(body.messages) if body.messages is not None else None,
        prompt=None if body.prompt is None else check_text(body.prompt, "prompt"),
        tokens=body.tokens,
        tools=template_tools(asked_tools(body.tools, None, None)),
        template_kwargs=template_kwargs(body.chat_template_kwargs),
        salt=check_text(body.cache_salt or "", "cache_salt") or server.cache_salt,
        use_cache=server.use_cache,
    )

    def find() -> Looked:
        made = replace(asked, prepared=engine.prepare(asked))
        return engine.inspect(lambda loop: look(loop, made, AROUND), PATIENCE)

    found = await _aside(server, find)
    ids, at, lookup = found.tokens, found.lookup.tokens, found.lookup

    def text(ids: list[int]) -> str:
        return decode(engine.tokenizer, ids)

    stored = found.stored if server.tells_text else []
    return {
        "model": name,
        "prompt_tokens": len(ids),
        "cached_tokens": lookup.tokens,
        "source": lookup.source,
        "miss_reason": lookup.reason,
        "miss_position": lookup.position,
        "why": found.why,
        "ids_before": ids[max(0, at - AROUND) : at],
        "ids_after": ids[at : at + AROUND],
        "text_before": text(ids[max(0, at - AROUND) : at]),
        "text_after": text(ids[at : at + AROUND]),
        "same_tokens": found.same,
        "same_text_before": text(ids[max(0, found.same - AROUND) : found.same]),
        "asked_text": text(ids[found.same : found.same + AROUND]),
        "stored_text": text(stored) if stored else None,
    }


@dataclass(frozen=True)
class _Kept:
    """What the tree of a store is made from, taken on the engine's thread."""

    path: Path
    root: bytes
    block: int
    kinds: tuple[str, ...]
    needs_state: bool
    ram: list[tuple[Entry, dict[str, int]]]


_BUSY = {
    "description": "The engine does not come to the question now; try again later.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}


@router.get("/v1/cache/tree", responses={503: _BUSY})
async def cache_tree(
    server: Serving,
    model: str | None = None,
    cache_salt: str | None = None,
    limit: Annotated[int, Query(ge=1, le=STRETCHES)] = 200,
) -> dict[str, Any]:
    """The prefixes that are stored for a model that is loaded, those used last first: at most ``limit`` stretches."""
    name, engine = loaded(server, model)
    salt = check_text(cache_salt or "", "cache_salt") or server.cache_salt

    def take(loop: Any) -> _Kept | None:
        store: PrefixStore | None = loop.rt.store
        if store is None:
            return None
        root, layout = store.space(salt).root, store.layout
        held = store.ram.recent(root, limit * 4)
        return _Kept(store.folder.path, root, store.block, layout.kinds, layout.needs_state, held)

    def make() -> dict[str, Any]:
        kept = engine.inspect(take, PATIENCE)
        if kept is None:
            return {"model": name, "off": engine.info.store_off or "it was switched off", "stretches": []}
        shown = _Shown(engine, server.tells_text, limit)
        shown.add(tree(on_disk(kept.path, kept.root), kept.ram, kept.root))
        books = server.accounts.of(kept.path)
        entries = max(books.entries.get(kept.root, 0), shown.on_disk)
        return {
            "model": name,
            "off": None,
            "block": kept.block,
            "kinds": list(kept.kinds),
            "needs_state": kept.needs_state,
            "entries": entries,
            "left_out": entries - shown.on_disk,
            "folder": {
                "bytes": books.bytes,
                "budget": books.budget,
                "models": [{"model": m, "entries": e, "records": r, "bytes": b} for m, e, r, b in books.models],
            },
            "stretches": shown.out,
        }

    return await _aside(server, make)


class _Shown:
    """Stretches as JSON, level by level, so that what is left out is the deepest; each names the one above it."""

    def __init__(self, engine: Engine, tells_text: bool, limit: int) -> None:
        self._engine, self._tells_text, self._limit = engine, tells_text, limit
        self.out: list[dict[str, Any]] = []
        #: entries on disk that are shown
        self.on_disk = 0

    def add(self, top: list[Stretch]) -> None:
        level = [(s, None) for s in top]
        while level:
            level, following = level[: max(0, self._limit - len(self.out))], []
            for stretch, above in level:
                number = len(self.out)
                self.on_disk += sum(1 for f in stretch.found if f.ssd)
                self.out.append(self._one(stretch, above))
                following += [(below, number) for below in stretch.below]
            level = following

    def _one(self, s: Stretch, above: int | None) -> dict[str, Any]:
        used = [f.used for f in s.found if f.used is not None]
        made: dict[str, Any] = {
            "above": above,
            "start": s.start,
            "end": s.end,
            "key": s.found[-1].entry.key.hex()[:16] if s.found else None,
            "entries": len(s.found),
            "bytes": {"ssd": _sum(f.ssd for f in s.found), "ram": _sum(f.ram for f in s.found)},
            "used": max(used, default=None),
            "states": [
                {"at": f.entry.end, "tiers": [tier for tier in ("ram", "ssd") if "state" in getattr(f, tier)]}
                for f in s.found
                if "state" in f.kinds
            ],
        }
        if self._tells_text:
            ids = s.token_ids(PREVIEW)
            made["text"] = decode(self._engine.tokenizer, ids) + ("…" if s.end - s.start > len(ids) else "")
        return made


def _sum(sizes: Any) -> int:
    return sum(sum(of.values()) for of in sizes)


def loaded(server: Server, model: str | None) -> tuple[str, Engine]:
    """The engine of a model that is loaded, the only or first one if none is named. Raises ModelError, RequestError."""
    engines = server.models.engines()
    if model is None:
        if not engines:
            raise RequestError("No model is loaded.", "Ask something of one first.", param="model")
        return engines[0]
    name = server.models.registry[model].name
    for known, engine in engines:
        if known == name:
            return known, engine
    raise RequestError(f"{name} is not loaded.", "Ask something of it first.", param="model")


async def _aside(server: Server, work: Callable[[], T]) -> T:
    """``work()`` on another thread, a few at a time."""
    return await to_thread.run_sync(work, limiter=server.questions)
