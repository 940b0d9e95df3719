"""The environment of questions inside another environment's settings, by its name."""

from __future__ import annotations

from collections.abc import Mapping

from kapelle.environment import environment_class
from kapelle.errors import ConfigError
from kapelle.settings.base import Settings


def inner_questions(value: object) -> object:
    """Return the settings of the class that `name` finds, and what is no mapping as it is; for a validator."""
    if not isinstance(value, Mapping):
        return value
    if "name" not in value:
        raise ValueError("`questions` names no environment. Write `questions: {name: math}`, for example.")
    try:
        found = environment_class(str(value["name"]))
    except ConfigError as error:
        raise ValueError(str(error)) from None
    if not issubclass(found, Settings):
        raise ValueError(f"The environment '{value['name']}' must be a subclass of kapelle.Settings.")  # noqa: TRY004 (pydantic explains a ValueError)
    return found.model_validate(dict(value))
