"""Errors that a service returns in OpenAI's format, with a status, type, message and parameter."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from kapelle.types import Json


@dataclass
class RequestError(Exception):
    """The error response to a call. The error may be raised anywhere inside the call."""

    status: int
    message: str
    parameter: str | None = None
    """The name of the incorrect parameter, or None if no single parameter is incorrect."""
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def row(self) -> Json:
        """Return the body of the response, in the format that OpenAI's clients expect."""
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


def wrong(message: str, parameter: str | None = None) -> RequestError:
    """Return the error for a malformed request (status 400)."""
    return RequestError(400, message, parameter, "unsupported_parameter" if parameter else "invalid_request")


def busy(message: str) -> RequestError:
    """Return the error for a call for which there is currently no capacity (status 429)."""
    return RequestError(429, message, None, "queue_full", {"retry-after": "1"})


# -------- Bodies of calls, parsed strictly: incorrect types, unknown names and non-finite numbers raise a RequestError
# that names the parameter

T = TypeVar("T")


class Body(BaseModel):
    """Base class of the request bodies of callers and of their parts. A null value is treated like a missing parameter."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Json) -> Json:
        if not isinstance(given, dict):
            return given
        return {name: each for name, each in given.items() if each is not None}


def neutral(value: T, only: object = 0) -> T:
    """Return the value of a parameter that has no effect. Raises ValueError for any value except `only`."""
    if value != only:
        raise ValueError("it is not supported. Remove it")
    return value


B = TypeVar("B", bound=Body)
MOST_ERRORS = 1000
"""The maximum number of errors in a body that are examined, because examining errors takes time."""


def read_body(form: type[B], body: Json, inside: str = "") -> B:
    """Parse a body. Raises RequestError (400), which names the first incorrect parameter.

    If the body is part of a larger body, `inside` is its position in the larger body.
    """
    try:
        return form.model_validate(body)
    except ValidationError as error:
        if error.error_count() > MOST_ERRORS:
            raise wrong(f"The body has {error.error_count():,} incorrect values.") from None
        found = error.errors(include_url=False, include_input=False, include_context=False)
        places = [_place(each["loc"], body, each["type"]) for each in found]
        # Each member of a union has its own errors: report those of the member that matched furthest.
        outer = places[0]
        deepest = max((each for each in places if each[: len(outer)] == outer), key=len)
        errors = [each for each, place in zip(found, places, strict=True) if place == deepest]
        # The names of keys come from the caller, so they are shortened.
        names = [name[:64] for name in deepest]
        name = ".".join([inside, *names] if inside else names)[:200]
        if errors[0]["type"] == "extra_forbidden":
            raise wrong(f"The parameter `{name}` is not supported.", name) from None
        if not name:
            raise wrong("The body is not a JSON object.") from None
        messages = (_reason(each["type"], each["msg"]) for each in errors)
        first, *others = dict.fromkeys(messages)
        reasons = [first, *(each.removeprefix("Input should be ") for each in others)]
        raise wrong(f"`{name}`: {' or '.join(reasons)}.", name) from None


def _reason(kind: str, message: str) -> str:
    """Return pydantic's message for the caller, without the value that the caller sent."""
    if kind == "union_tag_invalid":
        return f"Input should be {message.rpartition(': ')[2].removesuffix('.')}"
    if kind == "union_tag_not_found":
        return "Field required"
    return re.sub(r"^Value error, | or instance of \w+$", "", message)


def _place(loc: Sequence[int | str], body: Json, error: str) -> tuple[str, ...]:
    """Return the position of an error in the caller's body, without the names of union members that pydantic adds."""
    names, here = list[str](), body
    for number, part in enumerate(loc):
        inside = isinstance(part, str) and isinstance(here, dict) and part in here
        if inside and part == here.get("type") and isinstance(here[part], str) and number < len(loc) - 1:
            continue  # the tag of a union, whose members have a field with that name
        if inside or (isinstance(part, int) and isinstance(here, list) and part < len(here)):
            here = here[part]
            names.append(str(part))
        elif error == "missing" and number == len(loc) - 1:
            names.append(str(part))
    return (*names, "type") if error.startswith("union_tag") else tuple(names)
