"""Defines the metrics of the episodes of a step, which have the same names everywhere.

A row is a flat mapping from names to floats. The mean of no values is omitted, rather than being 0 or NaN. Failed
episodes are counted only in `failed_episodes` and `samples`. The metric `success` is the mean over the `scored`
episodes, which are the episodes without an error that the environment has scored.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from itertools import chain
from statistics import fmean, pstdev
from typing import Any

from kapelle.environment import FAILED, REWARD_PREFIX
from kapelle.runtime.plugins import find_object
from kapelle.types import Episode, Group, Turn


@dataclass(frozen=True, slots=True)
class Metric:
    """The description of a metric. In its pattern, `<agent>` and `<policy>` are placeholders for names."""

    pattern: str
    unit: str
    meaning: str
    warning: str
    """The values that indicate a problem, and the usual cause of the problem."""
    known_as: str
    """The name of the metric in papers and in other trainers."""
    panel: tuple[str, str] | None = None
    """The viewer panel that the metric shares with other metrics, and the label of the metric in this panel."""
    progress: str = ""
    """A phrase for the metric, if it shows the progress of agents with opponents, whose returns do not show progress."""
    is_falling: bool = False
    """Whether the metric decreases as agents make progress."""
    is_relative: bool = False
    """Whether values of the metric at different steps are not comparable. If true, a decrease does not indicate a problem."""


FEATURES = tuple(
    folder.name
    for folder in sorted(files("kapelle.features").iterdir(), key=lambda folder: folder.name)
    if (folder / "metrics.py").is_file()
)
"""The packages in `kapelle.features` that define metrics, in `METRICS` of their module `metrics`."""


def _catalogue() -> Iterator[tuple[Metric, ...]]:
    """Yield the metrics in each part of `metrics.toml`."""
    text = (files("kapelle.runs") / "metrics.toml").read_text("utf-8")
    for part in tomllib.loads(text).values():
        yield tuple(Metric(pattern, **about) for pattern, about in part.items())


METRICS, STEP_METRICS, UPDATE_METRICS, MACHINE_METRICS = _catalogue()


@cache
def metrics_of(feature: str) -> tuple[Metric, ...]:
    """Return the metrics of a feature, in the order in which they are shown."""
    metrics: tuple[Metric, ...] = find_object(f"kapelle.features.{feature}.metrics:METRICS", "metrics")
    return metrics


@cache
def progress_metrics() -> Mapping[str, Metric]:
    """Return the metrics of features that show progress when returns do not, the most reliable first."""
    found = [metric for metric in chain(*map(metrics_of, FEATURES)) if metric.progress]
    return {metric.pattern: metric for metric in sorted(found, key=lambda metric: metric.is_relative)}


def has_rated_feature(settings: Mapping[str, Any]) -> bool:
    """Return whether a run has a feature that measures the progress of agents with opponents."""
    return any(isinstance(settings.get(name.partition("/")[0]), Mapping) for name in progress_metrics())


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], Metric], ...]:
    every = (*METRICS, *STEP_METRICS, *UPDATE_METRICS, *MACHINE_METRICS, *chain(*map(metrics_of, FEATURES)))
    escaped = [re.escape(metric.pattern).replace(r"\<", "<").replace(r"\>", ">") for metric in every]
    return tuple(
        (re.compile(re.sub(r"<\w+>", ".+", text)), metric)
        for text, metric in zip(escaped, every, strict=True)
    )


def describe(name: str) -> Metric | None:
    """Return the description of a metric with the given full name, such as `reward/actor`, or None for an unknown name."""
    return next((metric for pattern, metric in _patterns() if pattern.fullmatch(name)), None)


def misspelt(name: str) -> str:
    """Return a hint such as ` Did you mean 'success'?` for an unknown name that is similar to a known name, otherwise an empty string."""
    kind, _, rest = name.partition("/")
    kinds = {
        metric.pattern.partition("/")[0]
        for metric in (*METRICS, *STEP_METRICS, *UPDATE_METRICS, *chain(*map(metrics_of, FEATURES)))
    }
    near = [] if kind in kinds else get_close_matches(kind, kinds, n=1, cutoff=0.6)
    return f" Did you mean '{near[0]}{'/' if rest else ''}{rest}'?" if near else ""


def own_returns(episode: Episode) -> Mapping[str, float]:
    """Return the environment's own reward of each agent."""
    return {agent: episode.total(agent) for agent in episode.agents}


def rollout_metrics(
    groups: Sequence[Group], returns: Callable[[Episode], Mapping[str, float]] = own_returns
) -> dict[str, float]:
    """Return the metrics of the groups of a step. The names are described in METRICS.

    The function `returns` computes the returns with which agents are trained, such as `Algorithm.returns`, which shares
    the team's reward.
    """
    every = [episode for group in groups for episode in group.episodes]
    valid = [episode for episode in every if episode.error is None]
    row = {"samples": float(len(every))}
    _put_mean(row, "failed_episodes", [float(episode.error is not None) for episode in every])
    _put_score(row, "", valid)
    if unscored := sum(is_unscored(episode) for episode in valid):
        row[UNSCORED] = float(unscored)
    for part, own in by_part(valid).items():
        _put_score(row, f"/{part}", own)
        for agent in _names(episode.agents for episode in own):
            _put_mean(row, f"return/{part}/{agent}", [returns(e).get(agent, 0.0) for e in acted(agent, own)])
    _put_mean(row, "truncated", [float(episode.truncated) for episode in valid])
    _put_mean(
        row, "dead_groups", [float(is_dead(group, returns)) for group in groups if len(group.episodes) > 1]
    )
    for name, values in _reported(valid).items():
        _put_mean(row, f"info/{name}", values)
    row |= _reward_functions(every)
    for agent in _names(episode.agents for episode in every):
        with_agent = [episode for episode in valid if agent in episode.agents]
        row |= _agent_metrics(agent, with_agent, returns)
        best = [_terminal(agent, group.valid) for group in groups]
        _put_mean(row, f"reward_max/{agent}", [max(rewards) for rewards in best if rewards])
    _put_mean(row, "dead_moments", [float(len(set(values)) < 2) for values in _moments(valid)])
    turns = [turn for episode in every for turn in (*episode.turns, *episode.branches)]
    policies = [(turn.policy,) for turn in turns] + [tuple(episode.continued) for episode in every]
    for policy in _names(policies):
        sampled = [len(turn.completion_ids) for turn in turns if turn.policy == policy and not turn.copied]
        continued = sum(episode.continued.get(policy, 0) for episode in every)
        row[f"tokens/{policy}"] = float(sum(sampled) + continued)
        if continued:
            row[f"tokens_continued/{policy}"] = float(continued)
    return row


MOST_REPORTED = 32
"""The maximum number of names in the `info` of one step that become metrics, in alphabetical order. The number is limited
because some environments use a separate name for each task."""
_REPORTABLE = re.compile(r"[\w.-]{1,64}")


def _reported(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """Return the finite numbers in the `info` of the episodes by name. For a mapping by agent, the name is `name/agent`."""
    found: dict[str, list[float]] = {}
    for episode in episodes:
        info: Mapping[Any, Any] = episode.info  # environments may use keys of any type
        for name, value in info.items():
            if not (isinstance(name, str) and _REPORTABLE.fullmatch(name)):
                continue
            own = value.items() if isinstance(value, Mapping) and value.keys() <= {*episode.agents} else ()
            for place, number in [(name, value), *((f"{name}/{agent}", each) for agent, each in own)]:
                if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number):
                    found.setdefault(place, []).append(float(number))
    kept = {*sorted({place.partition("/")[0] for place in found})[:MOST_REPORTED]}
    return {place: found[place] for place in sorted(found) if place.partition("/")[0] in kept}


def _reward_functions(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the statistics of each reward function.

    The statistics are the mean, the standard deviation, the shares of None and of failures, and the judge's
    disagreement.
    """
    found: dict[str, list[float]] = {}
    silent: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for episode in episodes:
        for name, value in _reward_values(episode):
            if episode.error is not None:
                failed[name] += value == FAILED
            elif value is None:
                silent[name] += 1
            elif isinstance(value, int | float) and math.isfinite(value):
                found.setdefault(name, []).append(float(value))
    row: dict[str, float] = {}
    judged = [episode.info.get(DISAGREEMENT) for episode in episodes if episode.error is None]
    _put_mean(row, DISAGREEMENT, [float(value) for value in judged if isinstance(value, int | float)])
    for name in sorted({*found, *silent, *failed})[:MOST_REPORTED]:
        values = found.get(name, [])
        if values:
            row |= {f"reward_function/{name}": fmean(values), f"reward_function_std/{name}": pstdev(values)}
        if silent[name]:
            row[f"reward_function_none/{name}"] = silent[name] / (silent[name] + len(values))
        if failed[name]:
            row[f"reward_function_failed/{name}"] = failed[name] / len(episodes)
    return row


def _reward_values(episode: Episode) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each reward function of an episode. The value is the reward, None, or `FAILED`."""
    info: Mapping[Any, Any] = episode.info  # environments may use keys of any type
    for key, value in info.items():
        # Most keys are skipped without a call, as this runs for every episode.
        if key.__class__ is str and "/" in key and key.startswith(REWARD_PREFIX):
            yield key.removeprefix(REWARD_PREFIX), value


def by_part(episodes: Sequence[Episode]) -> dict[str, list[Episode]]:
    """Return the episodes of each part of a mixture. The result is empty if the environment is not a mixture."""
    parts: dict[str, list[Episode]] = {}
    for episode in episodes:
        if episode.task.part:
            parts.setdefault(episode.task.part, []).append(episode)
    return parts


def _moments(episodes: Sequence[Episode]) -> Iterator[list[float]]:
    """Yield the values (`Turn.continuation_return`) of each set of candidates."""
    for episode in episodes:
        values: dict[int, list[float]] = {}
        for turn in (*episode.turns, *episode.branches):
            if turn.continuation_return is not None:
                values.setdefault(turn.index if turn.parent is None else turn.parent, []).append(
                    turn.continuation_return
                )
        yield from values.values()


def acted(agent: str, episodes: Sequence[Episode]) -> list[Episode]:
    """Return the episodes whose rewards describe an agent.

    In these episodes, the agent has acted, no opponent has taken its role, and the episode was scored.
    """
    return [
        episode
        for episode in episodes
        if agent not in episode.task.cast
        and not is_unscored(episode)
        and any(turn.agent == agent for turn in episode.turns)
    ]


def _agent_metrics(
    agent: str, episodes: Sequence[Episode], returns: Callable[[Episode], Mapping[str, float]]
) -> dict[str, float]:
    row: dict[str, float] = {}
    turns: list[Turn] = [turn for episode in episodes for turn in episode.by(agent)]
    _put_mean(row, f"reward/{agent}", _terminal(agent, episodes))
    _put_mean(row, f"return/{agent}", [returns(each).get(agent, 0.0) for each in acted(agent, episodes)])
    _put_mean(row, f"length/{agent}", [len(turn.completion_ids) for turn in turns])
    _put_mean(row, f"turns/{agent}", [len(episode.by(agent)) for episode in episodes])
    _put_mean(row, f"finish_length/{agent}", [float(turn.finish_reason == "length") for turn in turns])
    compacted = [float(turn.dropped > 0) for turn in turns if not turn.summary]
    if any(compacted):
        _put_mean(row, f"compacted/{agent}", compacted)
    _put_mean(row, f"summary_length/{agent}", [len(turn.completion_ids) for turn in turns if turn.summary])
    return row


def _terminal(agent: str, episodes: Sequence[Episode]) -> list[float]:
    own = acted(agent, episodes)
    rewarded = any(agent in episode.rewards for episode in own)
    return [episode.rewards.get(agent, 0.0) for episode in own] if rewarded else []


def is_dead(group: Group, returns: Callable[[Episode], Mapping[str, float]] = own_returns) -> bool:
    """Return whether the return of every trained agent is the same in all episodes of a group."""
    compared = without_unscored(group).valid
    learners = _names((turn.agent for turn in episode.turns if turn.trained) for episode in compared)
    agents = learners or _names(episode.agents for episode in compared)
    found = [returns(episode) for episode in compared]
    return all(len({own.get(agent, 0.0) for own in found}) < 2 for agent in agents)


def _names(lists: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(lists)))


def _put_score(row: dict[str, float], part: str, valid: Sequence[Episode]) -> None:
    scores = [episode.success for episode in valid if episode.success is not None]
    if valid:
        row[f"scored{part}"] = float(len(scores))
    _put_mean(row, f"success{part}", scores)


UNSCORED = "unscored"
"""The key of `Outcome.info` for the reason why an episode has no score. The metric that counts such episodes has the same name."""


def is_unscored(episode: Episode) -> bool:
    """Return whether an episode has neither a score nor rewards and states a reason for this."""
    return UNSCORED in episode.info and episode.success is None and not episode.rewards


def without_unscored(group: Group) -> Group:
    """Return a group in which unscored episodes are marked as failed, because they have no return to compare."""
    if not any(map(is_unscored, group.episodes)):
        return group
    marked = [replace(e, error=str(e.info[UNSCORED])) if is_unscored(e) else e for e in group.episodes]
    return replace(group, episodes=tuple(marked))


def none_scored(row: Mapping[str, float]) -> bool:
    """Return whether none of the episodes in a row was scored, so that the rewards are unknown."""
    return UNSCORED in row and row[UNSCORED] == row.get("samples", 0.0) * (
        1.0 - row.get("failed_episodes", 0.0)
    )


DISAGREEMENT = "judge/disagreement"
"""The key of an episode's `info` for the difference between a judge's verdicts in the two orders of presentation. The metric
has the same name."""


def rewarded_counts(groups: Sequence[Group]) -> dict[str, tuple[int, int]]:
    """Return, for each reward function, the number of episodes for which it returned a number, and the number for which it was called."""
    found: dict[str, tuple[int, int]] = {}
    for group in groups:
        for episode in group.valid:
            for name, value in _reward_values(episode):
                if value is None or isinstance(value, int | float):
                    numbers, calls = found.get(name, (0, 0))
                    found[name] = numbers + (value is not None), calls + 1
    return found


def reported_counts(groups: Sequence[Group]) -> dict[str, int]:
    """Return the number of episodes in each mean `info/<name>` and `reward_function/<reward>` of `rollout_metrics`."""
    valid = [episode for group in groups for episode in group.valid]
    counts = Counter({f"info/{name}": len(values) for name, values in _reported(valid).items()})
    for episode in valid:
        for name, value in _reward_values(episode):
            if isinstance(value, int | float) and math.isfinite(value):
                counts[f"reward_function/{name}"] += 1
    return dict(counts)


DEMONSTRATED = "demonstrated_"
"""The prefix of the metrics that describe demonstrations."""


def demonstrated(row: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of demonstrations, in which the names of scores have a prefix because they do not describe the team."""
    scores = ("success", "reward", "reward_max", "return")
    return {
        f"{DEMONSTRATED}{name}" if name.partition("/")[0] in scores else name: value
        for name, value in row.items()
    }


def _put_mean(row: dict[str, float], name: str, values: Sequence[float]) -> None:
    if values:
        row[name] = fmean(values)
