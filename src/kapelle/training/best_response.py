"""Estimate a lower bound of a team's exploitability: the gain of the best response that training finds for one agent.

The estimate is meant for games that are too large to enumerate. The policy of one agent is trained further while all others
are frozen. The gain of this agent on held-out games is a lower bound, because longer training may find a better response. The
bound holds only with a certain confidence, because games are random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from kapelle.errors import ConfigError, EpisodeError
from kapelle.functional.statistics import mean_interval
from kapelle.rollout.evaluation.arena import payoff_of
from kapelle.runs.named_checkpoint import names_a_run, split_run, weights_of
from kapelle.settings.schema import RunConfig
from kapelle.settings.weights import PastAdapter
from kapelle.setup.team_builder import agent_configs
from kapelle.team import own_name
from kapelle.training.provenance import config_of_run
from kapelle.training.trainer import Trainer
from kapelle.types import Group

LEARNS = (
    "algorithm={name: grpo, group_size: 8, team_reward: individual, scale: none, loss: {entropy_coefficient: 0.01}}",
    "optimizer.lr=1e-3",
    "optimizer.betas=[0.9, 0.999]",
    "optimizer.schedule=linear",
    "training.tasks_per_step=16",
    "evaluation.every=0",
    "evaluation.greedy=false",
)
"""The default settings for the training of a best response."""

DOUBT = 0.05
"""The probability that the reported lower bound exceeds NashConv."""


@dataclass(frozen=True)
class Found:
    """The best response that was found for one agent."""

    agent: str
    before: float
    """The mean payoff of the agent with the weights of the run."""
    after: float
    """The mean payoff of the agent in the same games after the additional training."""
    interval: tuple[float, float] | None
    """The 95 % interval of the gain (`after` minus `before`) over games, by Student's t. The interval is None for fewer than
    two games."""
    at_least: float
    """A lower bound of the gain, which is at least 0. The bounds of all agents hold together with 95 % confidence."""
    steps: int
    episodes: int
    """The number of games that were played in the training of the best response."""
    curve: Sequence[float]
    """The mean payoff of the agent in each training step."""

    @property
    def gain(self) -> float:
        """The mean gain over the evaluated games."""
        return self.after - self.before


@dataclass(frozen=True)
class Exploited:
    """A lower bound of a team's exploitability."""

    run: str
    games: int
    """The number of games over which each mean is taken."""
    found: Sequence[Found]

    @property
    def nash_conv_found(self) -> float:
        """The sum of the agents' positive gains, which is NashConv (arXiv:1711.00832, section 4) for the responses found.

        The sum is biased upwards if gains are small.
        """
        return sum(max(0.0, each.gain) for each in self.found)

    @property
    def nash_conv_at_least(self) -> float:
        """A lower bound of NashConv with 95 % confidence, which is the sum of the agents' lower bounds."""
        return sum(each.at_least for each in self.found)

    def row(self) -> dict[str, Any]:
        """Return all values as a dict that can be stored as JSON."""
        return {
            "run": self.run,
            "games": self.games,
            "nash_conv_found": self.nash_conv_found,
            "nash_conv_at_least": self.nash_conv_at_least,
            "agents": [{**asdict(each), "gain": each.gain} for each in self.found],
        }


def exploit(
    run: str,
    *settings: str,
    steps: int = 50,
    games: int = 500,
    agents: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Exploited:
    """Train each agent (or only the given `agents`) alone against the frozen other agents of a run, and return the gains.

    The argument `run` may also be `RUN@best` or `RUN@STEP`; the run directory is only read. Additional `settings` such as
    `optimizer.lr=5e-4` change the training. Raises ConfigError for unknown agents and for policies that are not adapters, and
    EpisodeError if all games of an agent failed.
    """
    folder, _ = split_run(run)
    config = config_of_run(folder, (*LEARNS, f"training.steps={steps}", *settings))
    names = [role.name for role in agent_configs(config.team)]
    agents = [own_name(agent, config.name) for agent in agents]
    for agent in agents:
        if agent not in names:
            raise ConfigError(f"The team of {run} has no agent '{agent}'; it has {', '.join(names)}.")
    if not names_a_run(run):
        raise ConfigError(f"'{run}' is not a run. Give a run directory, RUN@best or RUN@STEP.")
    sought = agents or names
    doubt = DOUBT / len(sought)
    return Exploited(run, games, [_respond(config, run, agent, games, doubt, say) for agent in sought])


def _respond(
    config: RunConfig, run: str, agent: str, games: int, doubt: float, report: Callable[[str], None]
) -> Found:
    roles, own = [], weights_of(agent, run, "exploit")
    for role in agent_configs(config.team):
        kept = weights_of(role.name, run, "exploit")
        if not (kept / "adapter_config.json").is_file():
            raise ConfigError(
                f"{run} trains all weights of '{role.name}', but a best response needs adapters. Use a run with `team.sharing: lora`."
            )
        weights = "lora" if role.name == agent else PastAdapter(past=str(kept))
        roles.append(role.model_copy(update={"weights": weights}))
    team = config.team.model_copy(update={"agents": tuple(roles), "sharing": "lora"})
    with Trainer(
        config.model_copy(update={"team": team, "start_from": {}, "trackers": ()}),
        start_from={agent: str(own)},
    ) as trainer:
        before = _returns_of(trainer.evaluate(games).groups, agent)
        curve, episodes = [], 0
        for step in trainer.steps():
            returns = _returns_of(step.groups, agent)
            episodes += sum(len(group.episodes) for group in step.groups)
            curve.append(fmean(returns.values()) if returns else 0.0)
            report(f"{agent}: step {step.number} of {config.training.steps}, return {curve[-1]:+.3f} a game")
        after = _returns_of(trainer.evaluate(games).groups, agent)
        steps = trainer.done
    # Both evaluations have the same deals, so that their randomness cancels in the difference.
    both = sorted(before.keys() & after.keys())
    if not both:
        raise EpisodeError(
            f"None of the {games} games of '{agent}' succeeded both before and after its training."
        )
    gains = [after[game] - before[game] for game in both]
    surely = mean_interval(gains, 1.0 - 2.0 * doubt)
    return Found(
        agent,
        fmean(before[game] for game in both),
        fmean(after[game] for game in both),
        mean_interval(gains),
        0.0 if surely is None else max(0.0, surely[0]),
        steps,
        episodes,
        curve,
    )


def _returns_of(groups: Sequence[Group], agent: str) -> dict[tuple[str, int], float]:
    """Return an agent's payoff in each episode, by task and episode number.

    Failed episodes and penalties for invalid moves are excluded.
    """
    return {
        (group.task.id, number): payoff_of(episode, agent)
        for group in groups
        for number, episode in enumerate(group.episodes)
        if episode.error is None
    }
