"""The one check that stands before every route: who calls, under which name, from which page, with how large a body."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from urllib.parse import urlsplit

from kapelle.services.binding import Binding
from kapelle.services.http.refusals import Refusal

SAFE = ("GET", "HEAD")
"""Methods that change nothing."""


def check_call(binding: Binding, method: str, headers: Mapping[str, str]) -> None:
    """Raise Refusal unless the caller may call: its token, the name it calls by, and the page that it comes from.

    `headers` are by name in lower case; one that was sent twice is joined by a comma and so never matches.
    """
    if "content-length" in headers and "transfer-encoding" in headers:
        # Two lengths of one body: a proxy before this service may have taken the other one (RFC 9112, 6.3).
        raise Refusal(
            400,
            "A call has `Content-Length` or `Transfer-Encoding`, not both.",
            None,
            "two_lengths",
            {"connection": "close"},
        )
    named = headers.get("host", "")
    if _without_port(named) not in binding.hosts:
        raise Refusal(
            421,
            "This service is not known by the name in `Host`. Add it with --allow-host; the server of a "
            "training run has one name, `environment.address`.",
            None,
            "wrong_host",
        )
    if not binding.admits(_token(headers.get("authorization"))):
        raise Refusal(
            401,
            "The token is missing or wrong. Send it as `Authorization: Bearer TOKEN`.",
            None,
            "invalid_api_key",
            {"www-authenticate": 'Basic realm="kapelle", charset="UTF-8"'},
        )
    origin = headers.get("origin")
    if method not in SAFE and origin is not None and _place(origin) != named.lower():
        raise Refusal(403, "Pages of other sites may not call this service.", None, "wrong_origin")


def check_body(headers: Mapping[str, str], most: int) -> None:
    """Raise Refusal for a body that is no plain JSON or is declared to be longer than `most` bytes."""
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise Refusal(415, "Compressed bodies are not read. Send the body as it is.", None, "compressed_body")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(
            415, "The body is no JSON: send `Content-Type: application/json`.", None, "wrong_content_type"
        )
    declared = headers.get("content-length")
    if declared is not None and (not declared.isdecimal() or len(declared) > 18 or int(declared) > most):
        raise too_long(most)


def too_long(most: int) -> Refusal:
    """Return the refusal of a body with more than `most` bytes."""
    return Refusal(413, f"The body has more than {most:,} bytes.", None, "body_too_long")


def _token(authorization: str | None) -> str | None:
    """Return the token of a header, as a bearer's or as the password that a browser asks for; None for none."""
    scheme, _, given = (authorization or "").partition(" ")
    if scheme.lower() == "bearer":
        return given
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[2]
    except (binascii.Error, ValueError):
        return None


def _place(origin: str) -> str | None:
    """Return the host and port of a page's origin; None for a text that is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()
