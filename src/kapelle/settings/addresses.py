"""Addresses of servers in settings: without secrets, because settings are stored, shown and quoted in errors."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator

from kapelle.runtime.credentials import is_secret

NO_URL = "it is no http(s) URL, such as http://localhost:8000/v1"


def open_address(value: str) -> str:
    """Return an http(s) URL without secrets; ValueError, which does not repeat them, for another text."""
    try:
        parts = urlsplit(value)
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise ValueError(NO_URL) from None
    if not named or any(ord(character) <= 32 or ord(character) == 127 for character in value):
        raise ValueError(NO_URL)
    given = parse_qsl(parts.query) + parse_qsl(parts.fragment)
    secret = next((name for name, _ in given if is_secret(name)), None)
    if "@" in parts.netloc or secret is not None:
        where = "a user or password before its host" if secret is None else f"the parameter `{secret}`"
        raise ValueError(
            f"it has {where}, which would be stored with the run. Put the secret into an environment variable and name "
            "that variable (`api_key_env`, or `key_env` of a tool)"
        )
    return value


Address = Annotated[str, AfterValidator(open_address)]
"""A setting that is such a URL."""
