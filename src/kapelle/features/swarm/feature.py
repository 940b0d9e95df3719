"""Add PARL's rewards to the turns that called other agents (arXiv:2602.02276): λ₁·r_parallel + λ₂·r_finish, annealed to 0.

Without r_parallel, a planner that has learned to solve a task by one call after another does not discover parallel calls. Without
r_finish, r_parallel rewards calls that do nothing. Both vanish during the run, because the optimum of the task's own reward is the aim.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from kapelle.algorithms.shared.rewards import with_scores
from kapelle.features.swarm.settings import SwarmConfig
from kapelle.rows import Signals, TurnKey
from kapelle.training.feature import Feature, StartedRun, StepInProgress
from kapelle.types import Episode, Group, Turn


class SwarmRewards(Feature):
    """Adds the rewards of a step's weights, and reports calls, finished calls and critical tokens."""

    def __init__(self, settings: SwarmConfig, run: StartedRun) -> None:
        self._settings, self._steps = settings, run.config.training.steps
        self._left = 1.0
        """The share of both weights that remains in this step."""

    def before_update(self, step: StepInProgress) -> None:
        """Compute the weights of the step, and add metrics of its episodes, each a mean over episodes."""
        self._left = max(0.0, 1.0 - (step.number - 1) / max(1.0, self._settings.until * self._steps))
        episodes = [episode for group in step.groups for episode in group.valid]
        if not episodes:
            return
        called = [[turn for calls in calls_of(episode).values() for turn in calls] for episode in episodes]
        finished = [turn for turns in called for turn in turns if _is_finished(turn)]
        step.metrics |= {
            "swarm/weight": self._left,
            "swarm/calls": fmean(map(len, called)),
            "swarm/critical_tokens": fmean(map(critical_tokens, episodes)),
            "swarm/tokens": fmean(sum(turn.token_counts[1] for turn in each.turns) for each in episodes),
        }
        if total := sum(map(len, called)):
            step.metrics["swarm/finished"] = len(finished) / total

    def rewarded(self, groups: Sequence[Group], signals: Signals | None) -> Sequence[Group]:
        """Return the groups with the rewards of the calls added to the turns that caused the calls."""
        rewards = {
            TurnKey(g, e, caller): self._left * self._reward(calls)
            for g, group in enumerate(groups)
            for e, episode in enumerate(group.episodes)
            for caller, calls in calls_of(episode).items()
        }
        return with_scores(groups, rewards, 1.0)

    def _reward(self, calls: Sequence[Turn]) -> float:
        settings = self._settings
        parallel = min(1.0, (len(calls) - 1) / (settings.calls - 1))
        return settings.parallel * parallel + settings.finish * fmean(map(_is_finished, calls))


def calls_of(episode: Episode) -> dict[int, list[Turn]]:
    """Return the turns that each turn caused, by the index of the turn that caused them."""
    calls: dict[int, list[Turn]] = defaultdict(list)
    for turn in episode.turns:
        if turn.caller is not None:
            calls[turn.caller].append(turn)
    return dict(calls)


def critical_tokens(episode: Episode) -> int:
    """Return the completion tokens on the longest path through the episode, on which calls by the same turn count as simultaneous.

    This is the sum, over the turns that no other turn caused, of the turn's own tokens and the longest chain of calls below it.
    """
    calls = calls_of(episode)

    def longest(turn: Turn) -> int:
        return turn.token_counts[1] + max(map(longest, calls.get(turn.index, ())), default=0)

    return sum(longest(turn) for turn in episode.turns if turn.caller is None)


def _is_finished(turn: Turn) -> bool:
    return turn.finish_reason == "stop" and bool(turn.words.strip())
