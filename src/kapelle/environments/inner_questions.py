"""Environments that hand on the questions of another one, whose settings stand inside theirs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import BeforeValidator

from kapelle.environment import Answerable, Environment, Scripted, environment_class, offers
from kapelle.errors import ConfigError
from kapelle.settings.base import EnvironmentSettings, Plugged, Settings
from kapelle.types import Message, Split, Task


def named_settings(value: Mapping[str, object]) -> Settings:
    """Return the settings of the environment that `name` finds; ValueError where there is none, for a validator."""
    try:
        found = environment_class(str(value["name"]))
    except ConfigError as error:
        raise ValueError(str(error)) from None
    if not issubclass(found, Settings):
        raise ValueError(f"The environment '{value['name']}' must be a subclass of kapelle.Settings.")  # noqa: TRY004 (pydantic explains a ValueError)
    return found.model_validate(dict(value))


def inner_questions(value: object) -> object:
    """Return the settings of the class that `name` finds, and what is no mapping as it is; for a validator."""
    if not isinstance(value, Mapping):
        return value
    if "name" not in value:
        raise ValueError("`questions` names no environment. Write `questions: {name: math}`, for example.")
    return named_settings(value)


InnerQuestions = Annotated[EnvironmentSettings, Plugged(), BeforeValidator(inner_questions)]
"""Settings of the environment that asks: `{name: math, …}`."""


class HandsOnQuestions(Settings, Answerable, Scripted):
    """Base of environments with a setting `questions`: another environment asks, reads answers and demonstrates."""

    @property
    @abstractmethod
    def _asks(self) -> Environment:
        """The setting `questions`, which stands where it belongs among a subclass's own."""

    @property
    def sources(self) -> Mapping[Split, str]:
        """The questions' own."""
        return self._asks.sources

    def size(self, split: Split) -> int | None:
        """Return the number of questions."""
        return self._asks.size(split)

    def task(self, split: Split, index: int) -> Task:
        """Return the question at an index."""
        return self._asks.task(split, index)

    def extract(self, text: str) -> str | None:
        """Return the final answer of a text as the questions' environment reads it."""
        assert offers(self._asks, Answerable), "`check` refuses games"
        return self._asks.extract(text)

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return what the questions' own script says, without any calls; ConfigError where they have none."""
        if not offers(self._asks, Scripted):
            raise ConfigError(f"`{self._asks.name}` has no script that could demonstrate anything.")
        return self._asks.script(agent, task, messages, seed)
