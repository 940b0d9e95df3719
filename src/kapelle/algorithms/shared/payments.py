"""When the environment paid which agents: the moments between turns at which an episode's turn rewards fell.

A move can pay agents that did not make it: in a cooperative game every player earns what one of them causes. The
payment is part of their own last turn's `reward`, and that turn came before the move that earned it. Return-to-go that is
shared, or runs through several agents, must count it from the move on, so credit reads moments, not turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kapelle.types import Episode, Turn


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
