"""The metrics of a step's episodes, under the same names everywhere.

A row is flat: name → float. What does not exist is absent: the mean of no values is left out instead of written as 0 or NaN.
Failed episodes count in `failed_episodes` and `samples` alone. `success` is the mean over the `scored` episodes: those
that ended without an error and that the environment scored.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from statistics import fmean, pstdev
from typing import Any

from kapelle.types import Episode, Group, Turn


@dataclass(frozen=True, slots=True)
class Metric:
    """What one metric is; `<agent>` or `<policy>` in its pattern stands for a name."""

    pattern: str
    unit: str
    meaning: str
    warning: str
    """What it looks like when something is wrong, and the usual cause."""


METRICS: tuple[Metric, ...] = (
    Metric(
        "reward/<agent>",
        "reward",
        "Mean terminal reward of the agent, over the episodes that gave it one.",
        "Flat from the start: every attempt earns the same. See dead_groups.",
    ),
    Metric(
        "reward_max/<agent>",
        "reward",
        "Mean over groups of the best terminal reward among a task's attempts.",
        "Equal to reward/<agent>: all attempts earn the same, and RL has nothing to reinforce.",
    ),
    Metric(
        "paid/<reward>",
        "reward",
        "Mean of what one reward of `rewarded` returned, before its weight: a function, a ranking, a rubric (`paid/rubric`) or its criterion (`paid/rubric/clear`).",
        "One rises and the others fall: it is cheaper to please. One stays where it is: it tells no answers apart.",
    ),
    Metric(
        "paid_std/<reward>",
        "reward",
        "Standard deviation of the same over the step's episodes, before its weight; of a population.",
        "0: it returns the same for every answer and teaches nothing. Many times that of another: times its weight, it decides alone.",
    ),
    Metric(
        "paid_none/<reward>",
        "share",
        "Share of the episodes it was asked about for which it returned None, which pays nothing; absent where there are none.",
        "Near 1: hardly an answer is paid. Look at what the function needs to find in a text.",
    ),
    Metric(
        "paid_failed/<reward>",
        "share",
        "Share of the step's episodes that failed because this function raised, or a judge gave no verdict; absent where there are none.",
        "Above 0: read `error` in the episodes' file, which names the line of the function.",
    ),
    Metric(
        "judge/disagreement",
        "share",
        "Mean difference between an attempt's scores when a ranking is shown the attempts in opposite orders, in [0, 1].",
        "Above 0.2: the judge goes by places more than by texts. Take a better one, or a rubric.",
    ),
    Metric(
        "return/<part>/<agent>",
        "reward",
        "return/<agent> over the episodes of one part of a mixture of environments.",
        "One part's spread is ten times another's: without a baseline per part it dominates the updates.",
    ),
    Metric(
        "return/<agent>",
        "reward",
        "Mean undiscounted return of an episode that the agent is trained on: terminal and turn rewards, "
        "after the algorithm has shared the team's reward.",
        "Falls while success rises: turn rewards pay for something other than the task.",
    ),
    Metric(
        "length/<agent>",
        "tokens",
        "Mean tokens of a completion.",
        "Grows steadily without reward: padding is rewarded. Falls towards 1: the agent has gone silent.",
    ),
    Metric(
        "turns/<agent>",
        "turns",
        "Mean turns of the agent in an episode.",
        "0: the workflow gives this agent no turn, so it cannot learn.",
    ),
    Metric(
        "finish_length/<agent>",
        "share",
        "Share of completions that were cut off at the limit of tokens.",
        "Above 0.1: answers are lost at the end. Raise sampling.max_tokens.",
    ),
    Metric(
        "tokens/<policy>",
        "tokens",
        "Tokens that the policy sampled in the step, failed episodes included, and those of continuations.",
        "0: nothing was sampled for this policy.",
    ),
    Metric(
        "tokens_continued/<policy>",
        "tokens",
        "Those of them that were sampled to continue from the candidates of a tree; nothing is trained on them.",
        "Most of tokens/<policy>: long episodes. Every turn but the last is continued to the end of the episode.",
    ),
    Metric(
        "dead_moments",
        "share",
        "Share of a tree's sets of candidates for one prompt in which all are worth the same: they teach nothing.",
        "Near 1 for a long time: the team solves nothing or everything, or `continuations` is too small to tell.",
    ),
    Metric(
        "success",
        "share",
        "Mean score of the team in [0, 1] over the `scored` episodes, where the environment has one.",
        "Rises on train tasks and not in evaluation: the tasks are being memorised.",
    ),
    Metric(
        "compacted/<agent>",
        "share",
        "Share of the agent's turns before which messages were dropped from its conversation; absent where there are none.",
        "Near 1: almost every turn reads a shortened conversation. Take a longer context, or keep fewer messages.",
    ),
    Metric(
        "scored",
        "episodes",
        "Episodes that `success` is the mean of: those without an error that have a score.",
        "Less than samples: the rest failed or could not be scored. `success` does not include them.",
    ),
    Metric(
        "unscored",
        "episodes",
        "Episodes that nothing scored or paid, as the environment says in `info.unscored`; absent where there are none.",
        "Above 0: a reward function returned None. Nothing is learned from such an episode.",
    ),
    Metric(
        "scored/<part>",
        "episodes",
        "The same among the tasks of one part of a mixture of environments.",
        "Few: the success of this part is very uncertain.",
    ),
    Metric(
        "success/<part>",
        "share",
        "The same over the tasks of one part of a mixture of environments.",
        "Falls while another part's rises: the parts compete. Change their weights.",
    ),
    Metric(
        "truncated",
        "share",
        "Share of episodes that a limit of turns or tokens ended, not the task.",
        "Above 0.1: the limits are too tight for this task.",
    ),
    Metric(
        "info/<name>/<agent>",
        "the environment's",
        "The same for a mapping of agents to numbers: the mean of each agent's.",
        "As info/<name>.",
    ),
    Metric(
        "info/<name>",
        "the environment's",
        "Mean of a number that the environment reports in `Outcome.info`, over the episodes without an error that report it.",
        "Absent: no episode reported a finite number under this name, or a step had more than 32 names before it.",
    ),
    Metric(
        "dead_groups",
        "share",
        "Share of the groups of two or more in which no trained agent's return varies: without a "
        "critic they teach nothing.",
        "Near 1: the tasks are too easy or too hard, or the temperature is too low.",
    ),
    Metric(
        "failed_episodes",
        "share",
        "Share of episodes that ended in an error.",
        "Above 0: read `error` in the episodes' file.",
    ),
    Metric(
        "samples",
        "episodes",
        "Episodes played in the step, failed ones included.",
        "Differs from tasks × group size: the environment ran out of tasks.",
    ),
)


STEP_METRICS: tuple[Metric, ...] = (
    Metric(
        "judge/calls",
        "replies",
        "Replies that judges were asked for in the step, by this process; kept ones are not among them.",
        "More than attempts × rewards with a judge: verdicts are asked for again and again. See judge/ungraded.",
    ),
    Metric(
        "judge/cached",
        "replies",
        "Replies that were kept from before, so that nobody was asked.",
        "Near judge/calls from the start: attempts repeat one another. See dead_groups.",
    ),
    Metric(
        "judge/ungraded",
        "verdicts",
        "Replies without a verdict in the form asked for; their episodes fail.",
        "Above a few of 100: the judge is too weak for the form, or `judge.max_tokens` cuts its replies off.",
    ),
    Metric(
        "league/return/<learner>",
        "reward",
        "Mean return of a learner (`self`, `exploiter`) in the step's games against members of the league.",
        "Stays far below 0: the pool is too strong to learn from. Set `league.population: pfsp` with `weight: even`, or a larger share of self-play.",
    ),
    Metric(
        "league/points/<member>",
        "share",
        "Share of points that the learner wins against a member, a draw being half; earlier games count less (`league.forget`).",
        "Near 1 for all: nobody teaches it anything. Let members enter sooner. Falls against old members: it forgets; draw them more often.",
    ),
    Metric(
        "league/members",
        "members",
        "Members of the pool, those that are always there included.",
        "Stays at its first value with `league.enter.beats`: the learner does not beat the pool.",
    ),
    Metric(
        "league/effective_members",
        "members",
        "exp(entropy) of how likely members are drawn: so many members drawn alike would be as hard to foresee.",
        "1: one opponent only. The learner overfits to it.",
    ),
    Metric(
        "league/invalid",
        "share",
        "Share of the learners' turns that named no legal move, where the environment counts them (`info.invalid`).",
        "Rises: play falls apart. Lower `optimizer.lr`, or add a KL term.",
    ),
    Metric(
        "league/parity",
        "nats",
        "Largest difference of trainer's and sampler's log-prob of a token that a member of the pool said; up to 16 turns of each are compared.",
        "As parity/max: the run stops. The sampler plays a member with other weights than it entered with.",
    ),
    Metric(
        "league/rating",
        "Elo",
        "Rating of the member that enters, above the first member that games link it to (Bradley and Terry's model); 400 points are odds of ten to one.",
        "Does not rise from entry to entry: play changes without growing stronger, or goes in circles. Look at league/points.",
    ),
    Metric("league/rating_low", "Elo", "Lower end of its 95 % interval.", "As league/rating."),
    Metric("league/rating_high", "Elo", "Upper end of its 95 % interval.", "As league/rating."),
    Metric(
        "league/diversity",
        "reward",
        "Effective diversity of the pool (1901.08106): how much the members of its Nash average beat one another; with `psro` and one set of weights.",
        "0: one member beats all others, so that there is nothing to mix.",
    ),
    Metric(
        "league/nash_conv",
        "reward",
        "NashConv of the newest past self, computed exactly when it enters: what all players together could gain by best responses.",
        "Does not fall while league/nash_conv_mixture does: play goes in circles around an equilibrium. Play the mixture.",
    ),
    Metric(
        "league/nash_conv_mixture",
        "reward",
        "The same of the mixture of past selves, which draws one of them for a whole game: all alike, or by the meta-strategy of `psro`.",
        "Does not fall: the learner is no best response to the pool. Let more steps pass between entries.",
    ),
    Metric(
        "league/legal",
        "share",
        "Least probability, over information states, with which the newest past self writes a legal move.",
        "Falls: play falls apart. Lower `optimizer.lr`.",
    ),
    Metric(
        "samples/<agent>",
        "turns",
        "Turns of the agent that the update learns from: those of a trained policy, including branches, in episodes "
        "that did not fail, whose credit has a weight above 0.",
        "Far from another agent's: one moves much more often, and with shared weights dominates the gradient.",
    ),
    Metric(
        "demonstrated_<metric>",
        "reward",
        "success, reward, reward_max and return of the demonstrations that a step learned from: how good the data "
        "are, not how good the team is.",
        "demonstrated_success below 1: the data teach wrong answers.",
    ),
    Metric(
        "staleness",
        "steps",
        "How many steps older the sampling weights are than those being trained; with `training.max_staleness` only.",
        "Rises together with clip_share and drift: samples are too old for this learning rate.",
    ),
    Metric(
        "tasks_left",
        "tasks",
        "Training tasks that `tasks.difficulty` leaves; with that setting only.",
        "Few: the same tasks come again and again; widen `low` and `high`.",
    ),
    Metric(
        "tasks_solve_rate",
        "share",
        "How often the first weights solved those tasks, as it was measured before the first step.",
        "Near 0 or 1: groups have no variance to learn from.",
    ),
    Metric(
        "replay_groups",
        "groups",
        "Past groups that the step learned from beside its own (`tasks.replay`).",
        "0 for long: no group has both success and failure.",
    ),
    Metric(
        "replay_age",
        "steps",
        "How many steps ago those groups were played; other metrics of episodes leave them out.",
        "Rises together with replay_log_ratio: set `tasks.replay.max_age`.",
    ),
    Metric(
        "replay_log_ratio",
        "nats",
        "Mean of |log π(token) − log π_then(token)| over their tokens, before the update.",
        "Above the clip range's logarithm most of their tokens teach nothing: they are too old.",
    ),
    Metric(
        "time/tokens_per_second",
        "tokens per second",
        "Tokens sampled in a step, over the time of the whole step.",
        "Falls while length does not: look which activity takes longer.",
    ),
    Metric(
        "time/<activity>",
        "seconds",
        "Time of the step by activity, each moment counted once: generate, environment, grade, score, update, publish, "
        "idle; they sum to time/step. Waiting while tokens are sampled counts as generate.",
        "environment or grade near generate: the step waits for the world or its grader.",
    ),
)
"""What the loop adds to `METRICS`, which are computed from a step's episodes alone."""


def describe(name: str) -> Metric | None:
    """Return the description of a metric by its full name (`reward/actor`), None for a name not listed here."""
    for metric in (*METRICS, *STEP_METRICS):
        pattern = re.sub(r"<\w+>", ".+", re.escape(metric.pattern).replace(r"\<", "<").replace(r"\>", ">"))
        if re.fullmatch(pattern, name):
            return metric
    return None


def misspelt(name: str) -> str:
    """Return ` Did you mean 'success'?` for a name that begins like none listed here and nearly like one; else nothing."""
    kind, _, rest = name.partition("/")
    kinds = {metric.pattern.partition("/")[0] for metric in (*METRICS, *STEP_METRICS)}
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
    learners = _names((turn.agent for turn in episode.turns if turn.trained) for episode in group.valid)
    seats = learners or _names(episode.agents for episode in group.valid)
    earned = [returns(episode) for episode in group.valid]
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


def none_scored(row: Mapping[str, float]) -> bool:
    """Return whether a row is of episodes that nothing scored, so that its rewards are not known."""
    return UNSCORED in row and row[UNSCORED] == row["samples"] * (1.0 - row.get("failed_episodes", 0.0))


PAID_BY = "reward/"
"""Prefix of what each reward function or judge returned, in an episode's `info`; None where it had nothing to say."""
FAILED = "failed"
"""What stands there in an episode that failed because this reward raised or gave no verdict."""
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
