"""How a team's episodes are rolled out: environment, workflow, engine, limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kapelle.algorithm import Data, Interventions, Tree
from kapelle.engines.rollout.protocol import Completion, Request, RolloutEngine
from kapelle.environment import Environment, Holding, TeamMoves, UsesModels, offers
from kapelle.features.compaction.settings import CompactionConfig
from kapelle.rollout import bounded_states
from kapelle.rollout.outcomes import FirstFailures
from kapelle.rollout.workers.pool import EnvironmentWorkers, HeldHere, Hold
from kapelle.runs.timeline import Timeline
from kapelle.runtime.deadlines import Patience
from kapelle.runtime.machine import most_open
from kapelle.runtime.ranks import ALONE, Ranks
from kapelle.settings.schema import RunConfig
from kapelle.team import Agent, Team
from kapelle.types import Sampling
from kapelle.workflow import Workflow

# -------- The number of concurrent episodes: others wait before they use any resource, so that no episode blocks another


def at_once(environment: Environment, agents: int, tree: Tree | None, most: int, processes: int = 1) -> int:
    """Return how many episodes, at most `most`, have enough resources in `processes`: descriptors, and threads if they block.

    The resources of an episode include those of its continuations, so that it never waits for itself.
    """
    # In a tree, the candidates of every agent are continued in their own environments.
    states = 1 + tree.candidates * agents if tree else 1
    if getattr(environment, "blocking", False):
        most = min(most, processes * max(1, bounded_states.WORKERS // states))
    if not offers(environment, Holding):
        return most
    return min(most, processes * most_open(states * environment.descriptors(agents), most))


@dataclass(frozen=True, slots=True)
class RolloutSetup:
    """How an episode is rolled out."""

    team: Team
    environment: Environment
    workflow: Workflow
    engine: RolloutEngine
    sampling: Mapping[str, Sampling] | None = None
    """Sampling by agent in place of the team's; greedy evaluation uses it."""
    tree: Tree | None = None
    """How episodes branch at every turn of a trained agent; None for no branches."""
    widths: tuple[int, ...] = ()
    """How often each moment of a group is sampled; empty if its episodes share no turns."""
    pays: bool = True
    """Whether environments reward whole episodes and groups; a plan needs only the samples."""
    interventions: Interventions | None = None
    """The changes with which finished episodes are continued; None for none."""
    timeline: Timeline = field(default_factory=Timeline, compare=False)
    """Records the time of each phase."""
    patience: Patience = field(default_factory=Patience)
    """Time limit of each kind of call."""
    ranks: Ranks = ALONE
    """The processes that share the tasks; see `shared_rollout`."""
    workers: EnvironmentWorkers | None = field(default=None, compare=False)
    """The processes of environments; None for this one."""
    compaction: CompactionConfig | None = None
    """The rule for a conversation that no longer fits the context; without one its episode fails."""
    share_thoughts: bool = False
    """Whether agents and the environment read other agents' thoughts."""
    generate: Callable[[Request], Awaitable[Completion]] | None = field(default=None, compare=False)
    """Answers requests in place of the engine's `generate`; services use it."""
    first_failures: FirstFailures | None = field(default=None, compare=False)
    """Ends a run whose first episodes all fail; None lets all of them fail."""
    run: str = field(default="", compare=False)
    """The run's name, by which outside programs may call the team; empty without one."""

    team_moves: bool = field(init=False, compare=False)
    """Whether the environment takes one text a move (`TeamMoves`)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "team_moves", offers(self.environment, TeamMoves))

    def sampling_of(self, agent: Agent) -> Sampling:
        """Return an agent's sampling."""
        return (self.sampling or {}).get(agent.name, agent.sampling)

    def for_algorithm(self, data: Data) -> RolloutSetup:
        """Return the setup of an algorithm's training episodes."""
        return replace(self, tree=data.tree, widths=data.widths, interventions=data.interventions)

    def plainly(self) -> RolloutSetup:
        """Return the setup of episodes without branches and continuations."""
        return self.for_algorithm(Data())

    def close(self) -> None:
        """End the processes of environments and free their models; the caller closes the engine."""
        if self.workers is not None:
            self.workers.close()
        if offers(self.environment, UsesModels):
            self.environment.release_models()


def make_rollout_setup(
    config: RunConfig, team: Team, engine: RolloutEngine, ranks: Ranks = ALONE, hold: Hold = HeldHere
) -> RolloutSetup:
    """Return the rollout setup of a team by the settings; `hold` starts the processes of environments."""
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
