"""Check the settings of a warm-up before a model is loaded, and compute a hash of the settings that determine the warmed-up model."""

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
    """The checks of a warm-up, and the hash of the settings that determine the warmed-up model."""

    def check(self, run: RunToCheck) -> Iterator[str]:
        """Yield a message if there is no scripted expert for the roles, or if the base model is already in memory."""
        environment, path = run.config.environment, run.config.model.path
        if not demonstrates(environment):
            yield (
                f"`warmup` needs the environment's script, but '{environment.name}' has none. Remove `warmup`."
                + (" Or set `environment.teacher`." if offers(environment, Teachable) else "")
            )
        if path in run.given:
            yield (
                f"`warmup` trains a copy of the model in `model.path`, but '{path}' is already in memory. Remove `warmup`, or do not pass a "
                "model."
            )

    def made_base(self, config: RunConfig, path: str) -> str:
        """Return a hash of all values that determine the warmed-up model."""
        return f"warm-up {warmup_key(config)}" if path == config.model.path else ""
