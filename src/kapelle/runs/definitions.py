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
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
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

METRICS: tuple[Metric, ...] = (
    Metric(
        "reward/<agent>",
        "reward",
        "Mean terminal reward of the agent, over the episodes that gave it one.",
        "Flat from the start: every attempt earns the same. See dead_groups.",
        known_as="mean reward",
    ),
    Metric(
        "reward_max/<agent>",
        "reward",
        "Mean over groups of the best terminal reward among a task's attempts.",
        "Equal to reward/<agent>: all attempts earn the same, and RL has nothing to reinforce.",
        known_as="best of n reward",
    ),
    Metric(
        "paid/<reward>",
        "reward",
        "Mean of what one reward of `rewarded` returned, before its weight: a function, a ranking, a rubric (`paid/rubric`) or its criterion (`paid/rubric/clear`).",
        "One rises and the others fall: it is cheaper to please. One stays where it is: it tells no answers apart.",
        known_as="reward by function (TRL `rewards/NAME/mean`)",
    ),
    Metric(
        "paid_std/<reward>",
        "reward",
        "Standard deviation of the same over the step's episodes, before its weight; of a population.",
        "0: it returns the same for every answer and teaches nothing. Many times that of another: times its weight, it decides alone.",
        known_as="reward spread by function (TRL `rewards/NAME/std`)",
    ),
    Metric(
        "paid_none/<reward>",
        "share",
        "Share of the episodes it was asked about for which it returned None, which pays nothing; absent where there are none.",
        "Near 1: hardly an answer is paid. Look at what the function needs to find in a text.",
        known_as="answers without a reward",
    ),
    Metric(
        "paid_failed/<reward>",
        "share",
        "Share of the step's episodes that failed because this function raised, or a judge gave no verdict; absent where there are none.",
        "Above 0: read `error` in the episodes' file, which names the line of the function.",
        known_as="reward function errors",
    ),
    Metric(
        "judge/disagreement",
        "share",
        "Mean difference between an attempt's scores when a ranking is shown the attempts in opposite orders, in [0, 1].",
        "Above 0.2: the judge goes by places more than by texts. Take a better one, or a rubric.",
        known_as="position bias",
    ),
    Metric(
        "return/<part>/<agent>",
        "reward",
        "return/<agent> over the episodes of one part of a mixture of environments.",
        "One part's spread is ten times another's: without a baseline per part it dominates the updates.",
        known_as="episodic return by environment",
    ),
    Metric(
        "return/<agent>",
        "reward",
        "Mean undiscounted return of an episode that the agent is trained on: terminal and turn rewards, "
        "after the algorithm has shared the team's reward.",
        "Falls while success rises: turn rewards pay for something other than the task.",
        known_as="episodic return",
    ),
    Metric(
        "length/<agent>",
        "tokens",
        "Mean tokens of a completion.",
        "Grows steadily without reward: padding is rewarded. Falls towards 1: the agent has gone silent.",
        known_as="completion length (verl `response_length/mean`)",
    ),
    Metric(
        "turns/<agent>",
        "turns",
        "Mean turns of the agent in an episode.",
        "0: the workflow gives this agent no turn, so it cannot learn.",
        known_as="turns per episode",
    ),
    Metric(
        "finish_length/<agent>",
        "share",
        "Share of completions that were cut off at the limit of tokens.",
        "Above 0.1: answers are lost at the end. Raise sampling.max_tokens.",
        known_as="clipped completions (TRL `completions/clipped_ratio`)",
    ),
    Metric(
        "tokens/<policy>",
        "tokens",
        "Tokens that the policy sampled in the step, failed episodes included, and those of continuations.",
        "0: nothing was sampled for this policy.",
        known_as="generated tokens",
    ),
    Metric(
        "tokens_continued/<policy>",
        "tokens",
        "Those of them that were sampled to continue from the candidates of a tree; nothing is trained on them.",
        "Most of tokens/<policy>: long episodes. Every turn but the last is continued to the end of the episode.",
        known_as="continuation tokens",
    ),
    Metric(
        "dead_moments",
        "share",
        "Share of a tree's sets of candidates for one prompt in which all are worth the same: they teach nothing.",
        "Near 1 for a long time: the team solves nothing or everything, or `continuations` is too small to tell.",
        known_as="zero-variance sibling sets",
    ),
    Metric(
        "success",
        "share",
        "Mean score of the team in [0, 1] over the `scored` episodes, where the environment has one.",
        "Rises on train tasks and not in evaluation: the tasks are being memorised.",
        known_as="accuracy, mean score",
    ),
    Metric(
        "compacted/<agent>",
        "share",
        "Share of the agent's turns before which messages were dropped from its conversation; absent where there are none.",
        "Near 1: almost every turn reads a shortened conversation. Take a longer context, or keep fewer messages.",
        known_as="context compaction",
    ),
    Metric(
        "scored",
        "episodes",
        "Episodes that `success` is the mean of: those without an error that have a score.",
        "Less than samples: the rest failed or could not be scored. `success` does not include them.",
        known_as="scored episodes",
    ),
    Metric(
        "unscored",
        "episodes",
        "Episodes that nothing scored or paid, as the environment says in `info.unscored`; absent where there are none.",
        "Above 0: a reward function returned None. Nothing is learned from such an episode.",
        known_as="unscored episodes",
    ),
    Metric(
        "scored/<part>",
        "episodes",
        "The same among the tasks of one part of a mixture of environments.",
        "Few: the success of this part is very uncertain.",
        known_as="scored episodes by environment",
    ),
    Metric(
        "success/<part>",
        "share",
        "The same over the tasks of one part of a mixture of environments.",
        "Falls while another part's rises: the parts compete. Change their weights.",
        known_as="accuracy by environment",
    ),
    Metric(
        "truncated",
        "share",
        "Share of episodes that a limit of turns or tokens ended, not the task.",
        "Above 0.1: the limits are too tight for this task.",
        known_as="truncated episodes (Gymnasium `truncated`)",
    ),
    Metric(
        "info/<name>/<agent>",
        "the environment's",
        "The same for a mapping of agents to numbers: the mean of each agent's.",
        "As info/<name>.",
        known_as="environment metric by agent",
    ),
    Metric(
        "info/<name>",
        "the environment's",
        "Mean of a number that the environment reports in `Outcome.info`, over the episodes without an error that report it.",
        "Absent: no episode reported a finite number under this name, or a step had more than 32 names before it.",
        known_as="environment metric",
    ),
    Metric(
        "dead_groups",
        "share",
        "Share of the groups of two or more in which no trained agent's return varies: without a "
        "critic they teach nothing.",
        "Near 1: the tasks are too easy or too hard, or the temperature is too low.",
        known_as="groups without reward variance (TRL `frac_reward_zero_std`)",
    ),
    Metric(
        "failed_episodes",
        "share",
        "Share of episodes that ended in an error.",
        "Above 0: read `error` in the episodes' file.",
        known_as="rollout errors",
    ),
    Metric(
        "samples",
        "episodes",
        "Episodes played in the step, failed ones included.",
        "Differs from tasks × group size: the environment ran out of tasks.",
        known_as="batch size in episodes",
    ),
)


STEP_METRICS: tuple[Metric, ...] = (
    Metric(
        "judge/calls",
        "replies",
        "Replies that judges were asked for in the step, by this process; kept ones are not among them.",
        "More than attempts × rewards with a judge: verdicts are asked for again and again. See judge/ungraded.",
        known_as="LLM judge requests",
    ),
    Metric(
        "judge/cached",
        "replies",
        "Replies that were kept from before, so that nobody was asked.",
        "Near judge/calls from the start: attempts repeat one another. See dead_groups.",
        known_as="LLM judge cache hits",
    ),
    Metric(
        "judge/ungraded",
        "verdicts",
        "Replies without a verdict in the form asked for; their episodes fail.",
        "Above a few of 100: the judge is too weak for the form, or `judge.max_tokens` cuts its replies off.",
        known_as="unparsable verdicts",
    ),
    Metric(
        "samples/<agent>",
        "turns",
        "Turns of the agent that the update learns from: those of a trained policy, including branches, in episodes "
        "that did not fail, whose credit has a weight above 0.",
        "Far from another agent's: one moves much more often, and with shared weights dominates the gradient.",
        known_as="training samples",
    ),
    Metric(
        "demonstrated_<metric>",
        "reward",
        "success, reward, reward_max and return of the demonstrations that a step learned from: how good the data "
        "are, not how good the team is.",
        "demonstrated_success below 1: the data teach wrong answers.",
        known_as="quality of the data set",
    ),
    Metric(
        "staleness",
        "steps",
        "How many steps older the sampling weights are than those being trained; with `training.max_staleness` only.",
        "Rises together with clip_share and drift: samples are too old for this learning rate.",
        known_as="off-policyness, in versions",
    ),
    Metric(
        "tasks_left",
        "tasks",
        "Training tasks that `tasks.difficulty` leaves; with that setting only.",
        "Few: the same tasks come again and again; widen `low` and `high`.",
        known_as="tasks after filtering",
    ),
    Metric(
        "tasks_solve_rate",
        "share",
        "How often the first weights solved those tasks, as it was measured before the first step.",
        "Near 0 or 1: groups have no variance to learn from.",
        known_as="pass rate before training",
    ),
    Metric(
        "time/tokens_per_second",
        "tokens per second",
        "Tokens sampled in a step, over the time of the whole step.",
        "Falls while length does not: look which activity takes longer.",
        known_as="throughput (verl `perf/throughput`)",
    ),
    Metric(
        "time/<activity>",
        "seconds",
        "Time of the step by activity, each moment counted once: generate, environment, grade, score, update, publish, "
        "idle; they sum to time/step. Waiting while tokens are sampled counts as generate.",
        "environment or grade near generate: the step waits for the world or its grader.",
        known_as="step time (verl `timing_s/…`)",
    ),
)
"""What the loop adds to `METRICS`, which are computed from a step's episodes alone."""

UPDATE_METRICS: tuple[Metric, ...] = (
    Metric("advantage/<agent>", "reward", "Mean advantage per token of the agent.", "Far from 0 with a baseline per agent: one agent's turns are compared with another's.", known_as="mean advantage"),
    Metric("advantage_std/<agent>", "reward", "Standard deviation of the agent's advantages over tokens.", "0: no gradient but from penalties. Near 0 for one agent only: its turns do not affect the return.", known_as="advantage spread"),
    Metric("parity/max", "nats", "Largest difference of trainer's and sampler's log-prob of a token before the update.", "Above 1e-4 in float32: the run stops, unless float64 shows that rounding explains it.", known_as="rollout and trainer log-prob difference (TRL `sampling/sampling_logp_difference/max`)"),
    Metric("parity/mean", "nats", "Mean difference of trainer's and sampler's log-prob of a token before the update.", "Above 0.03 in half precision: the run stops.", known_as="mean rollout and trainer log-prob difference"),
    Metric("parity/rounded", "tokens", "Tokens above the bound of parity which rounding explains; only in such a step.", "In many steps of float32: the weights have grown. Lower `optimizer.lr`.", known_as="log-prob rounding outliers"),
    Metric("grad_norm/<learner>", "norm", "L2 norm of the gradient before clipping, mean over optimiser steps.", "Spikes of ten times the usual: lower `optimizer.lr` or `optimizer.max_grad_norm`. 0: nothing is learned, see dead_groups.", known_as="gradient norm"),
    Metric("lr/<learner>", "rate", "Learning rate of the step's last optimiser step.", "0 before the end: the schedule is shorter than the run.", known_as="learning rate"),
    Metric("skipped/<learner>", "share", "Share of optimiser steps that were left out because a gradient was not finite.", "Above 0 outside of fp16: losses are not finite.", known_as="skipped steps (loss scaling)"),
    Metric("undone/<learner>", "share", "Share of optimiser steps that broke weights or moments and were undone; only in such a step.", "Above 0: lower `optimizer.lr`.", known_as="rolled back optimiser steps"),
    Metric("mixer_undone", "share", "1 where the mixer's fit broke its weights and was undone; only in such a step.", "Above 0: lower `algorithm.fit.lr`.", known_as="rolled back mixer fit"),
    Metric("loss/<learner>", "loss", "The minimised mean; of a policy its level means nothing: at the first pass it is minus the mean advantage.", "Not finite: lower `optimizer.lr`.", known_as="policy or value loss"),
    Metric("clip_share/<policy>", "share", "Share of tokens whose gradient clipping has cut; with `sapo` the part of it that the gate takes.", "0 with several `epochs`: steps are tiny. Above 0.3: most of the data is thrown away; fewer epochs or a lower rate.", known_as="clip fraction (verl `actor/pg_clipfrac`)"),
    Metric("drift/<policy>", "nats per token", "KL (k3) of the updated from the sampling policy over the step's passes.", "Above about 0.05: the surrogate no longer describes the policy; fewer `epochs`, a lower rate.", known_as="approximate KL (verl `actor/ppo_kl`)"),
    Metric("entropy/<policy>", "nats per token", "Entropy of the distribution that tokens were sampled from.", "Falls to 0 early: exploration has ended; raise `loss.entropy_coefficient`. Jumps up: the rate destroyed the weights.", known_as="policy entropy"),
    Metric("ratio_tail/<policy>", "share", "Share of tokens that the update's weights make more than twice, or less than half, as likely as the sampler did.", "Above 0.01 in the first pass over fresh samples: sampler and trainer disagree.", known_as="importance ratio outliers"),
    Metric("effective_samples/<policy>", "share", "(Σρ)² / (n·Σρ²) over the update's tokens: the share of them that the ratios leave.", "Below 0.5: few tokens carry the gradient; lower `max_staleness` or `epochs`.", known_as="effective sample size"),
    Metric("masked_share/<policy>", "share", "Share of tokens that `loss.importance_range` leaves out.", "Above 0.05: sampler and trainer disagree on more than outliers.", known_as="masked importance sampling"),
    Metric("sequence_masked_share/<policy>", "share", "Share of tokens that `loss.sequence_mask` leaves out.", "Above 0.1: much of what should become less likely is no longer learned from.", known_as="off-policy sequence masking"),
    Metric("kl/<policy>", "nats per token", "KL to the reference policy, with `loss.kl_coefficient`.", "Grows without end: raise the coefficient, or set `reference_every`.", known_as="KL to the reference (TRL `kl`)"),
    Metric("importance/<policy>", "weight", "Mean truncated trainer/sampler weight, with `loss.importance_cap`.", "Far from 1: sampler and trainer disagree.", known_as="truncated importance sampling weight"),
    Metric("teacher_kl/<policy>", "nats per token", "Mean of log π − log T over the policy's tokens: how far it is from its teacher.", "Does not fall: raise `optimizer.lr` or `algorithm.group_size`.", known_as="reverse KL to the teacher"),
    Metric("explained_variance/<critic>", "share", "1 − Var(return − value) / Var(return), before the critic learns from the step.", "Stays at 0: it knows no more than a mean. Below 0: worse than none; lower `optimizer.critic_lr`.", known_as="explained variance (verl `critic/vf_explained_var`)"),
    Metric("value_error/<critic>", "reward", "Mean absolute error of the critic over the update's passes.", "Does not fall below the spread of returns: raise `optimizer.critic_lr`.", known_as="critic's mean absolute error"),
    Metric("baseline/<agent>", "reward", "Baseline that the agent's returns are compared with: a mean of earlier ones.", "Far from return/<agent>: the baseline is too slow.", known_as="moving average baseline"),
    Metric("happo_factor", "ratio", "Mean of M/Â after the step: what earlier agents' updates leave of an advantage.", "Below 0.5 or above 2: agents move so far that later ones learn from ratios; lower the rate or `epochs`.", known_as="HAPPO's compound policy ratio"),
    Metric("happo_factor_spread", "ratio", "Standard deviation of M/Â after the step.", "Above 1: single turns dominate the update; clip tighter.", known_as="spread of HAPPO's compound ratio"),
    Metric("credit_share/<agent>", "share", "The agent's share of Σ|advantage| of the step.", "At 0 for long: its turns do not matter, or its embedding hides why they do.", known_as="credit assignment by agent"),
    Metric("credit_weight", "share", "How much of the mixer's foresight credit uses: its R² over the steps before.", "0 for long: the team's return is paid, as `grpo` does for less.", known_as="mixer confidence"),
    Metric("mixer_loss", "reward²", "Mean squared error of the step's fits of utilities and mixer.", "Stays near the variance of returns: nothing is learned; more `updates`, a larger `utility.hidden`.", known_as="TD loss of the mixing network"),
    Metric("mixer_explained", "share", "R² of this step's returns, within tasks, by utilities and mixer before they are fitted on them.", "Near or below 0: the fit fails on new text.", known_as="mixer R²"),
    Metric("q_total", "reward", "Mean Q_tot of the step.", "Leaves the range of returns: the fit diverges; lower `fit.lr`, or leave `td`.", known_as="joint action value Q_tot"),
    Metric("replay_fill", "share", "Share of the replay memory's capacity in use.", "Below `min_fill` of the capacity the team's return is paid.", known_as="replay buffer fill"),
    Metric("nll/<policy>", "nats per token", "Mean −log π of a written token.", "Rises: `optimizer.lr` is too high.", known_as="cross-entropy loss"),
    Metric("nll_heard/<policy>", "nats per token", "The same of observed tokens, with `world_model`.", "Stays where it began: the next observation is unpredictable; lower `world_model`.", known_as="world model loss"),
    Metric("preference_accuracy/<policy>", "share", "Share of pairs whose chosen answer is ranked above the rejected one.", "1 at once: the pairs differ only in form.", known_as="reward accuracy (TRL `rewards/accuracies`)"),
    Metric("preference_margin/<policy>", "nats", "Mean of βΔ, the implicit reward of the chosen less that of the rejected answer (`ipo`: of Δ).", "Grows without end with `dpo`: add `label_smoothing`, or take `ipo`.", known_as="reward margin (TRL `rewards/margins`)"),
    Metric("chosen_logp/<policy>", "nats", "Mean log-prob of the chosen answers.", "Falls together with rejected_logp: both become unlikely; add an NLL term or lower the rate.", known_as="chosen log-probs (TRL `logps/chosen`)"),
    Metric("rejected_logp/<policy>", "nats", "Mean log-prob of the rejected answers.", "Rises with chosen_logp: pairs share most of their text.", known_as="rejected log-probs (TRL `logps/rejected`)"),
    Metric("verifier_score/<agent>", "score", "Mean of the verifier's score over the agent's turns.", "Rises while return/<agent> falls: the verifier is being fooled; raise `loss.kl_coefficient`.", known_as="reward model score"),
    Metric("verifier_auc", "share", "Chance that a right answer scores above a wrong one, before learning from them.", "Stays at or sinks towards 0.5: it cannot tell them apart.", known_as="ROC AUC of the reward model"),
    Metric("verifier_accuracy/<learner>", "share", "Weighed share of answers judged rightly while learning.", "Far above verifier_auc: overfitting.", known_as="reward model accuracy"),
    Metric("verifier_right_share", "share", "Share of right answers among those that a verifier learns from.", "Near 0 or 1: few answers count; other questions or another temperature.", known_as="class balance"),
    Metric("custom/<name>", "yours", "A number of your own function `metrics`.", "Absent: the function raised, or returned no finite number.", known_as="custom metric"),
)  # fmt: skip
"""What updates, algorithms and functions of your own add."""

MACHINE_METRICS: tuple[Metric, ...] = (
    Metric("cpu", "cores", "Processor cores that the run and its children kept busy, mean since the row before.", "Far below the number of cores while time/environment is long: the world waits for something else.", known_as="CPU utilisation"),
    Metric("load", "processes", "Processes of the whole machine that ran or waited to run, over the last minute.", "Above the number of cores: other programs slow this run.", known_as="load average"),
    Metric("memory", "bytes", "Memory of the training process.", "Grows from step to step: something is kept; a machine that runs out kills the run.", known_as="resident set size"),
    Metric("machine_memory", "bytes", "Memory of the whole machine in use.", "Near all of it: the machine will kill a process.", known_as="used system memory"),
    Metric("gpus used/<device>", "bytes", "Memory in use on each GPU, by all programs.", "Near all of it: lower `training.microbatch_tokens` or `engine.max_rows`.", known_as="GPU memory in use"),
    Metric("gpus held/<device>", "bytes", "Most memory that the run's tensors took on each GPU.", "Far below the memory in use: another program or the sampler has the rest.", known_as="peak allocated GPU memory"),
)  # fmt: skip
"""What `system.jsonl` holds of the machine, device by device where there are several."""


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
