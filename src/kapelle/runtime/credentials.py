"""Protect secrets: remove them from URLs in messages, and send them only over private connections."""

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
"""Regular expression of the words that occur in the names of secret parameters."""
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_USER = re.compile(r"(?<=://)[^/?#\s'\"]*@")
_PARAMETER = re.compile(r"(?<=[?&#;])([^=?&#;\s'\"]{1,100})=[^&#;\s'\"]*")


def is_secret(name: str) -> bool:
    """Return whether a parameter's name indicates a secret, such as `api_key` or `accessToken`, but not `keyword`."""
    return any(_SECRET.fullmatch(word) for word in _WORDS.findall(name))


def without_secrets(text: str) -> str:
    """Replace users, passwords and keys in the URLs of a string by an ellipsis."""
    return _PARAMETER.sub(
        lambda found: f"{found[1]}=…" if is_secret(found[1]) else found[0], _USER.sub("…@", text)
    )


# -------- Tokens from environment variables

TOKEN = "KAPELLE_TOKEN"  # noqa: S105 - the name of a variable
"""Name of the environment variable with the token for calls to kapelle's servers. Command-line arguments would be visible to other
users."""
LEAST_TOKEN = 16
"""Minimum number of characters of a token for connections to other machines."""


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached only from this machine. The only host name that is accepted is `localhost`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bearer(variable: str | None, address: str) -> dict[str, str]:
    """Return the HTTP header with the token in an environment variable.

    The result is empty if no variable is given or if the variable contains no token. Raises ConfigError if others could read the
    connection.
    """
    token = os.environ.get(variable, "") if variable else ""
    return authorization(token, variable, address) if variable and token else {}


def authorization(token: str, held: str, address: str) -> dict[str, str]:
    """Return the HTTP header with a token that was read from `held`. Raises the same errors as `bearer`."""
    check_private(held, address)
    return {"Authorization": f"Bearer {token}"}


def check_private(held: str, address: str) -> None:
    """Raise ConfigError if others could read a token that is sent to this address."""
    parts = urlsplit(address)
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise ConfigError(
            f"The token in {held} would be sent to {without_secrets(address)} in the clear. Use https, or unset the token."
        )
