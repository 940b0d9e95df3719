"""What a service refuses, in OpenAI's form: a status, a kind, a sentence, and the parameter to blame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kapelle.types import Json


@dataclass
class Refusal(Exception):
    """A call that is answered with an error; raised anywhere inside it."""

    status: int
    message: str
    parameter: str | None = None
    """The parameter to blame; None where there is none."""
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def row(self) -> Json:
        """Return the body that OpenAI's clients read."""
        return {
            "error": {
                "message": self.message,
                "type": _KINDS.get(self.status, "invalid_request_error"),
                "param": self.parameter,
                "code": self.code,
            }
        }


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


def wrong(message: str, parameter: str | None = None) -> Refusal:
    """Return the refusal of a request that makes no sense (400)."""
    return Refusal(400, message, parameter, "unsupported_parameter" if parameter else "invalid_request")


def busy(message: str) -> Refusal:
    """Return the refusal of a call that there is no room for now (429)."""
    return Refusal(429, message, None, "queue_full", {"retry-after": "1"})
