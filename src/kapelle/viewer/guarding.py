"""The one check before every page: who calls, by which name, with which method; and what a browser may do with it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from kapelle.services.binding import Binding
from kapelle.services.http.application import Asgi, Receive, Scope, Send, headers_of, raw
from kapelle.services.http.guard import SAFE, check_call
from kapelle.services.http.refusals import Refusal
from kapelle.viewer.traffic import Traffic

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
"""What a page may load and call: its own server, and nothing that stands in the page itself."""
NEWS = "/events"
"""The address that stays open to tell what is new."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """Lets a call pass to the pages if it may, and sends every answer with the policy."""

    def __init__(self, pages: Asgi, binding: Binding, traffic: Traffic) -> None:
        self._pages = pages
        self._traffic = traffic
        self._binding = binding

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = headers_of(scope)
        try:
            check_call(self._binding, scope["method"], headers)
            _check_reading(scope["method"], headers)
        except Refusal as refusal:
            await _refuse(refusal, send)
            return
        if scope["path"] == NEWS:  # stays open
            await self._pages(scope, receive, _with_policy(send))
            return
        with self._traffic.answering():
            await self._pages(scope, receive, _with_policy(send))


def _check_reading(method: str, headers: Mapping[str, str]) -> None:
    """Raise Refusal unless a call only reads, and is no part of another site's page."""
    if method not in SAFE:
        raise Refusal(405, "Pages here are only read: GET and HEAD.", None, None, {"allow": "GET, HEAD"})
    if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
        raise Refusal(403, "Pages of other sites may not load this one.")


def _with_policy(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            given = {name.lower() for name, _ in message.get("headers", ())}
            own = [pair for pair in raw(HEADERS) if pair[0] not in given]
            message = {**message, "headers": [*message.get("headers", ()), *own]}
        await send(message)

    return sending


async def _refuse(refusal: Refusal, send: Send) -> None:
    body = f"{refusal.message}\n".encode()
    headers = {
        **HEADERS,
        "content-type": "text/plain; charset=utf-8",
        "content-length": str(len(body)),
        **refusal.headers,
    }
    await send({"type": "http.response.start", "status": refusal.status, "headers": raw(headers)})
    await send({"type": "http.response.body", "body": body})
