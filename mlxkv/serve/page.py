"""The web page at ``/``: a few files of the package, sent as they are. No build step, nothing from elsewhere."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

router = APIRouter(include_in_schema=False)

#: kinds of files that are sent
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
#: The page may load and ask this server alone, and be framed by nobody: what a model writes is text, whatever it is.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@cache
def files() -> dict[str, tuple[bytes, str, str]]:
    """name -> (content, content type, entity tag). What is asked for is looked up here, never opened."""
    found = {}
    for file in resources.files("mlxkv.serve").joinpath("web").iterdir():
        kind = KINDS.get("." + file.name.rpartition(".")[2])
        if kind is not None:
            content = file.read_bytes()
            found[file.name] = (content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found


@router.api_route("/", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    """Chat, and a live view of the engine and the prefix store."""
    return _send(request, "index.html")


@router.api_route("/web/{name}", methods=["GET", "HEAD"])
async def part(request: Request, name: str) -> Response:
    """A file of the page."""
    return _send(request, name)


def _send(request: Request, name: str) -> Response:
    if name not in files():
        raise HTTPException(404, "There is no such file.")
    content, kind, tag = files()[name]
    headers = HEADERS | {"ETag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers | {"Content-Type": kind})
