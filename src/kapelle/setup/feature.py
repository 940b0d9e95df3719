"""Defines the part of an optional feature that runs before a model is loaded.

This part contains the checks of the feature, and its additions to the algorithm and the team.
"""

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
"""A function that is called with a phase and details about the phase."""
ReportStep = Callable[[int, int, Mapping[str, float]], None]
"""A function that is called with the number of the step, the total number of steps and the metrics."""


class FeaturePlan(Generic[S]):
    """Base class for the checks and additions of a feature. By default, the methods add nothing."""

    def __init__(self, settings: S) -> None:
        self.settings = settings

    def extend(self, row: Algorithm) -> Algorithm:
        """Return the algorithm with the additions of the feature. Raises ConfigError if the algorithm and the feature are incompatible."""
        return row

    def policies(
        self, config: RunConfig, learners: Mapping[str, Policy], bases: Bases
    ) -> Mapping[str, Policy]:
        """Return the policies that the feature adds to the team, by name.

        The argument `learners` holds the trained policies of the team.
        """
        return {}

    def check(self, run: RunToCheck) -> Iterator[str]:
        """Yield a message for each reason that prevents training with the feature: what is wrong, where, and how to fix it."""
        yield from ()

    def made_base(self, config: RunConfig, path: str) -> str:
        """Return a description of everything that determines the base model created by the feature, or an empty string if there is none."""
        return ""

    def check_memory(self, run: RunToCheck, models: Mapping[str, Outline]) -> Iterator[str]:
        """Yield a message for each requirement that exceeds the machine's memory.

        The argument `models` holds the shape of each base model.
        """
        yield from ()


def plans_of(config: RunConfig) -> list[FeaturePlan[FeatureSettings]]:
    """Return the plans of the features that a run uses, in the order of the run's settings."""
    return [
        find_object(section.plan, "feature")(section)
        for section in sections_of(config).values()
        if section.plan
    ]


def bases_of(
    config: RunConfig, team: Team, progress: ReportStep, report: Report, held: dict[str, LanguageModel]
) -> Mapping[str, str]:
    """Return the path of each base model by name, including base models that features create.

    Base models that are created in memory are added to `held`, by path.
    """
    for section in sections_of(config).values():
        if section.bases:
            make = find_object(section.bases, "feature")
            team = replace(team, bases=make(config, team, progress, report, held))
    return team.bases
