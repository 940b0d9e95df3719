"""Settings and functions of algorithms with interventions, which continue an episode from one of its moments with a change.

Each of these algorithms compares an agent's return R(τ) with a baseline b that is independent of the evaluated action: A = R
− b. For any such baseline b, the expected update is ∇J. A turn without continuations (because the budget was used up or all
continuations failed) is compared with the mean of the other episodes of the group, as in RLOO.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from pydantic import Field, model_validator

from kapelle.algorithm import Algorithm, Change, Credit, Interventions, Slot
from kapelle.algorithms.shared.groups import Earlier, Member, against_earlier, place_of, valid_episodes
from kapelle.algorithms.shared.monte_carlo import Judge, MonteCarlo, spread
from kapelle.algorithms.shared.rewards import PenaltyConfig, TeamReward
from kapelle.rows import TurnKey
from kapelle.team import Team
from kapelle.types import Episode, Group


class Replays(MonteCarlo):
    """Settings of an algorithm that continues episodes with changes (interventions)."""

    continuations: int = Field(default=1, ge=1)
    """The number of continuations that are sampled per change."""
    budget: float | None = Field(default=None, gt=0.0)
    """The maximum expected number of tokens in the continuations of a group, as a share of the tokens in the group's
    episodes. With null, there is no limit."""
    budget_tokens: int | None = Field(default=None, ge=1)
    """The maximum expected number of tokens in all continuations of a step. With null, there is no limit."""

    @model_validator(mode="after")
    def _fits_continuations(self) -> Replays:
        if self.order.build().sequential:
            raise ValueError(
                "`order: sequential` multiplies ratios over rounds, but a continuation changes one turn only; set `order: joint`"
            )
        if self.umad.active:
            raise ValueError(
                "`umad` would change advantages that continuations measure; remove `umad`, or use another algorithm"
            )
        return self

    def earned(self, episode: Episode) -> Mapping[str, float]:
        """Return the team's return for each agent. The value is the same for all agents."""
        return dict.fromkeys(episode.agents, team_return(episode, self.team_reward, self.forms))

    def replaying(
        self,
        name: str,
        judge: Judge,
        change: Callable[[Group, int, Team], Sequence[Change]],
        returns: Callable[[Episode], Mapping[str, float]] | None = None,
        says: Callable[[Group], Callable[[Slot], float]] | None = None,
    ) -> Algorithm:
        """Return the algorithm with interventions.

        The function `returns` computes each agent's return of an episode; the default is the return used in training.
        """
        row = self.row(name, judge=judge)
        returns = returns or row.returns
        assert returns is not None, "Monte Carlo algorithms share the team's reward"
        interventions = Interventions(
            change, self.continuations, returns, self.budget, self.budget_tokens, says
        )
        return replace(row, data=replace(row.data, interventions=interventions))


def team_return(episode: Episode, how: TeamReward, penalties: PenaltyConfig) -> float:
    """Return the team's return of an episode, over all agents, including frozen agents and agents without a turn.

    The team's return is the sum, mean, maximum or minimum of the agents' returns, minus the penalties of trained turns.
    """
    returns = [episode.total(agent) for agent in episode.agents]
    shared = {"mean": fmean(returns), "max": max(returns), "min": min(returns)}.get(how, sum(returns))
    return shared + sum(penalties.of(turn) for turn in episode.turns if turn.trained)


def against_others(members: Sequence[Member], earlier: Earlier | None) -> list[float]:
    """Return the value of each member minus the mean of the other members of its set. A lone member is compared with earlier values."""
    sets: dict[tuple[int | str, ...], list[float]] = {}
    for member in members:
        sets.setdefault(member.place, []).append(member.value)
    known = earlier or Earlier()
    alone = [member for member in members if len(sets[member.place]) == 1]
    found = iter(against_earlier(alone, members, known))
    advantages = []
    for member in members:
        own = sets[member.place]
        count = len(own)
        advantages.append(next(found) if count == 1 else (count * member.value - sum(own)) / (count - 1))
    known.take_in(members)
    return advantages


def disagreement(others: Group, returns: Callable[[Episode], Mapping[str, float]]) -> Callable[[Slot], float]:
    """Return a function from a slot (the k-th turn of an agent) to the variance of the agent's returns among episodes with equal prompts.

    Episodes with the same prompt in that turn form a set, and the variances of the sets are pooled. If all prompts differ,
    the result is the variance over all episodes.
    """
    agent_returns = [returns(episode) for episode in others.valid]

    def of(slot: Slot) -> float:
        (agent,), number = slot.agents, slot.number or 0
        sets: dict[tuple[int, ...], list[float]] = {}
        for episode, own in zip(others.valid, agent_returns, strict=True):
            turns = episode.by(agent)
            if number < len(turns) and agent in own:
                sets.setdefault(turns[number].prompt_ids, []).append(own[agent])
        several = [each for each in sets.values() if len(each) > 1]
        pooled = several or [[value for each in sets.values() for value in each]]
        values = [value - fmean(each) for each in pooled for value in each]
        return fmean(value * value for value in values) if values else 0.0

    return of


def entropy(others: Group) -> Callable[[Slot], float]:
    """Return a function from a slot (the k-th turn of an agent) to the entropy of the agent's policy there, in nats per token.

    The estimate is the mean over episodes of the turn's mean −log-prob per token, from the log-probs with which the tokens were
    sampled. It is unbiased for turns of a given length. Episodes without tokens in this turn are excluded.
    """

    def of(slot: Slot) -> float:
        (agent,), number = slot.agents, slot.number or 0
        turns = [turn for episode in others.valid for turn in episode.by(agent)[number : number + 1]]
        found = [-fmean(turn.logprobs) for turn in turns if turn.logprobs]
        return fmean(found) if found else 0.0

    return of


def by_agent_of(
    groups: Sequence[Group], value: Callable[[Episode, str], tuple[float, str] | None]
) -> list[tuple[Episode, Member]]:
    """Return one member per valid episode and agent that is trained in the episode. Agents without a value are excluded.

    The function `value` returns the value of an episode for an agent, and the kind of the value. Values of different kinds
    are not compared.
    """
    members = []
    for g, e, episode in valid_episodes(groups):
        for agent in dict.fromkeys(turn.agent for turn in episode.turns if turn.trained):
            found = value(episode, agent)
            if found is None:
                continue
            amount, kind = found
            own = [turn for turn in episode.by(agent) if turn.trained]
            keys = tuple(TurnKey(g, e, turn.index) for turn in own)
            tokens = sum(len(turn.completion_ids) for turn in own)
            like = (*place_of(episode, agent), kind)
            members.append((episode, Member((g, agent, kind), amount, tokens, keys, like)))
    return members


def spread_members(
    settings: MonteCarlo,
    groups: Sequence[Group],
    members: Sequence[Member],
    earlier: Earlier | None,
) -> Mapping[TurnKey, Credit]:
    """Return credit in which the advantage of a member's turns is its value minus the mean of the other members of the set."""
    advantage: dict[TurnKey, float] = {}
    for member, difference in zip(members, against_others(members, earlier), strict=True):
        advantage |= dict.fromkeys(member.keys, difference)
    return spread(settings, groups, advantage)
