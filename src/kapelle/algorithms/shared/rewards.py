"""Rewards of turns: what the team earned, placed on the turns that each agent is trained on.

A team's reward is one number for every moment at which an agent was paid (`payments.py`) and one for the end, the same
for every agent that has turns, however many:

- of a moment: `sum` adds what all agents were paid at it; `mean` is that sum over the number of agents in the team;
  `max` and `min` are over the agents that were paid. It is placed on an agent's last turn before the moment, or on its
  first one if it had none yet.
- of the end: over the agents that the environment scored, on each agent's own last turn.

`individual` and `last` share nothing. There are three placements: `turn_rewards` (one trajectory per
agent), `chain_rewards` (one chain in time through all agents) and `round_rewards` (joint returns by round, the k-th turn of
every agent that has one). The last two count the team's reward once. `later_on_turns` and `later_in_chain` are the parts
of the first two that were paid when the turn was over already: for what others did after it, and at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from pydantic import Field

from kapelle.functional.returns import team_individual, team_last, team_max, team_mean, team_min, team_sum
from kapelle.functional.shaping import length_penalty, overlong_penalty
from kapelle.rows import TurnKey
from kapelle.runtime.on_demand import torch
from kapelle.settings.base import Settings
from kapelle.types import Episode, Group, Turn

# -------- When the environment paid which agents: the moments between turns at which an episode's turn rewards fell
#
# A move can pay agents that did not make it: in a cooperative game every player earns what one of them causes. The
# payment is part of their own last turn's `reward`, and that turn came before the move that earned it. Return-to-go that is
# shared, or runs through several agents, must count it from the move on, so credit reads moments, not turns.


@dataclass(frozen=True, slots=True)
class Moment:
    """What agents were paid between two turns."""

    after: int
    """How many turns of the episode were over."""
    paid: dict[str, float]
    """Agent → reward; an agent that was not paid is absent."""


def moments(episode: Episode) -> list[Moment]:
    """Return the moments at which agents that had turns were paid during the episode, in time order.

    Their sums are those of `Turn.reward`. What a turn earned beyond what is recorded in `Episode.payments` (in
    episodes recorded before that, or by a term that was added) was paid when the turn, and those that were taken at
    the same moment, were over.
    """
    paid: dict[int, dict[str, float]] = {}
    left = {turn.index: turn.reward for turn in episode.turns}
    own = {agent: episode.by(agent) for agent in episode.agents}
    for payment in episode.payments:
        if own.get(payment.agent):
            _add(paid, payment.after, payment.agent, payment.reward)
            left[standing(own[payment.agent], payment.after).index] -= payment.reward
    for turn in episode.turns:
        if abs(left[turn.index]) > 1e-9 * max(1.0, abs(turn.reward)):
            _add(paid, over(episode, turn), turn.agent, left[turn.index])
    return [Moment(after, paid[after]) for after in sorted(paid)]


def standing(turns: Sequence[Turn], after: int) -> Turn:
    """Return an agent's last turn before a moment; its first one if it had no turn yet."""
    return next((turn for turn in reversed(turns) if turn.index < after), turns[0])


def _add(paid: dict[int, dict[str, float]], after: int, agent: str, reward: float) -> None:
    at = paid.setdefault(after, {})
    at[agent] = at.get(agent, 0.0) + reward


def over(episode: Episode, turn: Turn) -> int:
    """Return how many turns are over when a turn and those whose prompt was fixed before its end are."""
    after = turn.index + 1
    while after < len(episode.turns) and episode.turns[after].seen <= turn.index:
        after += 1
    return after


TeamReward = Literal["mean", "sum", "max", "min", "last", "individual"]
"""How the rewards of the scored agents are shared by all: `last` pays only the agent that closed the
episode, `individual` leaves each agent its own."""

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


def turn_rewards(episode: Episode, how: TeamReward, penalties: PenaltyConfig = FREE) -> dict[int, float]:
    """Return the reward of every turn by its index, after sharing, placement and penalties."""
    rewards = _penalties(episode, penalties)
    for pay in _on_turns(episode, how):
        rewards[pay.turn] += pay.amount
    return rewards


def chain_rewards(episode: Episode, how: TeamReward, penalties: PenaltyConfig = FREE) -> dict[int, float]:
    """Return the reward of every trained turn of the chain by its index: the team's rewards count once.

    A payment at a moment is placed on the last trained turn before it, and the terminal reward on the episode's last
    turn; with `individual` and `last` each agent's own terminal reward is placed on its own last turn. A reward on an
    untrained turn moves to the trained turn before it.
    """
    costs = _penalties(episode, penalties)
    rewards = {turn.index: costs[turn.index] for turn in episode.turns if turn.trained}
    for pay in _in_chain(episode, how):
        rewards[pay.turn] += pay.amount
    return rewards


def round_rewards(episode: Episode, how: TeamReward, penalties: PenaltyConfig = FREE) -> dict[int, float]:
    """Return the reward of every trained turn by its index, so that sums over rounds are joint returns.

    Rounds are those of trained turns. A team payment counts once, on a turn of the latest round that had begun
    when it was paid, and the terminal reward on a turn of the last round, whichever turn is last in time: an agent with
    a single turn, at the end, has it in round 0. Payments before the first trained turn are left out.
    """
    rounds = [list(movers.values()) for movers in episode.rounds(episode.agents, trained=True)]
    rewards = {
        index: cost for index, cost in _penalties(episode, penalties).items() if episode.turns[index].trained
    }
    place = [max(turn.index for turn in movers) for movers in rounds]
    begun = [min(turn.index for turn in movers) for movers in rounds]
    for moment in moments(episode):
        so_far = sum(index < moment.after for index in begun)
        if so_far:
            rewards[place[so_far - 1]] += _once(moment, how, episode)
    if episode.rewards and rounds:
        shared = _share(episode.rewards, how, episode)
        rewards[place[-1]] += sum(shared.values()) if how in _UNSHARED else next(iter(shared.values()))
    return rewards


def later_on_turns(episode: Episode, how: TeamReward) -> dict[int, float]:
    """Return the part of `turn_rewards` that each turn was paid after it was over, by its index; absent where nothing was."""
    return _later(episode, _on_turns(episode, how))


def later_in_chain(episode: Episode, how: TeamReward) -> dict[int, float]:
    """Return the part of `chain_rewards` that each turn was paid after it was over, by its index; absent where nothing was."""
    return _later(episode, _in_chain(episode, how))


class _Pay(NamedTuple):
    """An amount, the index of the turn that it is placed on, and how many turns were over when it was paid."""

    turn: int
    amount: float
    after: int


def _on_turns(episode: Episode, how: TeamReward) -> Iterator[_Pay]:
    """Yield what agents are paid, shared, on the turns of a trajectory for each."""
    own = _own_turns(episode)
    for moment in moments(episode):
        if how in _UNSHARED:
            shared = _share(moment.paid, how, episode)
            paid = {agent: shared[agent] for agent in moment.paid}
        else:
            paid = dict.fromkeys(own, _once(moment, how, episode))
        for agent, amount in paid.items():
            yield _Pay(standing(own[agent], moment.after).index, amount, moment.after)
    if episode.rewards:
        shared = _share(episode.rewards, how, episode)
        alone = 0.0 if how in _UNSHARED else next(iter(shared.values()))
        for agent, turns in own.items():
            yield _Pay(turns[-1].index, shared.get(agent, alone), len(episode.turns))


def _in_chain(episode: Episode, how: TeamReward) -> Iterator[_Pay]:
    """Yield what the team is paid, once, on the trained turns of a chain; what was paid before there is one is left out."""
    own = _own_turns(episode)
    for moment in moments(episode):
        turn = _trained_before(episode, moment.after)
        if turn is not None:
            yield _Pay(turn, _once(moment, how, episode), moment.after)
    if episode.rewards and own:
        shared = _share(episode.rewards, how, episode)
        last = {agent: turns[-1].index for agent, turns in own.items()}
        paid = [(last[agent], shared.get(agent, 0.0)) for agent in own]
        if how not in _UNSHARED:
            paid = [(max(last.values()), next(iter(shared.values())))]
        for place, amount in paid:
            turn = _trained_before(episode, place + 1)
            if turn is not None:
                yield _Pay(turn, amount, len(episode.turns))


def _trained_before(episode: Episode, after: int) -> int | None:
    return max((turn.index for turn in episode.turns if turn.trained and turn.index < after), default=None)


def _later(episode: Episode, pays: Iterable[_Pay]) -> dict[int, float]:
    ended = {turn.index: over(episode, turn) for turn in episode.turns}
    later: dict[int, float] = {}
    for pay in pays:
        if pay.after > ended[pay.turn]:
            later[pay.turn] = later.get(pay.turn, 0.0) + pay.amount
    return later


def _own_turns(episode: Episode) -> dict[str, tuple[Turn, ...]]:
    """Return the turns of each agent that has any, in seat order."""
    turns = {agent: episode.by(agent) for agent in episode.agents}
    return {agent: own for agent, own in turns.items() if own}


def _penalties(episode: Episode, penalties: PenaltyConfig) -> dict[int, float]:
    return {turn.index: penalties.of(turn) if turn.trained else 0.0 for turn in episode.turns}


def _once(moment: Moment, how: TeamReward, episode: Episode) -> float:
    """Return the team's payment of a moment, counted once."""
    if how in _UNSHARED:
        shared = _share(moment.paid, how, episode)
        return sum(shared[agent] for agent in moment.paid)
    if how == "mean":
        return sum(moment.paid.values()) / len(episode.agents)
    return next(iter(_SHARED[how](moment.paid).values()))


def agent_returns(episode: Episode, how: TeamReward, penalties: PenaltyConfig = FREE) -> dict[str, float]:
    """Return the undiscounted return of each agent that has turns, after sharing and penalties."""
    rewards = turn_rewards(episode, how, penalties)
    totals: dict[str, float] = {}
    for turn in episode.turns:
        totals[turn.agent] = totals.get(turn.agent, 0.0) + rewards[turn.index]
    return totals


def _share(paid: Mapping[str, float], how: TeamReward, episode: Episode) -> Mapping[str, float]:
    if how == "last":
        closing = episode.turns[-1].agent if episode.turns else next(iter(paid))
        return team_last({closing: 0.0, **paid}, closing)
    return _SHARED[how](paid)
