"""Secrets: remove them from the URLs in messages, and send them only over private connections."""

from __future__ import annotations

import ipaddress
import os
import re
from urllib.parse import urlsplit

from kapelle.errors import ConfigError

_SECRET = re.compile(
    "apikey|auth|authorization|bearer|credentials?|jwt|key|passwd|password|pwd|sas|secret|sig|signature|token",
    re.IGNORECASE,
)
"""Words in the names of secret parameters."""
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_USER = re.compile(r"(?<=://)[^/?#\s'\"]*@")
_PARAMETER = re.compile(r"(?<=[?&#;])([^=?&#;\s'\"]{1,100})=[^&#;\s'\"]*")


def is_secret(name: str) -> bool:
    """Return whether a parameter's name indicates a secret, such as `api_key`, `X-Amz-Signature` or `accessToken`, but not `keyword`."""
    return any(_SECRET.fullmatch(word) for word in _WORDS.findall(name))


def without_secrets(text: str) -> str:
    """Return a string with an ellipsis in place of users, passwords and keys in its URLs."""
    return _PARAMETER.sub(
        lambda found: f"{found[1]}=…" if is_secret(found[1]) else found[0], _USER.sub("…@", text)
    )


# -------- Tokens from environment variables

TOKEN = "KAPELLE_TOKEN"  # noqa: S105 - the name of a variable
"""Environment variable with the token for every call to our servers; a command line would be visible to other users."""
LEAST_TOKEN = 16
"""Minimum number of characters of a token for connections beyond loopback."""


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached only from this machine; the only such name is `localhost`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bearer(variable: str | None, address: str) -> dict[str, str]:
    """Return the header with the token of an environment variable; empty if there is no variable or no token.

    Raises ConfigError for a connection that others can read.
    """
    token = os.environ.get(variable, "") if variable else ""
    return authorization(token, variable, address) if variable and token else {}


def authorization(token: str, held: str, address: str) -> dict[str, str]:
    """Return the header with a token that comes from `held`; raises ConfigError as in `bearer`."""
    check_private(held, address)
    return {"Authorization": f"Bearer {token}"}


def check_private(held: str, address: str) -> None:
    """Raise ConfigError if others can read a token on its way to an address."""
    parts = urlsplit(address)
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise ConfigError(
            f"The token in {held} would be sent to {without_secrets(address)} in the clear. Use https, or unset the token."
        )
