"""Texts without the secrets that the URLs in them hold."""

from __future__ import annotations

import re

SECRETS = frozenset(
    {"key", "api_key", "apikey", "api-key", "token", "access_token", "auth", "password", "secret"}
)
"""Names of parameters that hold what nobody else may know."""

_USER = re.compile(r"(?<=://)[^/?#\s'\"]*@")
_PARAMETER = re.compile(rf"(?i)(?<=[?&])({'|'.join(sorted(SECRETS))})=[^&#\s'\"]*")


def without_secrets(text: str) -> str:
    """Return a text in which the users, passwords and keys of its URLs are an ellipsis."""
    return _PARAMETER.sub(r"\1=…", _USER.sub("…@", text))
