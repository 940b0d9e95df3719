"""Texts without the secrets that the URLs in them hold."""

from __future__ import annotations

import re

_SECRETS = frozenset(
    [
        "apikey",
        "auth",
        "authorization",
        "bearer",
        "credential",
        "credentials",
        "jwt",
        "key",
        "passwd",
        "password",
        "pwd",
        "sas",
        "secret",
        "sig",
        "signature",
        "token",
    ]
)
"""Words in the names of parameters that hold what nobody else may know."""
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_USER = re.compile(r"(?<=://)[^/?#\s'\"]*@")
_PARAMETER = re.compile(r"(?<=[?&#;])([^=?&#;\s'\"]{1,100})=[^&#;\s'\"]*")


def is_secret(name: str) -> bool:
    """Return whether a parameter holds a secret by its name: `api_key`, `X-Amz-Signature`, `accessToken`; not `keyword`."""
    return any(word.lower() in _SECRETS for word in _WORDS.findall(name))


def without_secrets(text: str) -> str:
    """Return a text in which the users, passwords and keys of its URLs are an ellipsis."""
    return _PARAMETER.sub(
        lambda found: f"{found[1]}=…" if is_secret(found[1]) else found[0], _USER.sub("…@", text)
    )
