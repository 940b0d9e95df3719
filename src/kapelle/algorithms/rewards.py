"""Whose reward is it: what the team earned, placed on the turns that each agent is trained on.

"The k-th round" is the k-th turn of every agent that has one; what is paid at the end stands on each
agent's own last turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, Protocol

import torch
from pydantic import Field

from kapelle.algorithm import Estimates
from kapelle.configured import Configured
from kapelle.functional.returns import team_individual, team_last, team_max, team_mean, team_min, team_sum
from kapelle.functional.shaping import length_penalty, overlong_penalty
from kapelle.types import Episode, Turn

TeamReward = Literal["mean", "sum", "max", "min", "last", "individual"]
"""How rewards of the agents that were scored become everybody's: `last` pays the agent that closed the
episode and nobody else, `individual` leaves each agent its own."""

Truncated = Literal["keep", "mask", "penalise"]
"""What Monte Carlo estimators do with a turn that ran into its token limit: train on it as it is, leave it
out of the loss, or subtract a penalty from its reward."""

_SHARED: Mapping[str, Callable[[Mapping[str, float]], Mapping[str, float]]] = {
    "mean": team_mean,
    "sum": team_sum,
    "max": team_max,
    "min": team_min,
    "individual": team_individual,
}


class PenaltyConfig(Configured):
    """What a completion's form costs, whatever it says; taken off the reward of its turn."""

    length: float = Field(0.0, ge=0.0)
    """Cost of a completion of `length_limit` tokens, in proportion for shorter ones."""
    length_limit: int = Field(64, ge=1)
    overlong_buffer: int = Field(0, ge=0)
    """DAPO's soft punishment (2503.14476 eq. 13): over the last so many tokens before `length_limit` it grows
    from 0 to 1; 0 turns it off."""
    no_stop: float = Field(0.0, ge=0.0)
    """Cost of a completion that was cut at its limit of tokens."""

    def of(self, turn: Turn) -> float:
        """Return what a turn pays, at most 0."""
        tokens = torch.tensor(float(len(turn.completion_ids)))
        cost = -self.no_stop * (turn.finish_reason == "length")
        if self.length:
            cost += float(length_penalty(tokens, coefficient=self.length, limit=self.length_limit))
        if self.overlong_buffer:
            cost += float(overlong_penalty(tokens, limit=self.length_limit, buffer=self.overlong_buffer))
        return cost


FREE = PenaltyConfig()


class RewardSource(Protocol):
    """Says what each turn of an episode is paid, by the turn's index; `place` is (group, episode)."""

    def __call__(self, place: tuple[int, int], episode: Episode, estimates: Estimates) -> Mapping[int, float]:
        """Return the reward of every trained turn."""
        ...


def own_path(how: TeamReward, penalties: PenaltyConfig = FREE) -> RewardSource:
    """Return the source for one trajectory per agent: `turn_rewards` less penalties."""
    return lambda place, episode, estimates: turn_rewards(episode, how, penalties)


def chain_path(how: TeamReward, penalties: PenaltyConfig = FREE) -> RewardSource:
    """Return the source for one chain through all agents: `chain_rewards` less penalties."""
    return lambda place, episode, estimates: chain_rewards(episode, how, penalties)


def chain_rewards(episode: Episode, how: TeamReward, penalties: PenaltyConfig = FREE) -> dict[int, float]:
    """Return the reward of every trained turn of the chain by its index: what the team earns stands once.

    A round's reward stands on the round's last turn and the terminal one on the episode's last turn;
    `individual` and `last` leave each agent's own on its own turn. What stands on a turn that is not trained
    moves to the trained turn before it.
    """
    own = {agent: episode.by(agent) for agent in episode.agents if episode.by(agent)}
    rewards = {turn.index: penalties.of(turn) if turn.trained else 0.0 for turn in episode.turns}
    for k in range(max((len(turns) for turns in own.values()), default=0)):
        movers = {agent: turns[k] for agent, turns in own.items() if len(turns) > k}
        paid = {agent: turn.reward for agent, turn in movers.items()}
        if any(paid.values()):
            _place(rewards, _share(paid, how, episode), {a: t.index for a, t in movers.items()}, how)
    if episode.rewards and own:
        last = {agent: turns[-1].index for agent, turns in own.items()}
        _place(rewards, _share(episode.rewards, how, episode), last, how)
    return _on_trained(episode, rewards)


def _place(
    rewards: dict[int, float], shared: Mapping[str, float], at: Mapping[str, int], how: TeamReward
) -> None:
    if how in ("individual", "last"):
        for agent, index in at.items():
            rewards[index] += shared.get(agent, 0.0)
    else:
        rewards[max(at.values())] += next(iter(shared.values()))


def _on_trained(episode: Episode, rewards: Mapping[int, float]) -> dict[int, float]:
    moved: dict[int, float] = {}
    before: int | None = None
    for turn in episode.turns:
        if turn.trained:
            before = turn.index
            moved[before] = moved.get(before, 0.0) + rewards[before]
        elif before is not None:
            moved[before] += rewards[turn.index]
    return moved


def turn_rewards(episode: Episode, how: TeamReward, penalties: PenaltyConfig = FREE) -> dict[int, float]:
    """Return the reward of every turn by its index, after sharing, placement and penalties."""
    own = {agent: episode.by(agent) for agent in episode.agents if episode.by(agent)}
    rewards = {turn.index: penalties.of(turn) if turn.trained else 0.0 for turn in episode.turns}
    rounds = max((len(turns) for turns in own.values()), default=0)
    for k in range(rounds):
        movers = {agent: turns[k] for agent, turns in own.items() if len(turns) > k}
        paid = {agent: turn.reward for agent, turn in movers.items()}
        if any(paid.values()):
            shared = _share(paid, how, episode)
            for agent, turn in movers.items():
                rewards[turn.index] += shared[agent]
    if episode.rewards:
        shared = _share(episode.rewards, how, episode)
        everyone = next(iter(shared.values()))
        for agent, turns in own.items():
            alone = 0.0 if how in ("last", "individual") else everyone
            rewards[turns[-1].index] += shared.get(agent, alone)
    return rewards


def agent_returns(episode: Episode, how: TeamReward, penalties: PenaltyConfig = FREE) -> dict[str, float]:
    """Return each speaking agent's undiscounted return after sharing and penalties."""
    rewards = turn_rewards(episode, how, penalties)
    totals: dict[str, float] = {}
    for turn in episode.turns:
        totals[turn.agent] = totals.get(turn.agent, 0.0) + rewards[turn.index]
    return totals


def shared_by(how: TeamReward, penalties: PenaltyConfig = FREE) -> Callable[[Episode], Mapping[str, float]]:
    """Return `agent_returns` for one way of sharing."""
    return partial(agent_returns, how=how, penalties=penalties)


def _share(paid: Mapping[str, float], how: TeamReward, episode: Episode) -> Mapping[str, float]:
    if how == "last":
        closing = episode.turns[-1].agent if episode.turns else next(iter(paid))
        return team_last({closing: 0.0, **paid}, closing)
    return _SHARED[how](paid)
