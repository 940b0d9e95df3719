"""The part of an optional feature that runs before a model is loaded: its checks, and its additions to the algorithm and the team."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from kapelle.algorithm import Algorithm
from kapelle.models.outline import Outline
from kapelle.runtime.plugins import find_object
from kapelle.settings.checks import RunToCheck
from kapelle.settings.feature import FeatureSettings, sections_of
from kapelle.settings.schema import RunConfig
from kapelle.setup.bases import Bases
from kapelle.team import Policy, Team

if TYPE_CHECKING:
    from kapelle.models.language_model import LanguageModel

S = TypeVar("S", bound=FeatureSettings)

Report = Callable[[str, str], None]
"""Called with a phase and details about it."""
ReportStep = Callable[[int, int, Mapping[str, float]], None]
"""Called with the step, the number of steps and the metrics."""


class FeaturePlan(Generic[S]):
    """The checks and additions of a feature. By default, every method adds nothing."""

    def __init__(self, settings: S) -> None:
        self.settings = settings

    def extend(self, row: Algorithm) -> Algorithm:
        """Return the algorithm with the feature's additions; raises ConfigError if the two are incompatible."""
        return row

    def policies(
        self, config: RunConfig, learners: Mapping[str, Policy], bases: Bases
    ) -> Mapping[str, Policy]:
        """Return the policies that the feature adds to the team, by name; `learners` are the team's trained policies."""
        return {}

    def check(self, run: RunToCheck) -> Iterator[str]:
        """Yield a message for each reason that prevents training with the feature: the fault, where it is, and how to fix it."""
        yield from ()

    def made_base(self, config: RunConfig, path: str) -> str:
        """Return a description of all that determines the base model that it creates from a model's path; empty if it creates none."""
        return ""

    def check_memory(self, run: RunToCheck, models: Mapping[str, Outline]) -> Iterator[str]:
        """Yield a message for each requirement that exceeds the machine's memory; `models` has the shape of each base model."""
        yield from ()


def plans_of(config: RunConfig) -> list[FeaturePlan[FeatureSettings]]:
    """Return the plans of the features that a run uses, in the order of its settings."""
    return [
        find_object(section.plan, "feature")(section)
        for section in sections_of(config).values()
        if section.plan
    ]


def bases_of(
    config: RunConfig, team: Team, progress: ReportStep, report: Report, held: dict[str, LanguageModel]
) -> Mapping[str, str]:
    """Return the path of each base model by name, including those that features create; models in memory are added to `held`, by path."""
    for section in sections_of(config).values():
        if section.bases:
            make = find_object(section.bases, "feature")
            team = replace(team, bases=make(config, team, progress, report, held))
    return team.bases
