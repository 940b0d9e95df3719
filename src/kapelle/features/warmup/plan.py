"""The checks of a warm-up, before a model is loaded, and what its base depends on."""

from __future__ import annotations

from collections.abc import Iterator

from kapelle.environment import Teachable, offers
from kapelle.features.warmup.key import warmup_key
from kapelle.features.warmup.settings import WarmupConfig
from kapelle.settings.checks import RunToCheck
from kapelle.settings.environments import demonstrates
from kapelle.settings.schema import RunConfig
from kapelle.setup.feature import FeaturePlan


class WarmupPlan(FeaturePlan[WarmupConfig]):
    """The checks of a warm-up, and what its base depends on."""

    def check(self, run: RunToCheck) -> Iterator[str]:
        """Yield a message if no script demonstrates the roles, or if the base is already in memory."""
        environment, path = run.config.environment, run.config.model.path
        if not demonstrates(environment):
            yield (
                f"`warmup` needs the environment's script, but '{environment.name}' has none. Remove `warmup`."
                + (" Or name one: `environment.teacher`." if offers(environment, Teachable) else "")
            )
        if path in run.given:
            yield (
                f"`warmup` trains a copy of the model in `model.path`, but '{path}' is in memory already. Remove `warmup`, or pass no "
                "model."
            )

    def made_base(self, config: RunConfig, path: str) -> str:
        """Return the hash of what determines the warmed-up model."""
        return f"warm-up {warmup_key(config)}" if path == config.model.path else ""
