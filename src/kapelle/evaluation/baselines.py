"""What the same number of tokens achieves without a team: one agent alone, and a majority vote of its answers.

A team that beats one agent may only have used more tokens. So each agent gets the team's mean number of tokens per
problem: once as the limit of a single answer, and once for several answers at temperature 1 that fit into it
together, of which the most frequent counts (self-consistency, 2203.11171).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kapelle.environment import Answerable, asks_questions
from kapelle.evaluation.evaluate import Evaluation, summarise
from kapelle.rollout.play import Play, rollout
from kapelle.runtime.seeds import derive_seed
from kapelle.team import Agent, Team
from kapelle.types import Episode, Group, Sampling, Task
from kapelle.workflows.solo import Solo
from kapelle.workflows.vote import majority


@dataclass(frozen=True, slots=True)
class Baseline:
    """One way to spend the team's tokens."""

    agents: tuple[str, ...]
    """The agent that answers alone; several names if their weights, system messages and sampling are the same."""
    answers: int
    """Answers per problem; with more than one, the majority counts."""
    result: Evaluation
    """`result.tokens` counts the tokens of all answers."""
    failed_answers: int = 0
    """Answers that ended in an error, of all answers: they had no vote."""


def soloists(play: Play) -> list[tuple[str, ...]]:
    """Return the agents that can answer alone, identical ones together; empty for games.

    Agents behind endpoints are left out: the tokens of their servers cannot be counted.
    """
    if not asks_questions(play.environment):
        return []
    alike: dict[tuple[object, ...], list[str]] = {}
    for agent in play.team.agents:
        policy = play.team.policy(agent.name)
        if policy.endpoint is None:
            sampling = _sampling(play, agent)
            alike.setdefault((policy.name, agent.system, sampling), []).append(agent.name)
    return [tuple(names) for names in alike.values()]


async def compute_matched(play: Play, tasks: Sequence[Task], tokens: float, seed: int) -> list[Baseline]:
    """Return every agent alone, then every vote of at least two answers, at `tokens` per problem.

    `play` is the team's, sampling included: one answer is sampled as the team's are. Tasks are those of the
    team's evaluation; ties of a vote are drawn by `seed`. A team of one has no baseline.
    """
    found: list[Baseline] = []
    votes: list[Baseline] = []
    for names in soloists(play) if len(play.team.agents) > 1 else []:
        alone = await answer_alone(play, tasks, names[0], tokens, seed)
        found.append(Baseline(names, 1, alone, alone.failed))
        answers = int(tokens // max(1.0, alone.tokens))
        if answers > 1:
            voted, failed = await _vote(play, tasks, names[0], tokens, answers, seed)
            votes.append(Baseline(names, answers, voted, failed))
    return found + votes


async def answer_alone(play: Play, tasks: Sequence[Task], agent: str, tokens: float, seed: int) -> Evaluation:
    """Let one agent answer every task with at most `tokens` (rounded) completion tokens."""
    limit = max(1, round(tokens))
    sampling = replace(_sampling(play, play.team[agent]), max_tokens=limit)
    groups = await rollout(_alone(play, agent, sampling), tasks, 1, derive_seed(seed, "alone", agent))
    return summarise(groups)


async def vote(
    play: Play, tasks: Sequence[Task], agent: str, tokens: float, answers: int, seed: int
) -> Evaluation:
    """Let one agent answer every task `answers` times at temperature 1 and score the majority's answer.

    The answers share `tokens` equally (rounded down), so that together they stay within it. Answers that failed have
    no vote; a problem on which all failed has failed.
    """
    return (await _vote(play, tasks, agent, tokens, answers, seed))[0]


async def _vote(
    play: Play, tasks: Sequence[Task], agent: str, tokens: float, answers: int, seed: int
) -> tuple[Evaluation, int]:
    limit = max(1, int(tokens // answers))
    sampling = Sampling(limit, temperature=1.0, stop=_sampling(play, play.team[agent]).stop)
    seed = derive_seed(seed, "vote", agent)
    groups = await rollout(_alone(play, agent, sampling), tasks, answers, seed)
    chosen = [Group(group.task, (chosen_by_majority(play.environment, group, seed),)) for group in groups]
    spent = sum(len(turn.completion_ids) for group in groups for e in group.episodes for turn in e.turns)
    failed = sum(len(group.episodes) - len(group.valid) for group in groups)
    return replace(summarise(chosen), tokens=spent / max(1, len(groups))), failed


def chosen_by_majority(environment: object, group: Group, seed: int) -> Episode:
    """Return the episode of a group whose answer most of them gave; failed ones have no vote.

    Answers are equal if `Answerable.extract` returns the same; ties are drawn by `seed` and the task.
    """
    assert isinstance(environment, Answerable), "a vote needs answers that can be compared"
    voters = group.valid
    if not voters:
        return group.episodes[0]
    answers = {str(k): episode.turns[-1].text for k, episode in enumerate(voters)}
    found = {k: environment.extract(text) for k, text in answers.items()}
    text = majority(answers, found, derive_seed(seed, group.task.id))
    return next(episode for episode in voters if episode.turns[-1].text == text)


def _alone(play: Play, agent: str, sampling: Sampling) -> Play:
    """Return the same world with one agent, which reads only the question."""
    seat = replace(play.team[agent], prompt="{question}")
    policy = play.team.policy(agent)
    team = Team((seat,), {policy.name: policy}, {agent: policy.name}, play.team.bases)
    return replace(play, team=team, workflow=Solo(), sampling={agent: sampling})


def _sampling(play: Play, agent: Agent) -> Sampling:
    return (play.sampling or {}).get(agent.name, agent.sampling)
