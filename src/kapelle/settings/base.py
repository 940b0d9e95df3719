"""Defines strict frozen settings, the base class of every configurable component.

A component (such as an algorithm, an environment or a workflow) is a class whose fields are its settings. The field
`name` identifies the component, and `runtime/plugins.py` finds the class for a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any, Protocol, Self, get_args
from urllib.parse import parse_qsl, urlsplit

import pydantic
from pydantic import AfterValidator, GetCoreSchemaHandler, SerializeAsAny
from pydantic_core import InitErrorDetails, PydanticCustomError

from kapelle.algorithm import Algorithm
from kapelle.environment import Environment, environment_class
from kapelle.errors import ConfigError, did_you_mean
from kapelle.runtime.credentials import is_secret
from kapelle.workflow import Workflow

if TYPE_CHECKING:
    from pydantic_core import CoreSchema


class MayChange(Enum):
    """Whether a setting may change when a run is resumed. In the type of a field, this is written as `Annotated[int, FREE]`.

    A setting without this annotation is part of the run's identity and cannot change.
    """

    FREE = "free"
    """The setting does not affect any result, except that an operation may fail or time out if it takes too long."""
    FROM_HERE_ON = "from here on"
    """The setting may affect later training, even if only in the last bits of numbers; earlier training is unaffected."""


FREE = MayChange.FREE
FROM_HERE_ON = MayChange.FROM_HERE_ON


class Settings(pydantic.BaseModel):
    """Base class of all settings. Settings are frozen, and an unknown key raises an error."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    if not TYPE_CHECKING:

        def __init__(self, /, *values: object, **settings: object) -> None:
            """Create the settings from keyword arguments. The error for an unknown name suggests the closest known name."""
            if values:
                raise TypeError(_by_name(type(self)))
            try:
                self.__pydantic_validator__.validate_python(settings, self_instance=self)
            except pydantic.ValidationError as error:
                raise _with_hints(type(self), error) from None

        # pydantic reads these attributes of `__init__`: it validates nested sections without calling `__init__`.
        __init__.__pydantic_base_init__ = True
        __init__.__signature__ = signature(pydantic.BaseModel.__init__)


def _by_name(model: type[pydantic.BaseModel]) -> str:
    first = next((name for name in model.model_fields if name != "name"), "name")
    return f"{model.__name__} takes its settings by name, such as {model.__name__}({first}=…)."


def _with_hints(model: type[pydantic.BaseModel], error: pydantic.ValidationError) -> pydantic.ValidationError:
    """Return the error with the closest known name added for every unknown name, and without links to pydantic's pages."""
    details: list[InitErrorDetails] = []
    for problem in error.errors(include_url=False):
        message = problem["msg"]
        if problem["type"] == "extra_forbidden":
            *path, key = map(str, problem["loc"])
            message = f"Unknown key '{key}'.{did_you_mean(key, known_keys(model, path))}"
        kind = PydanticCustomError(problem["type"], "{message}", {"message": message})
        details.append({"type": kind, "loc": problem["loc"], "input": problem["input"]})
    return pydantic.ValidationError.from_exception_data(model.__name__, details)


def known_keys(model: type[pydantic.BaseModel], path: Sequence[str]) -> list[str]:
    """Return the keys of the section at the given path. Parts of the path that are not sections are skipped."""
    models: list[type[pydantic.BaseModel]] = [model]
    for part in path:
        models = [inner for found in fields_at(models, part) for inner in models_in(found)] or models
    return list(dict.fromkeys(key for one in models for key in one.model_fields))


def fields_at(models: Sequence[type[pydantic.BaseModel]], part: str) -> list[Any]:
    """Return the types of the field named `part` in each of the given classes that has such a field."""
    return [one.model_fields[part].annotation for one in models if part in one.model_fields]


def models_in(annotation: Any) -> list[type[Settings]]:
    """Return the settings classes that a field with the given type annotation may hold."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return [found for inner in get_args(annotation) for found in models_in(inner)]


# -------- URLs of servers in settings must not contain secrets, because settings are stored, shown and quoted in errors.

NO_URL = "it is not an http(s) URL such as http://localhost:8000/v1"


def open_address(value: str) -> str:
    """Return an http(s) URL that contains no secrets.

    Raises ValueError for other strings, with a message that does not repeat any secret.
    """
    try:
        parts = urlsplit(value)
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise ValueError(NO_URL) from None
    if not named or any(ord(character) <= 32 or ord(character) == 127 for character in value):
        raise ValueError(NO_URL)
    given = parse_qsl(parts.query) + parse_qsl(parts.fragment)
    secret = next((name for name, _ in given if is_secret(name)), None)
    if "@" in parts.netloc or secret is not None:
        where = "a user or password before its host" if secret is None else f"the parameter `{secret}`"
        raise ValueError(
            f"it has {where}, which would be stored with the run. Put the secret into an environment variable and name "
            "that variable (`api_key_env`, or `key_env` of a tool)"
        )
    return value


Address = Annotated[str, AfterValidator(open_address)]
"""The type of a setting that holds an http(s) URL without secrets."""


# -------- Types of a run's sections: the settings of a plug-in, together with the plug-in's methods.
#
# A section (`environment`, `workflow`, `algorithm`) holds settings of the class that its `name` finds. Its type covers
# both roles: it is a settings object, and it is an environment, a workflow, or a builder of an algorithm.


class Section(Protocol):
    """The interface of the settings of any plug-in."""

    @property
    def name(self) -> str:
        """The name by which the class of the plug-in is found."""
        ...

    def model_dump(
        self, *, mode: str = "python", exclude: Any = None, exclude_unset: bool = False
    ) -> dict[str, Any]:
        """Return the settings as plain values, without the fields in `exclude` and, optionally, without fields that were not set."""
        ...

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """Return a copy of the settings in which the given values are replaced."""
        ...


class EnvironmentSettings(Section, Environment, Protocol):
    """The interface of the section `environment`."""


class WorkflowSettings(Section, Workflow, Protocol):
    """The interface of the section `workflow`."""


class AlgorithmSettings(Section, Protocol):
    """The interface of the section `algorithm`."""

    def build(self) -> Algorithm:
        """Build the algorithm."""
        ...


class Plugged:
    """Marks a field whose type is a protocol of a plug-in.

    The field may hold any `Settings` object, and all of its fields are serialised.
    """

    def __get_pydantic_core_schema__(self, _source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema with which pydantic validates and serialises the field."""
        return handler.generate_schema(SerializeAsAny[Settings])


def named_settings(value: object, missing: str) -> object:
    """Return the settings of the environment that a mapping describes; for use in validators.

    Values that are not mappings are returned unchanged. Raises ValueError for an unknown name, and ValueError with the
    message `missing` if there is no name.
    """
    if not isinstance(value, Mapping):
        return value
    if "name" not in value:
        raise ValueError(missing)
    try:
        found = environment_class(str(value["name"]))
    except ConfigError as error:
        raise ValueError(str(error)) from None
    if not issubclass(found, Settings):
        raise ValueError(f"The environment '{value['name']}' must be a subclass of kapelle.Settings.")  # noqa: TRY004 (pydantic explains a ValueError)
    return found.model_validate(dict(value))


def parts_of(settings: object, at: str = "") -> Iterator[tuple[str, object]]:
    """Yield the settings and all nested settings at any depth, each with its dotted path; a section is yielded before its contents."""
    yield at, settings
    pairs: list[tuple[object, object]] = [*settings] if isinstance(settings, pydantic.BaseModel) else []
    pairs += settings.items() if isinstance(settings, Mapping) else ()
    pairs += enumerate(settings) if isinstance(settings, list | tuple) else ()
    for key, value in pairs:
        yield from parts_of(value, f"{at}.{key}" if at else str(key))
