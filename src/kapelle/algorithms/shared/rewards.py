"""Rewards of turns: what the team earned, placed on the turns that each agent is trained on.

The environment pays agents at moments between turns (`Episode.payments`) and at the end (`Episode.rewards`). A move can pay
agents that did not make it: in a cooperative game every player earns what one of them causes. Such a payment is part of the
`reward` of the player's own last turn, which came before the move that earned it. A return-to-go that is shared, or that
runs through several agents, must count it from the move on, so credit reads moments instead of `Turn.reward`.

`team_reward` turns what several agents were paid at once into one number for the team, the same for every agent that has
turns, however many:

- at a moment: `sum` adds what all agents were paid; `mean` is that sum over the number of agents in the team; `max` and
  `min` are over the agents that were paid. It is placed on an agent's last turn before the moment, or on its first one if
  it had none yet.
- at the end: over the agents that the environment scored, on each agent's own last turn.

`individual` and `last` share nothing. There are three placements: `turn_rewards` (one trajectory per agent),
`chain_rewards` (one chain in time through all agents) and `round_rewards` (joint returns by round, the k-th turn of every
agent that has one). The last two count the team's reward once. `paid_later` is the part of a placement that was paid after
the turn was over: for what others did then, and at the end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from kapelle.functional.shaping import overlong_penalty
from kapelle.rows import TurnKey
from kapelle.runtime.on_demand import torch
from kapelle.settings.base import Settings
from kapelle.types import Episode, Group, Turn

TeamReward = Literal["mean", "sum", "max", "min", "last", "individual"]
"""How the rewards of the scored agents are shared by all: `last` pays only the agent that closed the
episode (MARFT, 2504.16129), `individual` leaves each agent its own."""

Truncated = Literal["keep", "mask", "penalise"]
"""What Monte Carlo estimators do with a turn that ran into its token limit: train on it as it is, leave it
out of the loss, or subtract a penalty from its reward."""


def need_team_return(shared: TeamReward) -> None:
    """Raise ValueError when each agent keeps its own reward; for validators of settings that decompose a team's return."""
    if shared == "individual":
        raise ValueError(
            "`team_reward: individual` leaves no team's return to decompose; set `mean`, `sum`, `max`, `min` or "
            "`last`, or `algorithm.name: ippo`"
        )


class PenaltyConfig(Settings):
    """Penalties for the form of a completion, whatever its content; subtracted from its turn's reward."""

    length: float = Field(default=0.0, ge=0.0)
    """Cost of a completion of `length_limit` tokens, in proportion for shorter ones."""
    length_limit: int = Field(default=64, ge=1)
    """Tokens of a turn that cost nothing."""
    overlong_buffer: int = Field(default=0, ge=0)
    """DAPO's soft punishment (2503.14476 eq. 13): over this many tokens before `length_limit` it grows
    from 0 to 1; 0 turns it off."""
    no_stop: float = Field(default=0.0, ge=0.0)
    """Cost of a completion that was cut at its limit of tokens."""

    def of(self, turn: Turn) -> float:
        """Return the penalty of a turn, at most 0."""
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

FROM_THE_START: Mapping[int, int] = {}


def with_scores(groups: Sequence[Group], score: Mapping[TurnKey, float], weight: float) -> tuple[Group, ...]:
    """Return the groups with `weight` times its score added to the reward of every scored turn.

    This is a reward model as a term of the reward: sharing, placing and comparing of rewards come after it.
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


def step_rewards(
    groups: Sequence[Group],
    placed: Callable[[Episode, TeamReward, PenaltyConfig], Mapping[int, float]],
    how: TeamReward,
    penalties: PenaltyConfig = FREE,
) -> dict[TurnKey, float]:
    """Return the rewards of a step's valid episodes, by turn.

    `placed` puts those of one episode on its turns: `turn_rewards`, `chain_rewards` or `round_rewards`.
    """
    return {
        TurnKey(g, e, index): reward
        for g, group in enumerate(groups)
        for e, episode in enumerate(group.episodes)
        if episode.error is None
        for index, reward in placed(episode, how, penalties).items()
    }


# -------- The three placements


def turn_rewards(
    episode: Episode,
    how: TeamReward,
    penalties: PenaltyConfig = FREE,
    since: Mapping[int, int] = FROM_THE_START,
) -> dict[int, float]:
    """Return the reward of every turn by its index, after sharing, placement and penalties.

    With `since` (turn → how many turns were over) only what a turn was paid later than that counts.
    """
    rewards = {turn.index: penalties.of(turn) if turn.trained else 0.0 for turn in episode.turns}
    own = _own_turns(episode)
    for after, paid in moments(episode):
        for agent, amount in _shares(paid, how, episode, own, len(episode.agents)).items():
            place = _standing(own[agent], after)
            if after > since.get(place, -1):
                rewards[place] += amount
    if episode.rewards and own:
        shares = _shares(episode.rewards, how, episode, own, len(episode.rewards))
        for agent, turns in own.items():
            if not since or len(episode.turns) > since.get(turns[-1], -1):
                rewards[turns[-1]] += shares.get(agent, 0.0)
    return rewards


def chain_rewards(
    episode: Episode,
    how: TeamReward,
    penalties: PenaltyConfig = FREE,
    since: Mapping[int, int] = FROM_THE_START,
) -> dict[int, float]:
    """Return the reward of every trained turn of the chain by its index: the team's rewards count once.

    A payment at a moment is placed on the last trained turn before it, and the terminal reward on the episode's last
    turn; with `individual` and `last` each agent's own terminal reward is placed on its own last turn. A reward on an
    untrained turn moves to the trained turn before it, and is left out if there is none. `since` as in `turn_rewards`.
    """
    rewards = {turn.index: penalties.of(turn) for turn in episode.turns if turn.trained}
    trained = list(rewards)
    for after, paid in moments(episode):
        before = bisect_left(trained, after)
        if before and after > since.get(trained[before - 1], -1):
            shares = _shares(paid, how, episode, ("team",), len(episode.agents))
            rewards[trained[before - 1]] += sum(shares.values())
    if episode.rewards and episode.turns:
        last = {turn.agent: turn.index for turn in episode.turns}
        closing = (episode.turns[-1].agent,)
        shares = _shares(episode.rewards, how, episode, closing, len(episode.rewards))
        for agent in episode.agents:
            before = bisect_left(trained, last.get(agent, -1) + 1)
            if before and len(episode.turns) > since.get(trained[before - 1], -1):
                rewards[trained[before - 1]] += shares.get(agent, 0.0)
    return rewards


def round_rewards(episode: Episode, how: TeamReward, penalties: PenaltyConfig = FREE) -> dict[int, float]:
    """Return the reward of every trained turn by its index, so that sums over rounds are joint returns.

    Rounds are those of trained turns. A team payment counts once, on a turn of the latest round that had begun
    when it was paid, and the terminal reward on a turn of the last round, whichever turn is last in time: an agent with
    a single turn, at the end, has it in round 0. Payments before the first trained turn are left out.
    """
    rewards = {turn.index: penalties.of(turn) for turn in episode.turns if turn.trained}
    rounds = [list(movers.values()) for movers in episode.rounds(episode.agents, trained=True)]
    place = [max(turn.index for turn in movers) for movers in rounds]
    begun = [min(turn.index for turn in movers) for movers in rounds]
    for after, paid in moments(episode):
        so_far = sum(index < after for index in begun)
        if so_far:
            shares = _shares(paid, how, episode, ("team",), len(episode.agents))
            rewards[place[so_far - 1]] += sum(shares.values())
    if episode.rewards and rounds:
        shares = _shares(episode.rewards, how, episode, ("team",), len(episode.rewards))
        rewards[place[-1]] += sum(shares.values())
    return rewards


def paid_later(
    episode: Episode, how: TeamReward, placed: Callable[..., dict[int, float]]
) -> dict[int, float]:
    """Return the part of its reward that each turn was paid after it was over, by its index.

    `placed` is `turn_rewards` or `chain_rewards`.
    """
    return placed(episode, how, since={turn.index: over(episode, turn) for turn in episode.turns})


def agent_returns(episode: Episode, how: TeamReward, penalties: PenaltyConfig = FREE) -> dict[str, float]:
    """Return the undiscounted return of each agent that has turns, after sharing and penalties."""
    rewards = turn_rewards(episode, how, penalties)
    totals: dict[str, float] = {}
    for turn in episode.turns:
        totals[turn.agent] = totals.get(turn.agent, 0.0) + rewards[turn.index]
    return totals


# -------- When agents were paid, and what the team makes of it


def moments(episode: Episode) -> list[tuple[int, dict[str, float]]]:
    """Return when agents that have turns were paid before the end: how many turns were over, and agent → reward.

    In time order; their sums are those of `Turn.reward`. What a turn earned beyond what is recorded in `Episode.payments`
    (in older episodes, or by a term that was added) was paid when the turn, and those that were taken at the same moment,
    were over.
    """
    paid: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    unrecorded = {turn.index: turn.reward for turn in episode.turns}
    own = _own_turns(episode) if episode.payments else {}
    for payment in episode.payments:
        if payment.agent in own:
            paid[payment.after][payment.agent] += payment.reward
            unrecorded[_standing(own[payment.agent], payment.after)] -= payment.reward
    for turn in episode.turns:
        earned = unrecorded[turn.index]
        if earned and abs(earned) > 1e-9 * max(1.0, abs(turn.reward)):
            paid[over(episode, turn)][turn.agent] += earned
    return sorted(paid.items())


def over(episode: Episode, turn: Turn) -> int:
    """Return how many turns are over when a turn and those whose prompt was fixed before its end are."""
    after = turn.index + 1
    while after < len(episode.turns) and episode.turns[after].seen <= turn.index:
        after += 1
    return after


def _own_turns(episode: Episode) -> dict[str, list[int]]:
    """Return the indices of each agent's turns; an agent without turns is absent."""
    own: dict[str, list[int]] = {}
    for turn in episode.turns:
        if turn.agent in own:
            own[turn.agent].append(turn.index)
        else:
            own[turn.agent] = [turn.index]
    return own


def _standing(turns: Sequence[int], after: int) -> int:
    """Return an agent's last turn before a moment; its first one if it had no turn yet."""
    return turns[max(0, bisect_left(turns, after) - 1)]


def _shares(
    paid: Mapping[str, float], how: TeamReward, episode: Episode, payees: Collection[str], among: int
) -> dict[str, float]:
    """Return who gets how much of what agents were paid at once: the team's one number for each of `payees`.

    `mean` divides by `among`. With `individual` and `last` each paid agent has its own, whoever the payees are.
    """
    if how == "individual":
        return dict(paid)
    if how == "last":
        closing = episode.turns[-1].agent
        return {agent: amount if agent == closing else 0.0 for agent, amount in paid.items()}
    if how in ("max", "min"):
        return dict.fromkeys(payees, (max if how == "max" else min)(paid.values()))
    total = sum(paid.values())
    return dict.fromkeys(payees, total if how == "sum" else total / among)
