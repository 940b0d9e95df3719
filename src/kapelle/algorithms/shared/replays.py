"""What algorithms that play episodes on with something changed share: settings, and the value of what was changed.

Every such algorithm compares an agent's return R(τ) with a baseline b that does not depend on the action that it judges:
A = R − b, whose expected update is ∇J for any such b. What was not played on (the budget was used up, or every continuation failed)
is compared with the mean of the group's other attempts, as RLOO does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from pydantic import Field, model_validator

from kapelle.algorithm import Algorithm, Change, Interventions, Slot
from kapelle.algorithms.shared.groups import Earlier, Member, against_earlier, place_of
from kapelle.algorithms.shared.monte_carlo import Judge, MonteCarlo
from kapelle.algorithms.shared.rewards import PenaltyConfig, TeamReward
from kapelle.rows import TurnKey
from kapelle.team import Team
from kapelle.types import Episode, Group


class Replays(MonteCarlo):
    """Settings of an algorithm that plays every episode on with something changed."""

    continuations: int = Field(default=1, ge=1)
    """Of each change."""
    budget: float | None = Field(default=None, gt=0.0)
    """Most tokens of all continuations that are expected, as a share of those of the group's episodes; null for no bound."""
    budget_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of all continuations of a step that are expected; null for no bound."""

    @model_validator(mode="after")
    def _one_by_one(self) -> Replays:
        if self.order.build().sequential:
            raise ValueError(
                "`order: sequential` multiplies ratios round by round, and a continuation judges one change; set `order: joint`"
            )
        if self.umad.confidence or self.umad.relative or self.umad.influence:
            raise ValueError(
                "`umad` changes advantages that a continuation has measured; remove it, or set another algorithm"
            )
        return self

    def replaying(
        self,
        name: str,
        judge: Judge,
        change: Callable[[Group, int, Team], Sequence[Change]],
        returns: Callable[[Episode], Mapping[str, float]] | None = None,
        says: Callable[[Group], Callable[[Slot], float]] | None = None,
    ) -> Algorithm:
        """Return the row; `returns` say what an episode is worth to each agent, else what each is trained on."""
        row = self.row(name, judge=judge)
        paid = returns or row.returns
        assert paid is not None, "Monte Carlo algorithms share the team's reward"
        asked = Interventions(change, self.continuations, paid, self.budget, self.budget_tokens, says)
        return replace(row, data=replace(row.data, interventions=asked))


def team_return(episode: Episode, how: TeamReward, penalties: PenaltyConfig) -> float:
    """Return what an episode is worth to the team, whoever of it is trained or has said anything.

    The sum of what all agents were paid, or their mean, greatest or least, less the penalties of trained turns.
    """
    paid = [episode.total(agent) for agent in episode.agents]
    shared = {"mean": fmean(paid), "max": max(paid), "min": min(paid)}.get(how, sum(paid))
    return shared + sum(penalties.of(turn) for turn in episode.turns if turn.trained)


def against_others(members: Sequence[Member], earlier: Earlier | None) -> list[float]:
    """Return each member's value less the mean of the others of its set; one that is alone is compared with earlier values."""
    sets: dict[tuple[int | str, ...], list[float]] = {}
    for member in members:
        sets.setdefault(member.place, []).append(member.value)
    known = earlier or Earlier()
    lonely = [member for member in members if len(sets[member.place]) == 1]
    found = iter(against_earlier(lonely, members, known))
    advantages = []
    for member in members:
        own = sets[member.place]
        count = len(own)
        advantages.append(next(found) if count == 1 else (count * member.value - sum(own)) / (count - 1))
    known.take_in(members)
    return advantages


def disagreement(others: Group, returns: Callable[[Episode], Mapping[str, float]]) -> Callable[[Slot], float]:
    """Return how far the returns of episodes differ after one prompt, for an agent's turn of a number.

    Of episodes that read the same prompt there, the pooled variance of the agent's returns; where no two did, the variance of all.
    """
    paid = [returns(one) for one in others.valid]

    def of(slot: Slot) -> float:
        (agent,), place = slot.agents, slot.number or 0
        sets: dict[tuple[int, ...], list[float]] = {}
        for one, own in zip(others.valid, paid, strict=True):
            turns = one.by(agent)
            if place < len(turns) and agent in own:
                sets.setdefault(turns[place].prompt_ids, []).append(own[agent])
        several = [each for each in sets.values() if len(each) > 1]
        pooled = several or [[value for each in sets.values() for value in each]]
        values = [value - fmean(each) for each in pooled for value in each]
        return fmean(value * value for value in values) if values else 0.0

    return of


def by_agent_of(
    groups: Sequence[Group], value: Callable[[Episode, str], tuple[float, str] | None]
) -> list[tuple[Episode, Member]]:
    """Return every valid episode's members, one for each agent that is trained in it; agents without a value are left out.

    `value` says what an episode is worth to an agent, and of which kind that is: kinds are not compared with one another.
    """
    members = []
    for g, group in enumerate(groups):
        for e, episode in enumerate(group.episodes):
            if episode.error is not None:
                continue
            for agent in dict.fromkeys(turn.agent for turn in episode.turns if turn.trained):
                known = value(episode, agent)
                if known is None:
                    continue
                worth, kind = known
                own = [turn for turn in episode.by(agent) if turn.trained]
                keys = tuple(TurnKey(g, e, turn.index) for turn in own)
                tokens = sum(len(turn.completion_ids) for turn in own)
                like = (*place_of(episode, agent), kind)
                members.append((episode, Member((g, agent, kind), worth, tokens, keys, like)))
    return members
