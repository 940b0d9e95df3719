"""The setup of rollouts: the environment, the workflow, the engine and the limits with which a team's episodes are rolled out.

The function `make_rollout_setup` creates a `RolloutSetup` from the settings of a run. A `RolloutSetup` is immutable. Code that needs
different episodes, such as greedy evaluation with its own `sampling`, uses a modified copy (`dataclasses.replace`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kapelle.algorithm import Data
from kapelle.engines.rollout.protocol import Completion, Request, RolloutEngine
from kapelle.environment import Environment, UsesModels, offers
from kapelle.features.compaction.settings import CompactionConfig
from kapelle.rollout.outcomes import FirstFailures
from kapelle.rollout.workers.pool import EnvironmentWorkers, HeldHere, Hold
from kapelle.runs.timeline import Timeline
from kapelle.runtime.deadlines import Patience
from kapelle.runtime.ranks import ALONE, Ranks
from kapelle.settings.schema import RunConfig
from kapelle.team import Agent, Team
from kapelle.types import Sampling
from kapelle.workflow import Workflow


@dataclass(frozen=True, slots=True, eq=False)
class RolloutSetup:
    """The components and settings with which episodes are rolled out. The first four fields are required."""

    team: Team
    environment: Environment
    workflow: Workflow
    engine: RolloutEngine

    # Set from the settings of a run

    patience: Patience = field(default_factory=Patience)
    """Time limit of each kind of call."""
    compaction: CompactionConfig | None = None
    """The rule for shortening a conversation that no longer fits in the context. Without a rule, the episode fails."""
    share_thoughts: bool = False
    """Whether agents and the environment can read other agents' thoughts."""
    run: str = ""
    """Name of the run, which external programs can use to call the team; empty if the run has no name."""
    workers: EnvironmentWorkers | None = None
    """The processes that run environments, or None if environments run in this process."""
    ranks: Ranks = ALONE
    """The processes among which the tasks are divided; see `shared_rollout`."""
    timeline: Timeline = field(default_factory=Timeline)
    """Recorder of the duration of each phase."""

    # Changed in a copy by the training loop, an evaluation or a service

    data: Data = field(default_factory=Data)
    """Settings of tree sampling, shared turns and interventions of the algorithm in training. By default, every episode is sampled
    separately."""
    sampling: Mapping[str, Sampling] | None = None
    """Sampling settings by agent, which replace the sampling settings of the team."""
    rewarded: bool = True
    """Whether the environment may compute rewards from complete episodes and groups (`RewardsEpisodes`). The value is False when a memory
    plan is computed."""
    generate: Callable[[Request], Awaitable[Completion]] | None = None
    """Function that answers requests instead of the engine's method `generate`."""
    first_failures: FirstFailures | None = None
    """Object that stops a run whose first episodes all fail, or None to never stop the run for this reason."""

    def sampling_of(self, agent: Agent) -> Sampling:
        """Return the sampling settings of an agent."""
        return (self.sampling or {}).get(agent.name, agent.sampling)

    def close(self) -> None:
        """End the processes of environments and free their models.

        The caller must close the engine.
        """
        if self.workers is not None:
            self.workers.close()
        if offers(self.environment, UsesModels):
            self.environment.release_models()


def make_rollout_setup(
    config: RunConfig, team: Team, engine: RolloutEngine, ranks: Ranks = ALONE, hold: Hold = HeldHere
) -> RolloutSetup:
    """Return the rollout setup of a team for the settings of a run. The argument `hold` starts the processes of environments."""
    environment: Any = config.environment  # its settings, or a copy with models in place
    if offers(environment, UsesModels) and environment.frozen_models:
        from kapelle.setup.frozen_models import FrozenModels  # slow: torch

        environment = environment.with_models(FrozenModels(config.model))
    size = config.episode.environment_workers
    workers = EnvironmentWorkers(environment, size, config.patience, hold) if size else None
    return RolloutSetup(
        team,
        environment,
        config.workflow,
        engine,
        patience=config.patience,
        ranks=ranks,
        workers=workers,
        compaction=config.episode.compaction,
        share_thoughts=config.episode.share_thoughts,
        run=config.name,
    )
