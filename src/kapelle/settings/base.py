"""What every configurable piece shares: strict frozen settings.

A piece (an algorithm, an environment, a workflow) is a class whose fields are its settings and whose
field `name` identifies it; `runtime/plugins.py` finds the class for a name.
"""

from __future__ import annotations

from enum import Enum
from inspect import signature
from typing import TYPE_CHECKING

import pydantic
from pydantic_core import InitErrorDetails, PydanticCustomError

from kapelle.errors import did_you_mean


class MayChange(Enum):
    """Whether a resumed run may change a setting: `Annotated[int, FREE]` in a field's type.

    A setting without such a mark belongs to the identity of the run and cannot change.
    """

    FREE = "free"
    """No result depends on it, except that something may fail or be given up for taking too long."""
    FROM_HERE_ON = "from here on"
    """What is learned later may depend on it, if only in the last bits; what was learned so far stays as it is."""


FREE = MayChange.FREE
FROM_HERE_ON = MayChange.FROM_HERE_ON


class Settings(pydantic.BaseModel):
    """Base of all settings: frozen, and an unknown key is an error."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    if not TYPE_CHECKING:

        def __init__(self, /, *values: object, **settings: object) -> None:
            """Take settings by name; an unknown one is answered with the one that was meant."""
            if values:
                raise TypeError(_by_name(type(self)))
            try:
                self.__pydantic_validator__.validate_python(settings, self_instance=self)
            except pydantic.ValidationError as error:
                raise _with_hints(type(self), error) from None

        # What pydantic reads of its own `__init__`: sections inside of others are validated without calling it.
        __init__.__pydantic_base_init__ = True
        __init__.__signature__ = signature(pydantic.BaseModel.__init__)


def _by_name(model: type[pydantic.BaseModel]) -> str:
    first = next((name for name in model.model_fields if name != "name"), "name")
    return f"{model.__name__} takes its settings by name, such as {model.__name__}({first}=…)."


def _with_hints(model: type[pydantic.BaseModel], error: pydantic.ValidationError) -> pydantic.ValidationError:
    """Return the error with the closest known name for every unknown one, and without links to pydantic's pages."""
    from kapelle.settings.messages import known_keys

    details: list[InitErrorDetails] = []
    for problem in error.errors(include_url=False):
        said = problem["msg"]
        if problem["type"] == "extra_forbidden":
            *path, key = map(str, problem["loc"])
            said = f"Unknown key '{key}'.{did_you_mean(key, known_keys(model, path))}"
        kind = PydanticCustomError(problem["type"], "{said}", {"said": said})
        details.append({"type": kind, "loc": problem["loc"], "input": problem["input"]})
    return pydantic.ValidationError.from_exception_data(model.__name__, details)
