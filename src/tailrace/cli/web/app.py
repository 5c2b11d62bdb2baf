"""The console's answers: the page, what its panels show, the live tail, and the token decoder."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from tailrace.cli.panels.showing import Showing
from tailrace.cli.token import describe, read_token
from tailrace.cli.web.feed import Feed
from tailrace.cli.web.guard import Guard, HostNames
from tailrace.cli.web.login import Logins
from tailrace.errors import TailraceError

_PAGE: Final = {
    "/": ("console.html", "text/html; charset=utf-8"),
    "/console.css": ("console.css", "text/css; charset=utf-8"),
    "/console.js": ("console.js", "text/javascript; charset=utf-8"),
    "/panels.js": ("panels.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_TOKEN_MAX: Final = 20_000


def make_app(showing: Showing, feed: Feed, names: HostNames, logins: Logins | None) -> ASGIApp:
    """The application that a server runs. ``logins``: who may see it; ``None``: everyone who reaches its address."""
    folder = files("tailrace.cli.web") / "page"
    page = {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in _PAGE.items()}
    routes = [Route(path, _file(*found)) for path, found in page.items()]

    async def state(_: Request) -> Response:
        text = ", ".join(f'"{name}": {shown}' for name, shown in showing.shown().items())
        return Response(f"{{{text}}}", media_type="application/json")

    async def live(_: Request) -> Response:
        if feed.is_full:
            return PlainTextResponse("too many pages are open", status_code=503)
        return StreamingResponse(feed.messages(showing.first), media_type="text/event-stream")

    async def token(request: Request) -> Response:
        return JSONResponse(_decoded(request.query_params))

    routes += [Route("/api/state", state), Route("/api/live", live), Route("/api/token", token)]
    return Guard(Starlette(routes=routes), names, logins)


def _file(body: bytes, kind: str):  # type: ignore[no-untyped-def]
    async def answer(_: Request) -> Response:
        return Response(body, media_type=kind)

    return answer


def _decoded(parameters: Mapping[str, str]) -> dict[str, object]:
    """As ``tailrace token decode``."""
    text = parameters.get("token", "")
    if len(text) > _TOKEN_MAX:
        return {"error": "that is longer than a resume token", "hint": None}
    try:
        return {"token": describe(read_token(text))}
    except TailraceError as error:
        return {"error": str(error.message), "hint": error.hint}
