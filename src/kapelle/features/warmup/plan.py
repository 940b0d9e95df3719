"""The checks of a warm-up, before a model is loaded, and the base that it makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kapelle.environment import Teachable, offers
from kapelle.features.warmup.key import warmup_key
from kapelle.features.warmup.settings import WarmupConfig
from kapelle.settings.checks import RunToCheck
from kapelle.settings.environments import demonstrates
from kapelle.settings.schema import RunConfig
from kapelle.setup.feature import FeaturePlan, Report, ReportStep
from kapelle.team import Team

if TYPE_CHECKING:
    from kapelle.models.language_model import LanguageModel


class WarmupPlan(FeaturePlan[WarmupConfig]):
    """The checks of a warm-up, and the base models that it makes."""

    def check(self, run: RunToCheck) -> Iterator[str]:
        """Yield a message if no script demonstrates the roles, or if the base is already in memory."""
        environment, path = run.config.environment, run.config.model.path
        if not demonstrates(environment):
            yield (
                f"`warmup` plays the environment's script, but '{environment.name}' has none. Remove `warmup`."
                + (" Or name one: `environment.teacher`." if offers(environment, Teachable) else "")
            )
        if path in run.given:
            yield (
                f"`warmup` makes a model of its own from `model.path`, but '{path}' is in memory already. Remove `warmup`, or pass no "
                "model."
            )

    def bases(
        self,
        config: RunConfig,
        team: Team,
        progress: ReportStep,
        report: Report,
        held: dict[str, LanguageModel],
    ) -> Mapping[str, str]:
        """Return the bases with the warmed-up model in place of `model.path`; trains it unless it is cached."""
        from kapelle.features.warmup.stage import warmed_bases  # slow: torch

        return warmed_bases(config, team, progress, report, held)

    def made_base(self, config: RunConfig, path: str) -> str:
        """Return the hash of what determines the warmed-up model."""
        return f"warm-up {warmup_key(config)}" if path == config.model.path else ""
