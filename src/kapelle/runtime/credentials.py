"""Secrets: removed from the URLs in messages, and sent only over connections that others cannot read."""

from __future__ import annotations

import ipaddress
import os
import re
from urllib.parse import urlsplit

from kapelle.errors import ConfigError

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
"""Words in the names of parameters that hold secrets."""
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


# -------- Tokens: held in environment variables, and sent only over connections that others cannot read.

TOKEN = "KAPELLE_TOKEN"  # noqa: S105 - the name of a variable
"""Environment variable with the token that every call of a server of ours has to carry; a command line would show it to others."""
LEAST_TOKEN = 16
"""Characters of a token beyond loopback."""


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this machine alone; names other than `localhost` count as not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bearer(variable: str | None, address: str) -> dict[str, str]:
    """Return the header with the token of an environment variable; none without a variable or where it is not set or empty.

    Raises ConfigError where the token could be read on its way to the address.
    """
    token = os.environ.get(variable, "") if variable else ""
    return authorization(token, variable, address) if variable and token else {}


def authorization(token: str, held: str, address: str) -> dict[str, str]:
    """Return the header with a token that is held in a variable (or elsewhere); ConfigError as in `bearer`."""
    check_private(held, address)
    return {"Authorization": f"Bearer {token}"}


def check_private(held: str, address: str) -> None:
    """Raise ConfigError where what a variable holds could be read on its way to an address."""
    parts = urlsplit(address)
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise ConfigError(
            f"The token in {held} would be sent to {without_secrets(address)} in the clear. Use https, or unset it."
        )
