"""Check the settings of rollouts ahead of the update before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from kapelle.engines.rollout.protocol import AllowsInterrupts
from kapelle.environment import DrivenByPrograms, InMemory, offers
from kapelle.features.ahead.settings import AheadSettings
from kapelle.settings.checks import RunToCheck
from kapelle.setup.feature import FeaturePlan


class AheadPlan(FeaturePlan[AheadSettings]):
    """The checks of samples from older weights and of another sampling process."""

    def check(self, run: RunToCheck) -> Iterator[str]:
        """Yield the reasons why episodes cannot be collected with these settings."""
        algorithm = run.algorithm
        exchanges = any(hook.moves_weights for hook in algorithm.after_update)
        if self.settings.max_staleness and (exchanges or not algorithm.collects_episodes):
            reason = "exchanges weights" if exchanges else "does not learn from rollouts"
            yield f"`training.max_staleness` lets rollouts run ahead, but `{algorithm.name}` {reason}. Set it to 0."
        if self.settings.asynchronous:
            yield from self._asynchronous(run)

    def _asynchronous(self, run: RunToCheck) -> Iterator[str]:
        config, environment = run.config, run.config.environment
        if not self.settings.max_staleness:
            yield (
                "`training.asynchronous` samples during updates, so samples are older than the weights of their step. Set "
                "`training.max_staleness` to 1 or more."
            )
        if not isinstance(config.engine, AllowsInterrupts):
            yield (
                f"`training.asynchronous` loads new weights while episodes continue, which the engine `{config.engine.name}` does not support. "
                "Set it to false."
            )
        else:
            config.engine.check_interrupts(
                constrained=any(agent.sampling.constraint for agent in run.team.agents)
            )
        if offers(environment, InMemory) and environment.in_memory:
            names = ", ".join(environment.in_memory)
            yield f"`training.asynchronous` samples in another process, which cannot access {names} in memory. Set it to false."
        if offers(environment, DrivenByPrograms):
            yield "`training.asynchronous` samples in another process, which external programs cannot reach. Set it to false."
