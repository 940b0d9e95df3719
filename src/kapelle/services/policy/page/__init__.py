"""The page on which people talk with the team: three files, nothing inline, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from kapelle.services.http.application import Answer, Call, Route

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""What the page may load and call: itself."""
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/chat.css": ("chat.css", "text/css; charset=utf-8"),
}


def page_routes() -> Sequence[Route]:
    """Return the routes of the page."""
    return [_route(path, name, kind) for path, (name, kind) in FILES.items()]


def _route(path: str, name: str, kind: str) -> Route:
    content = files(__name__).joinpath(name).read_bytes()

    async def show(_call: Call) -> Answer:
        return Answer(content, headers={"content-type": kind, "content-security-policy": POLICY})

    return Route("GET", path, show)
