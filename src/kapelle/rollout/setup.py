"""How a team's episodes are rolled out: environment, workflow, engine, limits.

`make_rollout_setup` makes a `RolloutSetup` from a run's settings. It is an immutable value: code that needs different episodes, such as greedy evaluation
with its own `sampling`, works with a copy (`dataclasses.replace`).
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
    """How episodes are rolled out. The first four fields are required."""

    team: Team
    environment: Environment
    workflow: Workflow
    engine: RolloutEngine

    # Set from the settings of a run

    patience: Patience = field(default_factory=Patience)
    """Time limit of each kind of call."""
    compaction: CompactionConfig | None = None
    """The rule for a conversation that no longer fits the context; without a rule, its episode fails."""
    share_thoughts: bool = False
    """Whether agents and the environment read other agents' thoughts."""
    run: str = ""
    """The run's name, by which external programs may call the team; empty if it has none."""
    workers: EnvironmentWorkers | None = None
    """The processes that run environments; None for this process."""
    ranks: Ranks = ALONE
    """The processes that share the tasks; see `shared_rollout`."""
    timeline: Timeline = field(default_factory=Timeline)
    """Records the time of each phase."""

    # Changed in a copy by the training loop, an evaluation or a service

    data: Data = field(default_factory=Data)
    """The algorithm's trees, shared turns and interventions in training; the default samples every episode separately."""
    sampling: Mapping[str, Sampling] | None = None
    """Sampling by agent in place of the team's."""
    rewarded: bool = True
    """Whether the environment may reward complete episodes and groups (`RewardsEpisodes`); false for a memory plan."""
    generate: Callable[[Request], Awaitable[Completion]] | None = None
    """Answers requests in place of the engine's `generate`."""
    first_failures: FirstFailures | None = None
    """Ends a run whose first episodes all fail; None for no such limit."""

    def sampling_of(self, agent: Agent) -> Sampling:
        """Return an agent's sampling."""
        return (self.sampling or {}).get(agent.name, agent.sampling)

    def close(self) -> None:
        """End the processes of environments and free their models; the caller closes the engine."""
        if self.workers is not None:
            self.workers.close()
        if offers(self.environment, UsesModels):
            self.environment.release_models()


def make_rollout_setup(
    config: RunConfig, team: Team, engine: RolloutEngine, ranks: Ranks = ALONE, hold: Hold = HeldHere
) -> RolloutSetup:
    """Return the rollout setup of a team for the settings; `hold` starts the processes of environments."""
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
