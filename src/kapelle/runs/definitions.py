"""The metrics of a step's episodes, under the same names everywhere.

A row is flat: name → float. What does not exist is absent: the mean of no values is left out instead of written as 0 or NaN.
Failed episodes count in `failed_episodes` and `samples` alone. `success` is the mean over the `scored` episodes: those
that ended without an error and that the environment scored.
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

from kapelle.environment import FAILED, PAID_BY
from kapelle.runtime.plugins import find_object
from kapelle.types import Episode, Group, Turn


@dataclass(frozen=True, slots=True)
class Metric:
    """What one metric is; `<agent>` or `<policy>` in its pattern stands for a name."""

    pattern: str
    unit: str
    meaning: str
    warning: str
    """What it looks like when something is wrong, and the usual cause."""
    known_as: str
    """What papers and other trainers call it."""
    panel: tuple[str, str] | None = None
    """The panel that it shares with other metrics, and whose number it is there."""


FEATURES: Mapping[str, str] = {
    "league": "kapelle.features.league.metrics:METRICS",
    "replay": "kapelle.features.replay.metrics:METRICS",
    "reward_model": "kapelle.features.reward_model.metrics:METRICS",
    "entropy": "kapelle.features.entropy.metrics:METRICS",
}
"""Feature of `kapelle.features` → the metrics that it reports."""


def _catalogue() -> Iterator[tuple[Metric, ...]]:
    """Yield the metrics of each part of `metrics.toml`."""
    text = (files("kapelle.runs") / "metrics.toml").read_text("utf-8")
    for part in tomllib.loads(text).values():
        yield tuple(Metric(pattern, **about) for pattern, about in part.items())


METRICS, STEP_METRICS, UPDATE_METRICS, MACHINE_METRICS = _catalogue()


@cache
def metrics_of(feature: str) -> tuple[Metric, ...]:
    """Return the metrics of a feature, in the order in which they are shown."""
    metrics: tuple[Metric, ...] = find_object(FEATURES[feature], "metrics")
    return metrics


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], Metric], ...]:
    every = (*METRICS, *STEP_METRICS, *UPDATE_METRICS, *MACHINE_METRICS, *chain(*map(metrics_of, FEATURES)))
    escaped = [re.escape(metric.pattern).replace(r"\<", "<").replace(r"\>", ">") for metric in every]
    return tuple(
        (re.compile(re.sub(r"<\w+>", ".+", text)), metric)
        for text, metric in zip(escaped, every, strict=True)
    )


def describe(name: str) -> Metric | None:
    """Return the description of a metric by its full name (`reward/actor`), None for a name not listed here."""
    return next((metric for pattern, metric in _patterns() if pattern.fullmatch(name)), None)


def misspelt(name: str) -> str:
    """Return ` Did you mean 'success'?` for a name that begins like none listed here and nearly like one; else nothing."""
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
    """Return the metrics of a step's groups; see METRICS for each name.

    `returns` gives what each agent is trained on: `Algorithm.returns`, which shares the team's reward.
    """
    played = [episode for group in groups for episode in group.episodes]
    valid = [episode for episode in played if episode.error is None]
    row = {"samples": float(len(played))}
    _put_mean(row, "failed_episodes", [float(episode.error is not None) for episode in played])
    _put_score(row, "", valid)
    if unscored := sum(is_unscored(episode) for episode in valid):
        row[UNSCORED] = float(unscored)
    for part, own in by_part(valid).items():
        _put_score(row, f"/{part}", own)
        for agent in _names(episode.agents for episode in own):
            seated = [episode for episode in own if agent in episode.agents]
            _put_mean(row, f"return/{part}/{agent}", [returns(e).get(agent, 0.0) for e in seated])
    _put_mean(row, "truncated", [float(episode.truncated) for episode in valid])
    _put_mean(
        row, "dead_groups", [float(is_dead(group, returns)) for group in groups if len(group.episodes) > 1]
    )
    for name, values in _reported(valid).items():
        _put_mean(row, f"info/{name}", values)
    row |= _paid(played)
    for agent in _names(episode.agents for episode in played):
        seated = [episode for episode in valid if agent in episode.agents]
        row |= _agent_metrics(agent, seated, returns)
        best = [_terminal(agent, group.valid) for group in groups]
        _put_mean(row, f"reward_max/{agent}", [max(rewards) for rewards in best if rewards])
    _put_mean(row, "dead_moments", [float(len(set(worths)) < 2) for worths in _moments(valid)])
    turns = [turn for episode in played for turn in (*episode.turns, *episode.branches)]
    spoke = [(turn.policy,) for turn in turns] + [tuple(episode.continued) for episode in played]
    for policy in _names(spoke):
        sampled = [len(turn.completion_ids) for turn in turns if turn.policy == policy and not turn.copied]
        continued = sum(episode.continued.get(policy, 0) for episode in played)
        row[f"tokens/{policy}"] = float(sum(sampled) + continued)
        if continued:
            row[f"tokens_continued/{policy}"] = float(continued)
    return row


MOST_REPORTED = 32
"""Names of `info` in one step that become metrics, the first in the alphabet: a name for each task would be no metric."""
_REPORTABLE = re.compile(r"[\w.-]{1,64}")


def _reported(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """Return the finite numbers that environments report in `info`, by name, by `name/agent` for mappings of agents."""
    found: dict[str, list[float]] = {}
    for episode in episodes:
        said: Mapping[Any, Any] = episode.info  # a world may have named it by anything
        for name, value in said.items():
            if not (isinstance(name, str) and _REPORTABLE.fullmatch(name)):
                continue
            own = value.items() if isinstance(value, Mapping) and value.keys() <= {*episode.agents} else ()
            for place, number in [(name, value), *((f"{name}/{agent}", each) for agent, each in own)]:
                if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number):
                    found.setdefault(place, []).append(float(number))
    kept = {*sorted({place.partition("/")[0] for place in found})[:MOST_REPORTED]}
    return {place: found[place] for place in sorted(found) if place.partition("/")[0] in kept}


def _paid(played: Sequence[Episode]) -> dict[str, float]:
    """Return what each reward returned, for how many episodes it returned nothing, and how far a judge disagreed with itself."""
    found: dict[str, list[float]] = {}
    silent: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for episode in played:
        for key, value in episode.info.items():
            # Worlds may put anything there; most of it is passed over without a call, as this is done for every episode.
            if key.__class__ is not str or "/" not in key:
                continue
            if key.startswith(PAID_BY):
                name = key[len(PAID_BY) :]
                if episode.error is not None:
                    failed[name] += value == FAILED
                elif value is None:
                    silent[name] += 1
                elif isinstance(value, int | float) and math.isfinite(value):
                    found.setdefault(name, []).append(float(value))
            elif key == DISAGREEMENT and episode.error is None and isinstance(value, int | float):
                found.setdefault(key, []).append(float(value))
    row: dict[str, float] = {}
    for name in sorted({*found, *silent, *failed})[:MOST_REPORTED]:
        values = found.get(name, [])
        if name == DISAGREEMENT:
            row[name] = fmean(values)
            continue
        if values:
            row |= {f"paid/{name}": fmean(values), f"paid_std/{name}": pstdev(values)}
        if silent[name]:
            row[f"paid_none/{name}"] = silent[name] / (silent[name] + len(values))
        if failed[name]:
            row[f"paid_failed/{name}"] = failed[name] / len(played)
    return row


def by_part(episodes: Sequence[Episode]) -> dict[str, list[Episode]]:
    """Return the episodes of each part of a mixture; empty outside of one."""
    parts: dict[str, list[Episode]] = {}
    for episode in episodes:
        if episode.task.part:
            parts.setdefault(episode.task.part, []).append(episode)
    return parts


def _moments(episodes: Sequence[Episode]) -> Iterator[list[float]]:
    """Yield the values (`Turn.worth`) of each set of candidates."""
    for episode in episodes:
        worths: dict[int, list[float]] = {}
        for turn in (*episode.turns, *episode.branches):
            if turn.worth is not None:
                worths.setdefault(turn.index if turn.parent is None else turn.parent, []).append(turn.worth)
        yield from worths.values()


def _agent_metrics(
    agent: str, episodes: Sequence[Episode], returns: Callable[[Episode], Mapping[str, float]]
) -> dict[str, float]:
    row: dict[str, float] = {}
    turns: list[Turn] = [turn for episode in episodes for turn in episode.by(agent)]
    _put_mean(row, f"reward/{agent}", _terminal(agent, episodes))
    _put_mean(row, f"return/{agent}", [returns(episode).get(agent, 0.0) for episode in episodes])
    _put_mean(row, f"length/{agent}", [len(turn.completion_ids) for turn in turns])
    _put_mean(row, f"turns/{agent}", [len(episode.by(agent)) for episode in episodes])
    _put_mean(row, f"finish_length/{agent}", [float(turn.finish_reason == "length") for turn in turns])
    shortened = [turn.dropped > 0 for turn in turns]
    if any(shortened):
        _put_mean(row, f"compacted/{agent}", list(map(float, shortened)))
    return row


def _terminal(agent: str, episodes: Sequence[Episode]) -> list[float]:
    return [episode.rewards[agent] for episode in episodes if agent in episode.rewards]


def is_dead(group: Group, returns: Callable[[Episode], Mapping[str, float]] = own_returns) -> bool:
    """Return whether no trained agent's return varies among a group's episodes."""
    compared = without_unscored(group).valid
    learners = _names((turn.agent for turn in episode.turns if turn.trained) for episode in compared)
    seats = learners or _names(episode.agents for episode in compared)
    earned = [returns(episode) for episode in compared]
    return all(len({own.get(agent, 0.0) for own in earned}) < 2 for agent in seats)


def _names(lists: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(lists)))


def _put_score(row: dict[str, float], part: str, valid: Sequence[Episode]) -> None:
    scores = [episode.success for episode in valid if episode.success is not None]
    if valid:
        row[f"scored{part}"] = float(len(scores))
    _put_mean(row, f"success{part}", scores)


UNSCORED = "unscored"
"""Where `Outcome.info` may say why an episode has no score; and the metric that counts such episodes."""


def is_unscored(episode: Episode) -> bool:
    """Return whether an episode says that nothing scored it, and nothing did."""
    return UNSCORED in episode.info and episode.success is None and not episode.rewards


def without_unscored(group: Group) -> Group:
    """Return a group whose unscored episodes count as failed: they have no return that others could be compared with."""
    if not any(map(is_unscored, group.episodes)):
        return group
    marked = [replace(e, error=str(e.info[UNSCORED])) if is_unscored(e) else e for e in group.episodes]
    return replace(group, episodes=tuple(marked))


def none_scored(row: Mapping[str, float]) -> bool:
    """Return whether a row is of episodes that nothing scored, so that its rewards are not known."""
    return UNSCORED in row and row[UNSCORED] == row["samples"] * (1.0 - row.get("failed_episodes", 0.0))


DISAGREEMENT = "judge/disagreement"
"""Where an episode's `info` says how far a judge's verdicts in both orders differ; also the metric."""


def paid_by(groups: Sequence[Group]) -> dict[str, tuple[int, int]]:
    """Return, by reward function, the episodes that it returned a number for, and all that it was asked about."""
    found: dict[str, tuple[int, int]] = {}
    for group in groups:
        for episode in group.valid:
            for key, value in episode.info.items():
                name = str(key)  # worlds may put anything there
                if name.startswith(PAID_BY) and (value is None or isinstance(value, int | float)):
                    paid, asked = found.get(name.removeprefix(PAID_BY), (0, 0))
                    found[name.removeprefix(PAID_BY)] = paid + (value is not None), asked + 1
    return found


def reported_counts(groups: Sequence[Group]) -> dict[str, int]:
    """Return of how many episodes the means `info/<name>` and `paid/<reward>` of `rollout_metrics` are."""
    valid = [episode for group in groups for episode in group.valid]
    counts = Counter({f"info/{name}": len(values) for name, values in _reported(valid).items()})
    for episode in valid:
        for key, value in episode.info.items():
            name = str(key)  # worlds may put anything there
            if name.startswith(PAID_BY) and isinstance(value, int | float) and math.isfinite(value):
                counts[f"paid/{name.removeprefix(PAID_BY)}"] += 1
    return dict(counts)


DEMONSTRATED = "demonstrated_"
"""Prefix of the metrics that describe demonstrations."""


def demonstrated(row: Mapping[str, float]) -> dict[str, float]:
    """Return a row of demonstrations, whose scores get names of their own because they do not describe the team."""
    scores = ("success", "reward", "reward_max", "return")
    return {
        f"{DEMONSTRATED}{name}" if name.partition("/")[0] in scores else name: value
        for name, value in row.items()
    }


def _put_mean(row: dict[str, float], name: str, values: Sequence[float]) -> None:
    if values:
        row[name] = fmean(values)
