"""Whose reward is it: what the team earned, placed on the turns that each agent is trained on.

"The k-th round" is the k-th turn of every agent that has one. A team's reward is one number for a round and one for
the end, the same for every agent that speaks, however many turns it takes:

- of a round: `sum` adds what all agents were paid in it; `mean` is that sum over the number of agents in the team;
  `max` and `min` are over the agents that moved. It stands on an agent's turn of that round, or on its last turn
  where it has none, so that agents with fewer turns earn what the others earn.
- of the end: over the agents that the environment scored, on each agent's own last turn.

`individual` and `last` share nothing. Three placements follow from who reads it: `turn_rewards` (one trajectory per
agent), `chain_rewards` (one chain in time through all agents) and `round_rewards` (joint returns by round). The last two
count the team's reward once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol

import torch
from pydantic import Field

from kapelle.algorithm import Estimates, TurnKey
from kapelle.configured import Configured
from kapelle.functional.returns import team_individual, team_last, team_max, team_mean, team_min, team_sum
from kapelle.functional.shaping import length_penalty, overlong_penalty
from kapelle.types import Episode, Group, Turn

TeamReward = Literal["mean", "sum", "max", "min", "last", "individual"]
"""How rewards of the agents that were scored become everybody's: `last` pays the agent that closed the
episode and nobody else, `individual` leaves each agent its own."""

Truncated = Literal["keep", "mask", "penalise"]
"""What Monte Carlo estimators do with a turn that ran into its token limit: train on it as it is, leave it
out of the loss, or subtract a penalty from its reward."""

_UNSHARED = ("last", "individual")

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


def with_scores(groups: Sequence[Group], score: Mapping[TurnKey, float], weight: float) -> tuple[Group, ...]:
    """Return the groups with `weight` times its score added to the reward of every scored turn.

    This is a reward model as a term of the reward: whatever shares, places and compares rewards comes after it.
    """
    return tuple(
        replace(
            group,
            episodes=tuple(
                replace(
                    episode,
                    turns=tuple(
                        replace(turn, reward=turn.reward + weight * score.get(TurnKey(g, e, turn.index), 0.0))
                        for turn in episode.turns
                    ),
                )
                for e, episode in enumerate(group.episodes)
            ),
        )
        for g, group in enumerate(groups)
    )


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


def round_path(how: TeamReward, penalties: PenaltyConfig = FREE) -> RewardSource:
    """Return the source for joint returns by round: `round_rewards` less penalties."""
    return lambda place, episode, estimates: round_rewards(episode, how, penalties)


def turn_rewards(episode: Episode, how: TeamReward, penalties: PenaltyConfig = FREE) -> dict[int, float]:
    """Return the reward of every turn by its index, after sharing, placement and penalties."""
    own = _own_turns(episode)
    rewards = _penalties(episode, penalties)
    for k, movers in enumerate(_rounds(own)):
        paid = {agent: turn.reward for agent, turn in movers.items()}
        if not any(paid.values()):
            continue
        if how in _UNSHARED:
            _book_round(rewards, movers, how, episode)
        else:
            amount = _of_round(paid, how, episode)
            for turns in own.values():
                rewards[turns[min(k, len(turns) - 1)].index] += amount
    if episode.rewards:
        shared = _share(episode.rewards, how, episode)
        alone = 0.0 if how in _UNSHARED else next(iter(shared.values()))
        for agent, turns in own.items():
            rewards[turns[-1].index] += shared.get(agent, alone)
    return rewards


def chain_rewards(episode: Episode, how: TeamReward, penalties: PenaltyConfig = FREE) -> dict[int, float]:
    """Return the reward of every trained turn of the chain by its index: what the team earns stands once.

    A round's reward stands on the round's last turn and the terminal one on the episode's last turn;
    `individual` and `last` leave each agent's own on its own turn. What stands on a turn that is not trained
    moves to the trained turn before it.
    """
    own = _own_turns(episode)
    rewards = _penalties(episode, penalties)
    for movers in _rounds(own):
        _book_round(rewards, movers, how, episode)
    if episode.rewards and own:
        shared = _share(episode.rewards, how, episode)
        if how in _UNSHARED:
            for agent, turns in own.items():
                rewards[turns[-1].index] += shared.get(agent, 0.0)
        else:
            rewards[max(turns[-1].index for turns in own.values())] += next(iter(shared.values()))
    moved: dict[int, float] = {}
    before: int | None = None
    for turn in episode.turns:
        if turn.trained:
            before = turn.index
            moved[before] = moved.get(before, 0.0) + rewards[before]
        elif before is not None:
            moved[before] += rewards[turn.index]
    return moved


def round_rewards(episode: Episode, how: TeamReward, penalties: PenaltyConfig = FREE) -> dict[int, float]:
    """Return the reward of every trained turn by its index, so that sums over rounds are joint returns.

    What the team earns stands once: that of a round on a turn of the round, the terminal one on a turn of the last
    round, whichever turn is last in time (an agent that speaks once, at the end, has its turn in round 0). What stands
    in a round without a trained turn moves to the round before it that has one.
    """
    rounds = _rounds(_own_turns(episode))
    rewards = _penalties(episode, penalties)
    for movers in rounds:
        _book_round(rewards, movers, how, episode)
    moved: dict[int, float] = {}
    before: int | None = None
    for movers in rounds:
        trained = [turn.index for turn in movers.values() if turn.trained]
        moved |= {index: rewards[index] for index in trained}
        before = max(trained, default=before)
        if before is not None:
            moved[before] += sum(rewards[turn.index] for turn in movers.values() if not turn.trained)
    if episode.rewards and before is not None:
        shared = _share(episode.rewards, how, episode)
        moved[before] += sum(shared.values()) if how in _UNSHARED else next(iter(shared.values()))
    return moved


def _own_turns(episode: Episode) -> dict[str, tuple[Turn, ...]]:
    """Return each speaking agent's turns, in seat order."""
    return {agent: episode.by(agent) for agent in episode.agents if episode.by(agent)}


def _rounds(own: Mapping[str, Sequence[Turn]]) -> list[dict[str, Turn]]:
    """Return, for each round, who took which turn."""
    count = max((len(turns) for turns in own.values()), default=0)
    return [{agent: turns[k] for agent, turns in own.items() if len(turns) > k} for k in range(count)]


def _penalties(episode: Episode, penalties: PenaltyConfig) -> dict[int, float]:
    return {turn.index: penalties.of(turn) if turn.trained else 0.0 for turn in episode.turns}


def _book_round(
    rewards: dict[int, float], movers: Mapping[str, Turn], how: TeamReward, episode: Episode
) -> None:
    """Add what the team earned in a round, once: on the round's last turn, or each agent's own on its own."""
    paid = {agent: turn.reward for agent, turn in movers.items()}
    if not any(paid.values()):
        return
    if how in _UNSHARED:
        shared = _share(paid, how, episode)
        for agent, turn in movers.items():
            rewards[turn.index] += shared[agent]
    else:
        rewards[max(turn.index for turn in movers.values())] += _of_round(paid, how, episode)


def _of_round(paid: Mapping[str, float], how: TeamReward, episode: Episode) -> float:
    """Return the team's reward of a round of what those who moved were paid."""
    if how == "mean":
        return sum(paid.values()) / len(episode.agents)
    return next(iter(_SHARED[how](paid).values()))


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
