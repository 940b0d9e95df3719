"""What a service refuses, in OpenAI's form: a status, a kind, a sentence, and the parameter to blame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from kapelle.types import Json


@dataclass
class Refusal(Exception):
    """A call that is answered with an error; raised anywhere inside it."""

    status: int
    message: str
    parameter: str | None = None
    """The parameter to blame, if it is one."""
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
    """Return the refusal of a malformed request (400)."""
    return Refusal(400, message, parameter, "unsupported_parameter" if parameter else "invalid_request")


def busy(message: str) -> Refusal:
    """Return the refusal of a call for which there is no room now (429)."""
    return Refusal(429, message, None, "queue_full", {"retry-after": "1"})


# -------- Bodies of calls, read strictly: wrong types, unknown names and non-finite numbers are refused, naming the parameter


class Body(BaseModel):
    """Base of the forms that callers send."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )


B = TypeVar("B", bound=Body)


def read_body(form: type[B], body: Json, inside: str = "") -> B:
    """Return a body in a form; raises Refusal (400), naming the first parameter that is wrong.

    `inside` is the place of what is read where it is a part of a body.
    """
    try:
        return form.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        # Names of keys come from the caller: bounded, and shown as what they are.
        names = [str(part)[:64] for part in first["loc"] if not (isinstance(part, str) and "[" in part)]
        place = ".".join([inside, *names] if inside else names)[:200]
        if first["type"] == "extra_forbidden":
            raise wrong(f"The parameter `{place}` is not supported.", place) from None
        raise wrong(f"`{place}`: {first['msg']}.", place) from None
