"""Bodies of calls, read strictly: wrong types, unknown names and numbers that are not finite are refused by name."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from kapelle.services.http.refusals import Refusal, wrong
from kapelle.types import Json


class Body(BaseModel):
    """Base of what callers send."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )


B = TypeVar("B", bound=Body)


def read_body(form: type[B], body: Json) -> B:
    """Return a body in a form; raises Refusal (400) that names the first parameter that is wrong."""
    try:
        return form.model_validate(body)
    except ValidationError as error:
        raise _refusal_of(error) from None


def _refusal_of(error: ValidationError) -> Refusal:
    """Return the refusal (400) of a body, which names the first parameter that is wrong."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    # Names of keys come from the caller: bounded, and shown as what they are.
    place = ".".join(str(part)[:64] for part in first["loc"] if not (isinstance(part, str) and "[" in part))[
        :200
    ]
    if first["type"] == "extra_forbidden":
        return wrong(f"The parameter `{place}` is not supported.", place)
    return wrong(f"`{place}`: {first['msg']}.", place)
