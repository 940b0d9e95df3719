"""Check the settings of rollouts ahead of the update before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from kapelle.engines.rollout.protocol import AllowsInterrupts
from kapelle.environment import DrivenByPrograms, InMemory, RewardsEpisodes, offers
from kapelle.features.ahead.settings import AheadSettings
from kapelle.settings.checks import RunToCheck
from kapelle.setup.feature import FeaturePlan


class AheadPlan(FeaturePlan[AheadSettings]):
    """The checks of samples from older weights, of another sampling process, and of unfinished groups."""

    def check(self, run: RunToCheck) -> Iterator[str]:
        """Yield the reasons why episodes cannot be collected with these settings."""
        algorithm = run.algorithm
        exchanges = any(hook.moves_weights for hook in algorithm.after_update)
        if self.settings.max_staleness and (exchanges or not algorithm.collects_episodes):
            reason = "exchanges weights" if exchanges else "does not learn from rollouts"
            yield f"`training.max_staleness` lets rollouts run ahead, but `{algorithm.name}` {reason}. Set it to 0."
        if self.settings.overlap:
            yield from self._overlap(run)
        if self.settings.partial_rollouts:
            yield from self._partial(run)

    def _overlap(self, run: RunToCheck) -> Iterator[str]:
        environment = run.config.environment
        if offers(environment, InMemory) and environment.in_memory:
            names = ", ".join(environment.in_memory)
            yield f"`training.overlap` samples in another process, which cannot access {names} in memory. Set it to false."
        if offers(environment, DrivenByPrograms):
            yield "`training.overlap` samples in another process, which external programs cannot follow. Set it to false."

    def _partial(self, run: RunToCheck) -> Iterator[str]:
        config, algorithm = run.config, run.algorithm
        environment, data = config.environment, algorithm.data
        partial = "`training.partial_rollouts` continues unfinished episodes in the next step"
        if not self.settings.max_staleness:
            yield (
                f"{partial}, whose samples are then older than that step's weights. Set `training.max_staleness` to 1 or more."
            )
        if config.training.tasks_per_step < 2:
            yield (
                f"{partial}, but each step waits for at least one group. Set `training.tasks_per_step` to 2 or more."
            )
        if data.redraw or data.tree or data.widths or data.interventions:
            yield f"{partial}, but `{algorithm.name}` needs whole episodes. Set `training.partial_rollouts` to 0."
        if not isinstance(config.engine, AllowsInterrupts):
            yield (
                f"{partial}, but the engine `{config.engine.name}` cannot return unfinished completions. Set `engine.name: local`."
            )
        if offers(environment, DrivenByPrograms):
            yield f"{partial}, which external programs cannot follow. Set it to 0."
        if offers(environment, RewardsEpisodes) and environment.compared:
            yield f"{partial}, but {environment.compared[0]} compares the episodes of a group. Set it to 0."
