"""Compute the rewards of turns: how rewards are shared among the agents of a team and placed on trained turns.

The environment gives rewards at moments between turns (`Episode.reward_events`) and at the end of an episode
(`Episode.rewards`). Agents that did not move can also receive a reward at a moment: in a cooperative game, all players gain
from the move of one player. `Turn.reward` adds such a reward to the agent's last turn before the moment. A return that
several agents share must include the reward from the move that caused it. Credit is therefore computed from the moments and
not from `Turn.reward`.

The setting `team_reward` reduces the rewards of several agents at one time to one number for the team. Every agent with turns
receives this number. It is computed and placed as follows:

- At a moment, `sum` adds the rewards of all agents. `mean` divides the sum by the number of agents in the team. `max` and
  `min` are taken over the rewarded agents. The number is placed on the agent's last turn before the moment, or on its first
  turn if there is no earlier turn.
- At the end of an episode, the number is computed over the agents that the environment scored, and is placed on the last turn
  of each agent.

With `individual`, `last` and `win`, rewards are not shared. With `win`, the agents' rewards at one time are replaced by 1 for
the agent whose reward exceeds those of all others, and by 0 for the others. There are three placements: `turn_rewards` (one trajectory per agent),
`chain_rewards` (one chain in time through all agents) and `round_rewards` (joint returns by round; round k holds the k-th
turn of every agent). The last two count the team's reward once. `deferred_rewards` returns the part of a turn's reward that
was given after the turn had ended: for moves of other agents, and at the end of the episode.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from pydantic import Field

from kapelle.algorithms.shared.groups import valid_episodes
from kapelle.functional.shaping import overlong_penalty
from kapelle.rows import TurnKey
from kapelle.runtime.on_demand import torch
from kapelle.settings.base import Settings
from kapelle.types import Episode, Group, Turn

TeamReward = Literal["mean", "sum", "max", "min", "last", "individual", "win"]
"""How rewards are shared among agents. With `mean`, `sum`, `max` or `min`, all agents receive this function of their rewards.
With `last`, only the agent with the last turn of the episode is rewarded (MARFT, arXiv:2504.16129). With `individual`, each
agent keeps its own reward. With `win`, an agent receives 1 if its own reward exceeds those of all other agents, and 0 otherwise
(Agon, arXiv:2607.07690)."""

Truncated = Literal["keep", "mask", "penalise"]
"""How a turn that reached its token limit is treated: trained on unchanged (`keep`), masked in the loss (`mask`), or
penalised in its reward (`penalise`)."""


def need_team_return(shared: TeamReward) -> None:
    """Raise ValueError if rewards are `individual` or `win`.

    Settings of algorithms that decompose the team's return call this function in a validator.
    """
    if shared in ("individual", "win"):
        raise ValueError(
            f"`team_reward: {shared}` gives the team no common return to decompose; set `mean`, `sum`, `max`, `min` or "
            "`last`, or `algorithm.name: ippo`"
        )


class PenaltyConfig(Settings):
    """Penalties for the form of a completion. The penalties are subtracted from the reward of the turn."""

    length: float = Field(default=0.0, ge=0.0)
    """The penalty of a completion with `length_limit` tokens. The penalty is proportional to the length of the completion."""
    length_limit: int = Field(default=64, ge=1)
    """The completion length in tokens to which the settings `length` and `overlong_buffer` refer."""
    overlong_buffer: int = Field(default=0, ge=0)
    """The width in tokens of DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13). The punishment increases from 0 to 1
    over this number of tokens before `length_limit`. With 0, there is no punishment."""
    no_stop: float = Field(default=0.0, ge=0.0)
    """The penalty of a completion that reached its token limit."""

    def of(self, turn: Turn) -> float:
        """Return the penalty of a turn as a number that is at most 0."""
        cost = -self.no_stop * (turn.finish_reason == "length")
        if not (self.length or self.overlong_buffer):
            return cost
        tokens = torch.tensor(float(len(turn.completion_ids)))
        if self.length:
            cost += float(-self.length * tokens / self.length_limit)
        if self.overlong_buffer:
            cost += float(overlong_penalty(tokens, limit=self.length_limit, buffer=self.overlong_buffer))
        return cost


FREE = PenaltyConfig()


def with_scores(groups: Sequence[Group], score: Mapping[TurnKey, float], weight: float) -> tuple[Group, ...]:
    """Return the groups with `weight` times the score of each scored turn added to the reward of the turn.

    The function adds the score of a reward model to the reward before rewards are shared, placed and compared.
    """
    scored = []
    for g, group in enumerate(groups):
        episodes = []
        for e, episode in enumerate(group.episodes):
            turns = [
                replace(turn, reward=turn.reward + weight * score.get(TurnKey(g, e, turn.index), 0.0))
                for turn in episode.turns
            ]
            episodes.append(replace(episode, turns=tuple(turns)))
        scored.append(replace(group, episodes=tuple(episodes)))
    return tuple(scored)


def step_rewards(
    groups: Sequence[Group],
    placed: Callable[[Episode, TeamReward, PenaltyConfig], Mapping[int, float]],
    how: TeamReward,
    penalties: PenaltyConfig = FREE,
) -> dict[TurnKey, float]:
    """Return the rewards of all turns in the valid episodes of a step.

    The function `placed` places the rewards of one episode on its turns. It is `turn_rewards`, `chain_rewards` or
    `round_rewards`.
    """
    return {
        TurnKey(g, e, index): reward
        for g, e, episode in valid_episodes(groups)
        for index, reward in placed(episode, how, penalties).items()
    }


# -------- The three placements


class PlacedReward(NamedTuple):
    """A share of a reward that is placed on one turn."""

    turn: int
    """The index of the turn."""
    after: int
    """The number of turns that had ended when the environment gave the reward."""
    amount: float


def turn_rewards(episode: Episode, how: TeamReward, penalties: PenaltyConfig = FREE) -> dict[int, float]:
    """Return a mapping from the index of each turn to its reward, including sharing, placement and penalties."""
    rewards = {turn.index: penalties.of(turn) if turn.trained else 0.0 for turn in episode.turns}
    for placed in _on_own_turns(episode, how):
        rewards[placed.turn] += placed.amount
    return rewards


def chain_rewards(episode: Episode, how: TeamReward, penalties: PenaltyConfig = FREE) -> dict[int, float]:
    """Return a mapping from the index of each trained turn of the chain to its reward. The team's rewards are counted once.

    A reward at a moment is placed on the last trained turn before the moment, and the terminal reward on the last turn of the
    episode. With `individual`, the terminal reward of each agent is placed on that agent's last turn instead. A reward of an
    untrained turn moves to the previous trained turn; it is dropped if there is no such turn.
    """
    rewards = {turn.index: penalties.of(turn) for turn in episode.turns if turn.trained}
    for placed in _on_chain(episode, how):
        rewards[placed.turn] += placed.amount
    return rewards


def round_rewards(episode: Episode, how: TeamReward, penalties: PenaltyConfig = FREE) -> dict[int, float]:
    """Return a mapping from the index of each trained turn to its reward, such that sums over rounds are joint returns.

    Rounds are counted over trained turns. The team's reward at a moment is placed once, on a turn of the latest round that
    had begun by that moment. The terminal reward is placed on a turn of the last round, even if an earlier round contains the
    last turn of the episode. Rewards before the first trained turn are dropped.
    """
    rewards = {turn.index: penalties.of(turn) for turn in episode.turns if turn.trained}
    rounds = [list(movers.values()) for movers in episode.rounds(episode.agents, trained=True)]
    last_turn = [max(turn.index for turn in movers) for movers in rounds]
    first_turn = [min(turn.index for turn in movers) for movers in rounds]
    for after, amounts in moments(episode):
        begun = sum(index < after for index in first_turn)
        if begun:
            shares = _shares(amounts, how, episode, ("team",), len(episode.agents))
            rewards[last_turn[begun - 1]] += sum(shares.values())
    if episode.rewards and rounds:
        shares = _shares(episode.rewards, how, episode, ("team",), len(episode.rewards))
        rewards[last_turn[-1]] += sum(shares.values())
    return rewards


def deferred_rewards(episode: Episode, how: TeamReward, *, chain: bool = False) -> dict[int, float]:
    """Return a mapping from the index of a turn to the part of its reward that was given after the turn had ended.

    Rewards are placed as in `turn_rewards`, or as in `chain_rewards` if `chain` is true. Turns without such a part are not in
    the mapping.
    """
    ended = {turn.index: count_ended(episode, turn) for turn in episode.turns}
    later: dict[int, float] = defaultdict(float)
    for placed in _on_chain(episode, how) if chain else _on_own_turns(episode, how):
        if placed.after > ended[placed.turn]:
            later[placed.turn] += placed.amount
    return later


def _on_own_turns(episode: Episode, how: TeamReward) -> list[PlacedReward]:
    own = _own_turns(episode)
    found = []
    for after, amounts in moments(episode):
        for agent, amount in _shares(amounts, how, episode, own, len(episode.agents)).items():
            found.append(PlacedReward(_last_before(own[agent], after), after, amount))
    if episode.rewards and own:
        shares = _shares(episode.rewards, how, episode, own, len(episode.rewards))
        end = len(episode.turns)
        found += [PlacedReward(turns[-1], end, shares.get(agent, 0.0)) for agent, turns in own.items()]
    return found


def _on_chain(episode: Episode, how: TeamReward) -> list[PlacedReward]:
    trained = [turn.index for turn in episode.turns if turn.trained]
    found = []
    for after, amounts in moments(episode):
        before = bisect_left(trained, after)
        if before:
            shares = _shares(amounts, how, episode, ("team",), len(episode.agents))
            found.append(PlacedReward(trained[before - 1], after, sum(shares.values())))
    if episode.rewards and episode.turns:
        last = {turn.agent: turn.index for turn in episode.turns}
        closing = (episode.turns[-1].agent,)
        shares = _shares(episode.rewards, how, episode, closing, len(episode.rewards))
        for agent in episode.agents:
            before = bisect_left(trained, last.get(agent, -1) + 1)
            if before:
                amount = shares.get(agent, 0.0)
                found.append(PlacedReward(trained[before - 1], len(episode.turns), amount))
    return found


def agent_returns(episode: Episode, how: TeamReward, penalties: PenaltyConfig = FREE) -> dict[str, float]:
    """Return the undiscounted return of each agent that has turns, including reward sharing and penalties."""
    rewards = turn_rewards(episode, how, penalties)
    totals: dict[str, float] = {}
    for turn in episode.turns:
        totals[turn.agent] = totals.get(turn.agent, 0.0) + rewards[turn.index]
    return totals


# -------- When agents were rewarded, and how the team shares it


def moments(episode: Episode) -> list[tuple[int, dict[str, float]]]:
    """Return the moments before the end at which agents with turns were rewarded, as pairs (number of ended turns, rewards by agent).

    The list is in time order, and its sums are equal to the sums of `Turn.reward`. If `Episode.reward_events` does not record
    a part of `Turn.reward` (in older episodes, or for an added reward term), this part is dated to the end of the turn and of
    its simultaneous turns.
    """
    amounts: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    unrecorded = {turn.index: turn.reward for turn in episode.turns}
    own = _own_turns(episode) if episode.reward_events else {}
    for payment in episode.reward_events:
        if payment.agent in own:
            amounts[payment.after][payment.agent] += payment.reward
            unrecorded[_last_before(own[payment.agent], payment.after)] -= payment.reward
    for turn in episode.turns:
        earned = unrecorded[turn.index]
        if earned and abs(earned) > 1e-9 * max(1.0, abs(turn.reward)):
            amounts[count_ended(episode, turn)][turn.agent] += earned
    return sorted(amounts.items())


def count_ended(episode: Episode, turn: Turn) -> int:
    """Return the number of turns that have ended once the given turn and all simultaneous turns have ended.

    A later turn is simultaneous if its prompt was fixed before the given turn ended.
    """
    after = turn.index + 1
    while after < len(episode.turns) and episode.turns[after].completed_before <= turn.index:
        after += 1
    return after


def _own_turns(episode: Episode) -> dict[str, list[int]]:
    """Return a mapping from each agent with turns to the indices of its turns."""
    own: dict[str, list[int]] = {}
    for turn in episode.turns:
        own.setdefault(turn.agent, []).append(turn.index)
    return own


def _last_before(turns: Sequence[int], after: int) -> int:
    """Return the index of an agent's last turn before a moment, or of its first turn if there is no turn before the moment."""
    return turns[max(0, bisect_left(turns, after) - 1)]


def _shares(
    amounts: Mapping[str, float],
    how: TeamReward,
    episode: Episode,
    receivers: Collection[str],
    team_size: int,
) -> dict[str, float]:
    """Return the share of each agent in the rewards given at one time. Each of the `receivers` gets the team's number.

    With `mean`, the sum of the rewards is divided by `team_size`. With `individual`, all rewarded agents keep their own
    rewards; with `last`, only the agent with the last turn does. With `win`, the agent with the unique largest reward gets 1.
    """
    if how == "individual":
        return dict(amounts)
    if how == "win":
        best = sorted(amounts.values())[-2:]
        return {
            agent: float(len(best) == 2 and best[0] < amount == best[1]) for agent, amount in amounts.items()
        }
    if how == "last":
        closing = episode.turns[-1].agent
        return {agent: amount if agent == closing else 0.0 for agent, amount in amounts.items()}
    if how in ("max", "min"):
        return dict.fromkeys(receivers, (max if how == "max" else min)(amounts.values()))
    total = sum(amounts.values())
    return dict.fromkeys(receivers, total if how == "sum" else total / team_size)
