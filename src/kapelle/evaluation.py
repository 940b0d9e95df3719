"""How good is the team: accuracy with an interval, per agent, and against the same tokens spent otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kapelle.algorithm import TurnKey, label_of, turns_of
from kapelle.environment import Environment
from kapelle.metrics import by_part, own_returns, rollout_metrics
from kapelle.rollout import Play, rollout
from kapelle.seeds import derive_seed
from kapelle.statistics import area_under_curve, mean_interval, wilson_interval
from kapelle.types import Episode, Group, Sampling, Split, Task

Returns = Callable[[Episode], Mapping[str, float]]
"""What each agent earned in an episode."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results on problems that nothing was trained on."""

    problems: int
    success: float | None
    """Mean team score; the share of solved problems where a problem is solved or not (pass@1)."""
    interval: tuple[float, float] | None
    """95 %: Wilson's for shares, Student's t for graded scores."""
    reward: Mapping[str, float]
    """Mean undiscounted return of each agent."""
    tokens: float
    """Mean completion tokens of the whole team per problem."""
    failed: int
    """Episodes that ended in an error; they count as unsolved."""
    parts: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """`seen` and `not seen` → (success, problems), for every yes or no that the environment says in `info`."""
    part_reward: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Part of a mixture → mean undiscounted return of each agent in it; failed episodes are left out."""
    groups: tuple[Group, ...] = ()
    """The episodes themselves."""

    def row(self) -> dict[str, Any]:
        """Return the numbers as plain JSON."""
        row: dict[str, Any] = {
            "problems": self.problems,
            "success": self.success,
            "interval": None if self.interval is None else list(self.interval),
            "reward": dict(self.reward),
            "tokens": self.tokens,
            "failed": self.failed,
            "parts": {
                name: {"success": value, "problems": count} for name, (value, count) in self.parts.items()
            },
        }
        if self.part_reward:
            row["part_reward"] = {part: dict(earned) for part, earned in self.part_reward.items()}
        return row


def choose_tasks(environment: Environment, split: Split, count: int, seed: int = 0) -> list[Task]:
    """Return the same `count` tasks of a split every time: a seeded draw, without repetition where it ends."""
    import random

    size = environment.size(split)
    if size is None:
        return _distinct(environment, split, count)
    order = random.Random(derive_seed(seed, split)).sample(range(size), min(count, size))
    return [environment.task(split, index) for index in order]


def _distinct(environment: Environment, split: Split, count: int) -> list[Task]:
    """Return generated tasks with different questions, as far as 20 draws for each find them."""
    chosen: dict[str, Task] = {}
    for index in range(20 * count):
        task = environment.task(split, index)
        chosen.setdefault(task.question or task.id, task)
        if len(chosen) == count:
            break
    return list(chosen.values())


def greedy(sampling: Sampling) -> Sampling:
    """Return the same limits with the likeliest token at every place."""
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=0)


async def evaluate_tasks(
    play: Play, tasks: Sequence[Task], seed: int, returns: Returns = own_returns
) -> Evaluation:
    """Play every task once and summarise; `returns` shares the team's reward (`Algorithm.returns`)."""
    groups = await rollout(play, tasks, 1, derive_seed(seed, "evaluation"))
    return summarise(groups, returns)


def summarise(groups: Sequence[Group], returns: Returns = own_returns) -> Evaluation:
    """Return the summary of groups of one episode per task."""
    episodes = [episode for group in groups for episode in group.episodes]
    scores = [_score(episode) for episode in episodes]
    known = [score for score in scores if score is not None]
    metrics = rollout_metrics(groups, returns)
    success = sum(known) / len(known) if known else None
    agents = episodes[0].agents if episodes else ()
    return Evaluation(
        problems=len(episodes),
        success=success,
        interval=_interval(known) if known else None,
        reward={agent: metrics.get(f"return/{agent}", 0.0) for agent in agents},
        tokens=sum(len(t.completion_ids) for e in episodes for t in e.turns) / max(1, len(episodes)),
        failed=sum(episode.error is not None for episode in episodes),
        parts=_parts(episodes),
        part_reward={
            part: {agent: metrics[f"return/{part}/{agent}"] for agent in agents}
            for part in by_part([episode for episode in episodes if episode.error is None])
        },
        groups=tuple(groups),
    )


def own_scores(groups: Sequence[Group]) -> dict[str, tuple[float, tuple[float, float] | None]]:
    """Return mean and 95 % interval of what each agent itself was paid at the end, nothing shared.

    Agents that were never paid have no score of their own and are absent; a failed episode pays 0.
    """
    return _own(groups, lambda episode, agent: episode.rewards[agent])


def own_totals(groups: Sequence[Group]) -> dict[str, tuple[float, tuple[float, float] | None]]:
    """Return the same of all that an episode paid, which is what counts in games that pay during play."""
    return _own(groups, lambda episode, agent: episode.total(agent))


def _own(
    groups: Sequence[Group], earned: Callable[[Episode, str], float]
) -> dict[str, tuple[float, tuple[float, float] | None]]:
    episodes = [episode for group in groups for episode in group.episodes]
    paid = dict.fromkeys(agent for episode in episodes for agent in episode.rewards)
    scores: dict[str, tuple[float, tuple[float, float] | None]] = {}
    for agent in paid:
        known = [
            0.0 if episode.error is not None else earned(episode, agent)
            for episode in episodes
            if episode.error is not None or agent in episode.rewards
        ]
        scores[agent] = sum(known) / len(known), _interval(known)
    return scores


def _score(episode: Episode) -> float | None:
    return 0.0 if episode.error is not None else episode.success


def _interval(scores: Sequence[float]) -> tuple[float, float] | None:
    if all(score in (0.0, 1.0) for score in scores):
        return wilson_interval(int(sum(scores)), len(scores))
    return mean_interval(scores)


def _parts(episodes: Sequence[Episode]) -> dict[str, tuple[float, int]]:
    scores: dict[str, list[float]] = {}
    for episode in episodes:
        score = _score(episode)
        for name, said in episode.info.items():
            if isinstance(said, bool) and score is not None:
                scores.setdefault(name if said else f"not {name}", []).append(score)
    return {name: (sum(part) / len(part), len(part)) for name, part in sorted(scores.items())}


def verifier_metrics(groups: Sequence[Group], score: Mapping[TurnKey, float]) -> dict[str, float]:
    """Return what a verifier thinks of each agent's turns, and how well it tells right ones from wrong ones.

    `verifier_score/<agent>` is the mean of σ; `verifier_auc` compares with the environment where that graded turns.
    """
    by_agent: dict[str, list[float]] = {}
    judged: list[tuple[float, bool]] = []
    for key, turn in turns_of(groups, trained_only=False):
        by_agent.setdefault(turn.agent, []).append(score[key])
        label = label_of(groups[key.group].episodes[key.episode], turn)
        if label is not None:
            judged.append((score[key], label > 0.5))
    row = {f"verifier_score/{agent}": sum(values) / len(values) for agent, values in by_agent.items()}
    area = area_under_curve([value for value, _ in judged], [right for _, right in judged])
    return row if area is None else {**row, "verifier_auc": area}
