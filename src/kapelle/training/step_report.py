"""Report a training step: why it had no learning signal, metrics of credit, distributions, and traces of a few episodes.

This module does not affect training. Shapes: T completion tokens of one turn, K tokens of one agent or critic in a step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from kapelle.algorithm import Algorithm, Credit
from kapelle.engines.train.protocol import Examines, TrainEngine
from kapelle.errors import TrainingHalted
from kapelle.functional.distributions import Histogram, histogram
from kapelle.functional.value_losses import explained_variance
from kapelle.rows import Column, Sample, TurnKey
from kapelle.runs.definitions import UNSCORED, acted, none_scored, own_returns, rewarded_counts
from kapelle.runs.episode_json import Trace, TracedTurn
from kapelle.runs.summary import judged
from kapelle.runs.verdict import YOUNG
from kapelle.types import Group, Turn


@dataclass(frozen=True, slots=True)
class Step:
    """A finished training step."""

    number: int
    """The number of the step, starting from 1. The number of the step is also the number of steps for which the weights have
    been trained."""
    groups: tuple[Group, ...]
    metrics: Mapping[str, float]
    traces: tuple[Trace, ...] = ()
    """The credit of the tokens of a few episodes (`record.credit_episodes`)."""
    idle: str = ""
    """The reason why the step had no learning signal. The string is empty if there was a learning signal."""
    distributions: Mapping[str, Histogram] = field(default_factory=dict)
    """The distributions of rewards, advantages, lengths and token statistics, by kind and agent or policy."""


# -------- Steps without a learning signal

LONG = 10
"""The number of consecutive steps without a learning signal after which a warning is reported. If no episode was scored in
these steps, the run ends."""
NOT_SCORED = "no episode was scored"
WHERE = "docs/howto/reward_does_not_move.md"


def why_idle(algorithm: Algorithm, metrics: Mapping[str, float], *, updated: bool, judged: bool) -> str:
    """Return the reason why a step had no learning signal, or an empty string if it had one.

    The argument `updated` states whether any turn had credit, and `judged` states whether turns have rewards in addition to
    those of the environment. A critic learns even if all rewards are equal, but not if there are no rewards.
    """
    advantages = [
        value for name, value in metrics.items() if name.startswith(("advantage/", "advantage_std/"))
    ]
    flat = algorithm.critic is None and bool(advantages) and not any(advantages)
    unscored = none_scored(metrics) and not judged and not algorithm.judges
    if updated and not flat and not unscored:
        return ""
    if metrics.get("failed_episodes") == 1.0:
        return "every episode failed"
    if unscored:
        return NOT_SCORED
    if not updated:
        return algorithm.lacks
    no_variance = metrics.get("dead_groups") == 1.0
    return "all episodes of each task have the same return" if no_variance else "every advantage is 0"


CUT = 0.05
"""The share of truncated completions among an agent's constrained completions above which they are reported."""


class IdleSteps:
    """Count steps without a learning signal, failed episodes, truncated completions, and missing scores of reward functions.

    Each line is reported once.
    """

    def __init__(
        self, say: Callable[[str], None], settings: Mapping[str, Any], show: Callable[[str], None]
    ) -> None:
        """Set the settings of the run and the reporting functions.

        Lines about failed episodes are passed to `show`, and all other lines to `say`.
        """
        self._report, self._show = say, show
        self._settings = settings
        self._first: list[dict[str, float]] = []
        """The metrics of the first `YOUNG` steps."""
        self._cut: set[str] = set()
        """The agents whose completions have been reported as truncated."""
        self._row = 0
        self._unscored = 0
        self._named: set[str] = set()
        self._failed = False

    def note(self, step: Step) -> None:
        """Count a step. Raises TrainingHalted if no episode was scored in `LONG` consecutive steps."""
        for name, (scored, requested) in rewarded_counts(step.groups).items():
            if scored < requested and name not in self._named:
                self._named.add(name)
                self._report(
                    f"the reward function `{name}` scored {scored} of {requested} episodes of step {step.number}, and returned None for the others"
                )
        self._note_failed(step)
        self._note_cut(step)
        self._row = self._row + 1 if step.idle else 0
        self._unscored = self._unscored + 1 if step.idle == NOT_SCORED else 0
        if self._unscored == LONG:
            reasons = [
                str(e.info[UNSCORED]) for group in step.groups for e in group.valid if UNSCORED in e.info
            ]
            raise TrainingHalted(
                f"No episode of the last {LONG} steps was scored, so nothing is learned: {max(reasons, key=reasons.count)}. Return a "
                "number for every answer, 0.0 for an incorrect one."
            )
        if self._row == LONG:
            self._report(f"{LONG} consecutive steps had nothing to learn from: {step.idle}. See {WHERE}")
        if len(self._first) < YOUNG:
            self._first.append({"step": float(step.number), **step.metrics})
            health = judged(self._first, self._settings)
            if health.word == "starved":
                for line in health.lines():
                    self._report(line)
                self._row = LONG  # these idle steps have been reported

    def _note_failed(self, step: Step) -> None:
        """Report the first step with failed episodes, and their most frequent error."""
        episodes = [episode for group in step.groups for episode in group.episodes]
        errors = Counter(each.error for each in episodes if each.error is not None)
        if errors and not self._failed:
            self._failed = True
            reason, times = errors.most_common(1)[0]
            self._show(
                f"{errors.total()} of {len(episodes)} episodes of step {step.number} failed. The most frequent reason ({times} times): {reason}"
            )

    def _note_cut(self, step: Step) -> None:
        """Report agents whose constrained completions are truncated at `max_tokens`. Each agent is reported once."""
        turns = [turn for group in step.groups for episode in group.episodes for turn in episode.turns]
        for agent in sorted({turn.agent for turn in turns if turn.trained and turn.constraint} - self._cut):
            own = [turn for turn in turns if turn.agent == agent and turn.constraint]
            cut = [turn for turn in own if turn.finish_reason == "length"]
            if len(cut) > CUT * len(own):
                self._cut.add(agent)
                self._report(
                    f"{len(cut)} of {len(own)} constrained completions of agent '{agent}' in step {step.number} were cut off after "
                    f"{max(len(turn.completion_ids) for turn in cut)} tokens. Set a higher `sampling.max_tokens` for this agent."
                )


# -------- Metrics of credit and critics


def credit_metrics(
    turns: Sequence[tuple[TurnKey, Turn]], credit: Mapping[TurnKey, Credit], advantages: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return, for each agent, the number of turns that were trained on, and the mean and standard deviation of the advantages."""
    row: dict[str, float] = {}
    for key, turn in turns:
        row[f"samples/{turn.agent}"] = row.get(f"samples/{turn.agent}", 0.0) + float(credit[key].weight > 0)
    for agent, all_K in advantages.items():
        row[f"advantage/{agent}"] = float(all_K.mean())
        row[f"advantage_std/{agent}"] = float(all_K.std()) if all_K.numel() > 1 else 0.0
    return row


def advantages_of(
    turns: Sequence[tuple[TurnKey, Turn]], credit: Mapping[TurnKey, Credit]
) -> dict[str, Tensor]:
    """Return the advantages of all trained tokens, as one tensor [K] for each agent."""
    by_agent: defaultdict[str, list[Tensor]] = defaultdict(list)
    for key, turn in turns:
        by_agent[turn.agent].append(credit[key].advantage_T)
    return {agent: torch.cat(pieces).double() for agent, pieces in by_agent.items()}


def critic_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the share of the variance of returns that each critic explains before the update."""
    row: dict[str, float] = {}
    for critic in dict.fromkeys(sample.learner for sample in samples):
        own = [sample for sample in samples if sample.learner == critic]
        value_K, return_K = (
            torch.cat([s.columns[column] for s in own]) for column in (Column.VALUE, Column.RETURN)
        )
        if len(return_K) > 1:
            row[f"explained_variance/{critic}"] = float(
                explained_variance(value_K, return_K, torch.ones_like(return_K))
            )
    return row


# -------- Distributions


def episode_distributions(groups: Sequence[Group]) -> dict[str, Histogram]:
    """Return histograms of the returns of each rewarded agent, the completion lengths, and the surprisal of each policy.

    If an environment rewards only some agents, the other agents have no histogram of returns, even if the algorithm shares
    the rewards.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    likely: defaultdict[str, list[float]] = defaultdict(list)
    valid = [episode for group in groups for episode in group.valid]
    for agent in dict.fromkeys(agent for episode in valid for agent in episode.agents):
        own = acted(agent, valid)
        if any(agent in e.rewards or any(turn.reward for turn in e.by(agent)) for e in own):
            found[f"reward/{agent}"] = [episode.total(agent) for episode in own]
    for episode in valid:
        for turn in episode.turns:
            found[f"length/{turn.agent}"].append(len(turn.completion_ids))
            likely[turn.policy].extend(turn.logprobs)
    unlikely = {f"surprisal/{policy}": np.negative(logps) for policy, logps in likely.items()}
    return _histograms(found) | _histograms(unlikely)


def credit_distributions(advantages: Mapping[str, Tensor]) -> dict[str, Histogram]:
    """Return a histogram of the advantages of each agent over tokens."""
    return _histograms({f"advantage/{agent}": all_K.tolist() for agent, all_K in advantages.items()})


def traced_distributions(groups: Sequence[Group], traces: Sequence[Trace]) -> dict[str, Histogram]:
    """Return histograms of the entropies and the log-ratios of the tokens in traced episodes, by policy."""
    episodes = [episode for group in groups for episode in group.episodes]
    found: defaultdict[str, list[float]] = defaultdict(list)
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for trace in traces:
        episode = episodes[trace.line]
        policies = {turn.index: turn.policy for turn in (*episode.turns, *episode.branches)}
        for turn in trace.turns:
            policy = policies[turn.index]
            found[f"entropy/{policy}"].extend(turn.entropy)
            ratios[policy].extend(turn.ratio)
    with np.errstate(divide="ignore", invalid="ignore"):  # histograms exclude values that are not finite
        logs = {f"log_ratio/{policy}": np.log(every) for policy, every in ratios.items()}
    return _histograms(found) | _histograms(logs)


def _histograms(found: Mapping[str, ArrayLike]) -> dict[str, Histogram]:
    made = {
        name: histogram(values, 0) if name.startswith("length/") else histogram(values)
        for name, values in found.items()
    }
    return {name: each for name, each in made.items() if each is not None}


# -------- Credit of each token of a few episodes, for the viewer


def traces(
    groups: Sequence[Group],
    turns: Sequence[tuple[TurnKey, Turn]],
    credit: Mapping[TurnKey, Credit],
    samples: Mapping[TurnKey, Sample],
    engine: TrainEngine,
    most: int,
    known: dict[str, dict[int, str]],
) -> tuple[Trace, ...]:
    """Return the traces of up to `most` episodes after the update of a step. `turns` contains the trained turns of the step.

    The argument `known` caches the text of tokens by policy and token id. The engine evaluates the tokens with the updated
    weights.
    """
    kept = chosen(groups, most)
    traced = [(key, turn) for key, turn in turns if key in samples and key[:2] in kept]
    if not traced:
        return ()
    # For each policy, the sum of |weight × advantage| over the tokens of the step.
    pieces: dict[str, list[Tensor]] = {}
    for key, turn in turns:
        if key in credit:
            pieces.setdefault(turn.policy, []).append(credit[key].weight * credit[key].advantage_T)
    shares = {policy: float(torch.cat(own).abs().sum()) for policy, own in pieces.items()}
    examined = [samples[key] for key, _ in traced]
    if isinstance(engine, Examines):
        evaluated = engine.examine(examined)
    else:
        evaluated = [logp_T[:, None] for logp_T in engine.score(examined)]
    places = [(g, e) for g, group in enumerate(groups) for e in range(len(group.episodes))]
    lines = {place: line for line, place in enumerate(places)}
    found: dict[tuple[int, int], tuple[list[TracedTurn], dict[int, str]]] = {}
    for (key, turn), row_T2 in zip(traced, evaluated, strict=True):
        drawn, vocabulary = found.setdefault((key.group, key.episode), ([], {}))
        texts = _texts(turn, turn.prompt_ids, engine, known)
        vocabulary |= {token: texts[token] for token in turn.prompt_ids}
        given = credit[key]
        sample = samples[key]
        total = shares[turn.policy]
        advantage_T = torch.as_tensor(given.advantage_T).float().expand(len(turn.completion_ids))
        ratio_T = (row_T2[:, 0] - sample.columns[Column.BEHAVIOUR]).exp()
        drawn.append(
            TracedTurn(
                turn.index,
                [texts[token] for token in turn.completion_ids],
                advantage_T.tolist(),
                (given.weight * advantage_T / total if total else torch.zeros_like(advantage_T)).tolist(),
                ratio_T.tolist(),
                row_T2[:, 1].tolist() if row_T2.shape[1] > 1 else (),
            )
        )
    first = min(found, key=lines.__getitem__)
    # The viewer can then show the tokens of episodes without a trace, unless models with different tokens play together.
    sampled = {
        (token, _texts(turn, (), engine, known)[token]) for _, turn in turns for token in turn.completion_ids
    }
    if len(sampled) == len(dict(sampled)):
        found[first][1].update(sampled)
    return tuple(Trace(lines[place], *found[place]) for place in sorted(found, key=lines.__getitem__))


def _texts(
    turn: Turn, prompt: Sequence[int], engine: TrainEngine, known: dict[str, dict[int, str]]
) -> dict[int, str]:
    """Return the text of each token by token id, after adding the tokens of a prompt and of a turn's completion."""
    texts = known.setdefault(turn.policy, {})
    for token in {*prompt, *turn.completion_ids} - texts.keys():
        texts[token] = engine.renderer(turn.policy).decode((token,))
    return texts


def chosen(groups: Sequence[Group], most: int) -> set[tuple[int, int]]:
    """Return the positions (group, episode) of up to `most` episodes.

    The best and the worst episode of each group are selected, starting with the groups with the largest range of returns.
    """
    ranked: list[tuple[float, int, list[int]]] = []
    for g, group in enumerate(groups):
        total = {
            e: sum(own_returns(each).values()) for e, each in enumerate(group.episodes) if each.error is None
        }
        if total:
            order = sorted(total, key=lambda e: (-total[e], e))
            best, worst = order[0], order[-1]
            ranked.append((total[worst] - total[best], g, list(dict.fromkeys((best, worst)))))
    places = [(g, e) for _, g, ends in sorted(ranked) for e in ends]
    return set(places[:most])
