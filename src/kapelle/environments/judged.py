"""Rewards from judges, for the environment `rewarded`. A rubric grades each answer, and a ranking compares the episodes of a group.

    rewards:
    - rubric: {right: {asks: "Is the result right?", weight: 2}, clear: "Can a beginner follow it?"}
      judge: {endpoint: "http://localhost:8000/v1", model: Qwen/Qwen3-32B}
      reference: answer
    - rank: "It is right, and shorter."
      judge: {path: Qwen/Qwen3-4B}

The queries are defined in `grading.judge`. The clients of the queried models are defined in `grading.asking`.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, FiniteFloat, PrivateAttr, field_validator

from kapelle.environment import FrozenModel, ModelsInPlace, QuestionCounts, UsesModels
from kapelle.environments.grading.asking import AnyJudge, Asking, EndpointJudge, ModelJudge
from kapelle.environments.grading.judge import CRITERION, Ask, query_endpoint
from kapelle.errors import ConfigError
from kapelle.settings.base import Settings
from kapelle.types import Json


class Criterion(Settings):
    """A criterion that a judge grades from 0 to 10."""

    asks: str = Field(min_length=1)
    """The question to the judge about an answer, such as `Is the result right?`."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The weight of the criterion in the weighted mean of all criteria."""


def _question(given: object) -> object:
    return {"asks": given} if isinstance(given, str) else given


class Rubric(Settings):
    """A reward for which a judge grades each answer by several criteria. The reward is the weighted mean of the grades, in [0, 1]."""

    rubric: Mapping[str, Annotated[Criterion, BeforeValidator(_question)]] = Field(min_length=1)
    """Mapping from the name of a criterion to its question, or to `{asks: …, weight: …}`."""
    judge: EndpointJudge | ModelJudge
    """The judge: a model at an endpoint (`endpoint`, `model`), or a frozen model in this process (`path`)."""
    reference: str | None = None
    """The column with a good answer, which the judge also reads. If null, the judge reads no reference answer."""
    agent: str | None = None
    """The agent whose last text is graded and which receives the reward. If null, the answer of the team is graded, and every agent
    receives the reward."""
    weight: FiniteFloat = 1.0
    """The factor by which this reward is multiplied."""

    @field_validator("rubric")
    @classmethod
    def _named(cls, rubric: Mapping[str, Criterion]) -> Mapping[str, Criterion]:
        for name in rubric:
            if not re.fullmatch(CRITERION, name):
                raise ValueError(
                    f"'{name}' is not a valid criterion name. Use letters, digits and underscores, such as `clear`."
                )
        return rubric

    @property
    def criteria(self) -> Mapping[str, tuple[str, float]]:
        """Mapping from the name of a criterion to its question and its weight."""
        return {name: (each.asks, each.weight) for name, each in self.rubric.items()}


class Ranking(Settings):
    """A reward for which a judge compares the episodes of a group. The reward of each episode is a score in [0, 1]."""

    rank: str = Field(min_length=1)
    """The property that makes one answer better than another, such as `It is right, and shorter.`"""
    judge: EndpointJudge | ModelJudge
    """The judge: a model at an endpoint (`endpoint`, `model`), or a frozen model in this process (`path`)."""
    reference: str | None = None
    """The column with a good answer, which the judge also reads. If null, the judge reads no reference answer."""
    agent: str | None = None
    """The agent whose last texts are compared and which receives the reward. If null, the answers of the team are compared, and every
    agent receives the reward."""
    weight: FiniteFloat = 1.0
    """The factor by which this reward is multiplied."""


def shown(value: Json) -> str | None:
    """Return the value of a column in the form in which a judge reads it, or None if the row has no value."""
    return value if value is None or isinstance(value, str) else json.dumps(value)


class Judges:
    """The judges of an environment. Rewards with the same judge settings share one client, including its cached replies and its budget."""

    def __init__(self, ask: Ask | None = None, models: ModelsInPlace | None = None) -> None:
        """Replace every judge with `ask` if it is given, or use the frozen `models` for judges in this process."""
        self._ask, self._models = ask, models
        self._clients: dict[AnyJudge, Asking] = {}
        self._reported: dict[str, float] = {}

    def __eq__(self, other: object) -> bool:
        """Return whether both objects query the same models, to compare settings that contain judges. The query counts are ignored."""
        return isinstance(other, Judges) and (self._ask, self._models) == (other._ask, other._models)

    def __hash__(self) -> int:
        return hash((self._ask, self._models))

    def of(self, judge: AnyJudge) -> Asking:
        """Return the client of a judge. Raises DataError if the `cache` cannot be read or written."""
        if judge not in self._clients:
            if self._ask is not None:
                query = self._ask
            elif isinstance(judge, EndpointJudge):
                query = query_endpoint(judge)
            elif self._models is None:
                raise ConfigError(
                    f"The judge '{judge.path}' is a frozen model, but the process that runs episodes has not loaded it. Use an endpoint."
                )
            else:
                query = self._models.ask(FrozenModel(judge.path, judge.max_tokens))
            self._clients[judge] = Asking(judge, query)
        return self._clients[judge]

    def close(self) -> None:
        """Release the frozen models."""
        if self._models is not None:
            self._models.close()

    def costs(self) -> Mapping[str, float]:
        """Return the numbers of queries, cached replies and missing verdicts of all judges since the last call."""
        every = self._clients.values()
        now = {
            "judge/calls": float(sum(each.calls for each in every)),
            "judge/cached": float(sum(each.cached for each in every)),
            "judge/ungraded": float(sum(each.ungraded for each in every)),
        }
        row = {name: count - self._reported.get(name, 0.0) for name, count in now.items()}
        self._reported = now
        return row if every else {}


class UsesJudges(Settings, UsesModels):
    """Settings with judges. A judge is a model at an endpoint, a frozen model in this process or, in Python, any function."""

    _ask: Ask | None = PrivateAttr(default=None)
    _judges: Judges = PrivateAttr(default_factory=Judges)

    @property
    @abstractmethod
    def asked(self) -> Sequence[tuple[AnyJudge, QuestionCounts]]:
        """The judges, each with the number of its queries."""

    def judged_by(self, ask: Ask) -> Self:
        """Return a copy of the settings in which `ask` replaces all judges, for example `engines.rollout.judge.query_engine(...)`."""
        copy = self.model_copy()
        copy._ask, copy._judges = ask, Judges(ask)  # noqa: SLF001 - its own class
        return copy

    @property
    def frozen_models(self) -> Sequence[FrozenModel]:
        """The judges that are frozen models in this process."""
        if self._ask is not None:
            return []
        judges = [judge for judge, _ in self.asked if isinstance(judge, ModelJudge)]
        return list(dict.fromkeys(FrozenModel(judge.path, judge.max_tokens) for judge in judges))

    def with_models(self, models: ModelsInPlace) -> Self:  # type: ignore[override] # subclasses are environments
        """Return a copy of the settings in which `models` are the judges in this process."""
        copy = self.model_copy()
        copy._judges = Judges(self._ask, models)  # noqa: SLF001 - its own class
        return copy

    def release_models(self) -> None:
        """Release the models of the judges in this process."""
        self._judges.close()

    def questions(self) -> Mapping[str, QuestionCounts]:
        """Return the number of queries to each model, keyed by its path or name.

        Judges with equal settings share the limit `concurrency`.
        """
        found: dict[str, QuestionCounts] = {}
        waited: set[AnyJudge] = set()
        for judge, more in self.asked:
            name = judge.path if isinstance(judge, ModelJudge) else judge.model
            before = found.get(name, QuestionCounts())
            at_once = before.at_once + (0 if judge in waited else judge.concurrency)
            found[name] = QuestionCounts(before.episode + more.episode, before.group + more.group, at_once)
            waited.add(judge)
        return found

    def costs(self) -> Mapping[str, float]:
        """Return the numbers of queries, cached replies and missing verdicts of all judges since the last call."""
        return self._judges.costs()
