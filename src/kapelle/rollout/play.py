"""What a team's episodes are played with: environment, workflow, engine, limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from kapelle.algorithm import Data, Interventions, Tree
from kapelle.engines.rollout.protocol import Completion, Request, RolloutEngine
from kapelle.environment import (
    AsksModels,
    Environment,
    Holding,
    OneSeat,
    offers,
)
from kapelle.features.compaction.settings import CompactionConfig
from kapelle.rollout import bounded_worlds
from kapelle.rollout.workers.pool import EnvironmentWorkers, HeldHere, Hold
from kapelle.runs.timeline import Timeline
from kapelle.runtime.deadlines import Patience
from kapelle.runtime.machine import most_open
from kapelle.runtime.ranks import ALONE, Ranks
from kapelle.settings.schema import RunConfig
from kapelle.team import Agent, Team
from kapelle.types import Sampling
from kapelle.workflow import Workflow

# -------- How many episodes run at once; the others wait before they hold any resource, so that no episode blocks another


def at_once(environment: Environment, agents: int, tree: Tree | None, most: int, processes: int = 1) -> int:
    """Return how many episodes, at most `most`, have room for everything that their worlds hold in so many processes.

    These are pipes, connections, and a thread for every world that blocks. An episode has room for all of its worlds
    before it begins, so that none of them waits for another one of the same episode.
    """
    # Where episodes branch, the candidates of every agent are continued in their own worlds.
    worlds = 1 + tree.candidates * agents if tree else 1
    if getattr(environment, "blocking", False):
        most = min(most, processes * max(1, bounded_worlds.WORKERS // worlds))
    if not offers(environment, Holding):
        return most
    return min(most, processes * most_open(worlds * environment.descriptors(agents), most))


@dataclass(frozen=True, slots=True)
class Play:
    """Everything that an episode is played with."""

    team: Team
    environment: Environment
    workflow: Workflow
    engine: RolloutEngine
    sampling: Mapping[str, Sampling] | None = None
    """Sampling by agent in place of the team's own; greedy evaluation uses it."""
    tree: Tree | None = None
    """How episodes branch at every turn of a trained agent; None plays without branches."""
    widths: tuple[int, ...] = ()
    """How often each moment of a group is sampled; empty where its episodes share nothing."""
    pays: bool = True
    """Whether whole episodes and groups are paid; not where only what is sampled matters, such as for a plan."""
    interventions: Interventions | None = None
    """What is changed of every played episode; None plays none again."""
    timeline: Timeline = field(default_factory=Timeline, compare=False)
    """Records where the time goes."""
    patience: Patience = field(default_factory=Patience)
    """After how many seconds each kind of call is given up."""
    ranks: Ranks = ALONE
    """The processes that play the same tasks; `shared_rollout` deals them out."""
    workers: EnvironmentWorkers | None = field(default=None, compare=False)
    """The processes in which worlds live; None for this one."""
    compaction: CompactionConfig | None = None
    """What is kept of a conversation that no longer fits; None lets its episode fail."""
    share_thoughts: bool = False
    """Whether agents and the world read the others' thoughts."""
    generate: Callable[[Request], Awaitable[Completion]] | None = field(default=None, compare=False)
    """Answers requests in place of the engine's `generate`; a served team is overheard by it."""
    run: str = field(default="", compare=False)
    """The run's name, by which outside programs may call the team; empty where there is none."""

    one_seat: bool = field(init=False, compare=False)
    """Whether the environment's worlds take one text a move (`OneSeat`); asked once, since every episode needs it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "one_seat", offers(self.environment, OneSeat))

    def sampling_of(self, agent: Agent) -> Sampling:
        """Return how an agent's answers are sampled."""
        return (self.sampling or {}).get(agent.name, agent.sampling)

    def as_asked(self, data: Data) -> Play:
        """Return how the episodes of an algorithm's training are played."""
        return replace(self, tree=data.tree, widths=data.widths, interventions=data.interventions)

    def plainly(self) -> Play:
        """Return how whole episodes are played, each once."""
        return self.as_asked(Data())

    def close(self) -> None:
        """End the processes in which worlds live, and free the models that were asked; the engine belongs to whoever made it."""
        if self.workers is not None:
            self.workers.close()
        if offers(self.environment, AsksModels):
            self.environment.release_models()


def make_play(
    config: RunConfig, team: Team, engine: RolloutEngine, ranks: Ranks = ALONE, hold: Hold = HeldHere
) -> Play:
    """Return what a team's episodes are played with: environment and workflow of the settings, team and engine.

    `hold` starts the processes in which worlds live, if they do.
    """
    environment = config.environment
    if offers(environment, AsksModels) and environment.frozen_models:
        from kapelle.setup.frozen_models import FrozenModels  # slow: torch

        judged = environment.asking(FrozenModels(config.model))
        config = config.model_copy(update={"environment": judged})
    size = config.episode.environment_workers
    workers = EnvironmentWorkers(config.environment, size, config.patience, hold) if size else None
    world = (config.environment, config.workflow)
    return Play(
        team,
        *world,
        engine,
        patience=config.patience,
        ranks=ranks,
        workers=workers,
        compaction=config.episode.compaction,
        share_thoughts=config.episode.share_thoughts,
        run=config.name,
    )
