"""How much one agent could gain against a frozen team: its best response as far as training finds it.

In a game that is too large to enumerate, exploitability is bounded from below: an agent's policy goes on learning from where the
run left it, while all others stay as they are, and is then played on games that nothing was trained on. What it earns more than
before, it could have earned all along; a longer search may find more. Games are drawn by chance, and so a bound holds with a
confidence: where nobody can gain, some gain is found all the same in about half of all searches.
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
from kapelle.setup.team_builder import seats_of
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
"""How a best response is sought unless settings say otherwise: against players who stay as they are this is ordinary learning."""

DOUBT = 0.05
"""How often the bound on NashConv may be wrong."""


@dataclass(frozen=True)
class Found:
    """One agent's best response as far as it was found."""

    agent: str
    before: float
    """What a game pays the agent as the run left it."""
    after: float
    """What it is paid after it alone went on learning, on the same games."""
    interval: tuple[float, float] | None
    """95 % interval of the gain, `after` less `before`, over games; Student's t. None for fewer than two games."""
    at_least: float
    """What it surely gains, 0 or more: lower ends of all agents hold together in 95 of 100 searches."""
    steps: int
    episodes: int
    """Games that were played to find it."""
    curve: Sequence[float]
    """What the games of each step of training paid it."""

    @property
    def gain(self) -> float:
        """What it gained in these games."""
        return self.after - self.before


@dataclass(frozen=True)
class Exploited:
    """How exploitable a team is at least."""

    run: str
    games: int
    """Games that each value is the mean of."""
    found: Sequence[Found]

    @property
    def nash_conv_found(self) -> float:
        """The sum of the agents' gains, those below 0 left out: NashConv (1711.00832, section 4) by these responses; too high on average where little can be gained."""
        return sum(max(0.0, each.gain) for each in self.found)

    @property
    def nash_conv_at_least(self) -> float:
        """A lower bound of NashConv at a confidence of 95 %: the sum of what the agents surely gain."""
        return sum(each.at_least for each in self.found)

    def row(self) -> dict[str, Any]:
        """Return the numbers as plain JSON."""
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
    """Return what each of a team's agents (or those named) gains by learning alone against the others of a run's checkpoint.

    `run` may be `RUN@best` or `RUN@STEP`; the run is only read. `settings` such as `optimizer.lr=5e-4` change how the response
    learns. ConfigError for an agent that the team does not have, and for policies that are no adapters; EpisodeError where no game of an agent was
    played to its end.
    """
    folder, _ = split_run(run)
    config = config_of_run(folder, (*LEARNS, f"training.steps={steps}", *settings))
    names = [seat.name for seat in seats_of(config.team)]
    agents = [own_name(agent, config.name) for agent in agents]
    for agent in agents:
        if agent not in names:
            raise ConfigError(f"The team of {run} has no agent '{agent}'; it has {', '.join(names)}.")
    if not names_a_run(run):
        raise ConfigError(f"'{run}' is no run. Name a run directory, RUN@best or RUN@STEP.")
    sought = agents or names
    doubt = DOUBT / len(sought)
    return Exploited(run, games, [_respond(config, run, agent, games, doubt, say) for agent in sought])


def _respond(
    config: RunConfig, run: str, agent: str, games: int, doubt: float, say: Callable[[str], None]
) -> Found:
    seats, own = [], weights_of(agent, run, "exploit")
    for seat in seats_of(config.team):
        kept = weights_of(seat.name, run, "exploit")
        if not (kept / "adapter_config.json").is_file():
            raise ConfigError(
                f"{run} trains all weights of '{seat.name}'; best responses are sought for adapters (`team.sharing: lora` or `shared`)."
            )
        weights = "lora" if seat.name == agent else PastAdapter(past=str(kept))
        seats.append(seat.model_copy(update={"weights": weights}))
    team = config.team.model_copy(update={"agents": tuple(seats), "sharing": "lora"})
    with Trainer(
        config.model_copy(update={"team": team, "start_from": {}, "trackers": ()}),
        start_from={agent: str(own)},
    ) as trainer:
        before = _earned(trainer.evaluate(games).groups, agent)
        curve, episodes = [], 0
        for step in trainer.steps():
            played = _earned(step.groups, agent)
            episodes += sum(len(group.episodes) for group in step.groups)
            curve.append(fmean(played.values()) if played else 0.0)
            say(f"{agent}: step {step.number} of {config.training.steps}, earns {curve[-1]:+.3f} a game")
        after = _earned(trainer.evaluate(games).groups, agent)
        steps = trainer.done
    # A game of each evaluation has the same deal, so that luck cancels in the difference.
    both = sorted(before.keys() & after.keys())
    if not both:
        raise EpisodeError(
            f"No game of the {games} in which '{agent}' was measured was played to its end before and after it learned."
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


def _earned(groups: Sequence[Group], agent: str) -> dict[tuple[str, int], float]:
    """Return what the game paid an agent, by task and number of the episode; failed ones are left out.

    Penalties for invalid moves are training's: who learns to avoid them takes nothing from anybody.
    """
    return {
        (group.task.id, number): payoff_of(episode, agent)
        for group in groups
        for number, episode in enumerate(group.episodes)
        if episode.error is None
    }
