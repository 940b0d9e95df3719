"""What a gRPC service refuses: a status code and a sentence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Refused(Exception):
    """A call that is answered with an error; raised anywhere inside it."""

    code: str
    """Name of the status code, such as `NOT_FOUND`."""
    message: str


def wrong(message: str) -> Refused:
    """Return the refusal of a request that makes no sense."""
    return Refused("INVALID_ARGUMENT", message)


def busy(message: str) -> Refused:
    """Return the refusal of a call that there is no room for now."""
    return Refused("RESOURCE_EXHAUSTED", message)


def leaving() -> Refused:
    """Return the refusal of a call that comes while the server is about to end."""
    return Refused("UNAVAILABLE", "The server is about to end. Call another one, or this one again later.")
