"""Evaluate a team: its success with a confidence interval, each agent's return, and baselines with the same number of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil, comb
from statistics import fmean, median
from typing import Any

from kapelle.environment import Answerable, Environment, has_comparable_answers, offers
from kapelle.functional.statistics import MeanScore, area_under_curve, missing_text, rate_of
from kapelle.rollout.episodes import rollout, shared_rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.rows import TurnKey, label_of, turns_of
from kapelle.runs.definitions import UNSCORED, acted, by_part, own_returns, reported_counts, rollout_metrics
from kapelle.runtime.randomness import derive_seed
from kapelle.settings.schema import EvaluationConfig
from kapelle.setup.problems import choose_tasks
from kapelle.team import Team
from kapelle.types import Episode, Group, Sampling, Split, Task, Turn, as_table
from kapelle.workflows.solo import Solo
from kapelle.workflows.vote import majority

Returns = Callable[[Episode], Mapping[str, float]]
"""Function that returns the return of each agent in an episode."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Statistics of the lengths of an agent's completions in tokens. For an endpoint, the server counts the tokens."""

    answers: int
    mean: float
    median: float
    p95: int
    """The 95th percentile of the length of completions."""
    longest: int
    cut: float
    """Share of completions that ended because they reached a token limit."""
    read: float
    """Mean length of the prompts in tokens."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of an evaluation on held-out problems. The function `print` shows the success rate."""

    problems: int
    """Number of problems, each of which has one episode or `samples` episodes."""
    success: float | None
    """Mean score of the team over the `scored` problems. If scores are 0 or 1, this is the share of solved problems (pass@1)."""
    interval: tuple[float, float] | None
    """The 95 % confidence interval of the success: the Wilson interval for shares, and Student's t interval for other scores."""
    reward: Mapping[str, float]
    """Mean undiscounted return of each agent over the scored episodes in which it acted. Agents that never acted are absent."""
    tokens: float
    """Mean number of completion tokens of the team per episode."""
    failed: int
    """Number of episodes that ended with an error. All means exclude these episodes."""
    scored: int = 0
    """Number of episodes with a team score."""
    reason: str = ""
    """The most frequent reason why episodes failed or were not scored."""
    parts: Mapping[str, MeanScore] = field(default_factory=dict)
    """Additional success rates by name: `seen` and `not seen` for every boolean value in `info`, `pass@4` if there are several episodes
    per problem (`at_k`), and `aime` and `aime pass@4` for a set in `evaluation.sets`."""
    part_reward: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Mapping from each part of a mixture to the mean undiscounted returns of the agents in this part."""
    info: Mapping[str, float] = field(default_factory=dict)
    """Mean of each number in `Outcome.info`. The key is `name/agent` if the value in `info` is a mapping from agents to numbers."""
    reward_functions: Mapping[str, float] = field(default_factory=dict)
    """Mean value of each reward function or judge of `rewarded` before it is weighted, by the name of its metric."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Number of episodes over which each of these means was computed, with the keys `info/NAME` and `reward_function/NAME`."""
    games: bool = False
    """Whether no task has a question, in which case the score is the share of the maximum reward."""
    fewer: str = ""
    """Reason why fewer problems than requested were evaluated (`Rate.fewer`); empty if no problem is missing."""
    groups: tuple[Group, ...] = field(default=(), repr=False)
    """The evaluated episodes in groups."""
    verifier: Mapping[str, Any] | None = None
    """How well the verifier that the run trains judges answers (`training.held_out.Judgement`). When a verifier is trained, the team is
    not trained."""
    judged: Mapping[str, Any] | None = None
    """How well the verifier that computes the team's rewards judges these episodes (`training.held_out.Judgement`)."""
    stderr: float | None = None
    """Standard error of `success` over problems, or None if there are fewer than two scored problems."""
    lengths: Mapping[str, Lengths] = field(default_factory=dict)
    """Statistics of the lengths of each agent's completions."""
    cost: float | None = None
    """Mean cost of an episode, computed from `evaluation.prices`, or None if no prices are given."""

    @property
    def rate(self) -> MeanScore:
        """The success rate of the team and the number of scored problems."""
        return MeanScore(
            self.success,
            self.interval,
            self.scored,
            self.problems,
            self.failed,
            self.reason,
            self.fewer,
            self.stderr,
        )

    def __str__(self) -> str:
        """Return the success rate, or the mean return of each agent for games without a success rate."""
        if self.success is not None or not self.reward:
            return str(self.rate)
        returns = ", ".join(f"{agent} {value:.3f}" for agent, value in self.reward.items())
        missing = missing_text(self.failed, self.fewer) + (f": {self.reason}" if self.failed else "")
        return f"return {returns}, played {self.problems - self.failed} of {self.problems}{missing}"

    def _repr_html_(self) -> str:
        """Return the results as a table for notebooks."""
        parts = [(name, str(part)) for name, part in self.parts.items()]
        returns = [(f"return of {agent}", f"{value:.4g}") for agent, value in self.reward.items()]
        return as_table(
            [("result", str(self)), *parts, *returns, ("tokens per problem", f"{self.tokens:.4g}")]
        )

    def row(self) -> dict[str, Any]:
        """Return the results as a JSON object."""
        row: dict[str, Any] = {
            "problems": self.problems,
            "success": self.success,
            "interval": None if self.interval is None else list(self.interval),
            "stderr": self.stderr,
            "reward": dict(self.reward),
            "tokens": self.tokens,
            "scored": self.scored,
            "failed": self.failed,
            "reason": self.reason,
            "parts": {
                name: {
                    "success": part.value,
                    "interval": None if part.interval is None else list(part.interval),
                    "stderr": part.stderr,
                    "scored": part.scored,
                    "problems": part.played,
                }
                for name, part in self.parts.items()
            },
            "lengths": {agent: asdict(lengths) for agent, lengths in self.lengths.items()},
            **({} if self.cost is None else {"cost": self.cost}),
            **({} if self.verifier is None else {"verifier": dict(self.verifier)}),
            **({} if self.judged is None else {"judged": dict(self.judged)}),
        }
        optional = {
            "info": dict(self.info),
            "reward_functions": dict(self.reward_functions),
            "counts": dict(self.counts),
            "games": self.games,
            "fewer": self.fewer,
            "part_reward": {part: dict(returns) for part, returns in self.part_reward.items()},
        }
        return row | {name: value for name, value in optional.items() if value}

    def scalars(self) -> dict[str, float]:
        """Return every number of the results by name, for experiment trackers."""
        row = {"problems": self.problems, "scored": self.scored, "failed": self.failed, "tokens": self.tokens}
        found = {name: float(value) for name, value in row.items()}
        if self.success is not None:
            found["success"] = self.success
        if self.interval is not None:
            found |= {"success_low": self.interval[0], "success_high": self.interval[1]}
        found |= {f"reward/{agent}": value for agent, value in self.reward.items()}
        judged = self.judged or {}
        found |= {
            f"judged/{key}": judged[key] for key in ("auc", "auc_within") if judged.get(key) is not None
        }
        found |= {f"info/{name}": value for name, value in self.info.items()}
        found |= {f"reward_function/{name}": value for name, value in self.reward_functions.items()}
        for agent, lengths in self.lengths.items():
            found |= {f"length/{agent}": lengths.mean, f"cut/{agent}": lengths.cut}
        if self.cost is not None:
            found["cost"] = self.cost
        for name, part in self.parts.items():
            found |= {f"scored/{name}": float(part.scored)}
            if part.value is not None:
                found |= {f"success/{name}": part.value}
        return found


def why_fewer(environment: Environment, split: Split, requested: int, found: int) -> str:
    """Return the reason why `choose_tasks` found fewer tasks than requested, or an empty string if it found all tasks.

    If the requested number is the default, which the user did not choose, the message does not contain the number.
    """
    if found >= requested:
        return ""
    size, settings = environment.size(split), EvaluationConfig()
    if requested in (settings.problems, settings.problems_while_training):
        return f"all of its {split} split" if size is not None else f"all distinct tasks of its {split} split"
    if size is not None:
        return f"{requested} requested, but its {split} split has {size}"
    return f"{requested} requested, but {20 * requested} draws from its {split} split gave no more distinct tasks"


def greedy_setup(setup: RolloutSetup) -> RolloutSetup:
    """Return a copy of the rollout setup with greedy decoding for every agent."""
    return replace(
        setup,
        sampling={
            agent.name: replace(agent.sampling, temperature=0.0, top_p=1.0, top_k=0)
            for agent in setup.team.agents
        },
    )


def decoded(setup: RolloutSetup, settings: EvaluationConfig) -> RolloutSetup:
    """Return a copy of the rollout setup with the sampling settings of evaluations."""
    own = {
        "temperature": 0.0 if settings.always_greedy else settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "max_tokens": settings.max_tokens,
    }
    given: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
    if settings.always_greedy:
        given |= {"top_p": 1.0, "top_k": 0}
    return replace(
        setup,
        sampling={agent.name: replace(setup.sampling_of(agent), **given) for agent in setup.team.agents},
    )


def evaluate_shared(
    setup: RolloutSetup, tasks: Sequence[Task], seed: int, returns: Returns = own_returns, samples: int = 1
) -> Evaluation:
    """Roll out each task `samples` times, with the tasks divided among the ranks, and return a summary.

    The function `returns` shares the team's reward.
    """
    seed = derive_seed(seed, "evaluation")
    groups = shared_rollout(setup, tasks, samples, seed)
    setup.engine.release_caches()
    found = summarise(groups, returns)
    if samples == 1:
        return found
    return replace(found, parts={**found.parts, **at_k(groups, samples, setup.environment, seed)})


def evaluate_held_out(
    setup: RolloutSetup,
    settings: EvaluationConfig,
    problems: int,
    seed: int,
    returns: Returns = own_returns,
    fits: Callable[[Task], bool] | None = None,
) -> Evaluation:
    """Roll out `problems` tasks of the environment's test split and of each additional set, and return a summary.

    The result contains the rates of each additional set under the name of the set, which is also the `part` of its tasks. Tasks for
    which `fits` returns False are excluded.
    """
    tasks = choose_tasks(setup.environment, "test", problems, fits=fits)
    result = evaluate_shared(decoded(setup, settings), tasks, seed, returns, settings.samples)
    parts, groups = dict(result.parts), list(result.groups)
    for name, environment in settings.sets.items():
        plan = settings.of_set(name)
        own = replace(decoded(setup, plan), environment=environment, workers=None)
        chosen = choose_tasks(environment, "test", problems, fits=fits)
        chosen = [replace(task, part=task.part or name) for task in chosen]
        found = evaluate_shared(own, chosen, derive_seed(seed, "set", name), returns, plan.samples)
        parts |= {name: found.rate, **{f"{name} {part}": rate for part, rate in found.parts.items()}}
        groups += found.groups
    fewer = why_fewer(setup.environment, "test", problems, len(tasks))
    cost = cost_of(groups, settings.prices) if settings.prices else None
    return replace(
        result, fewer=fewer, parts=parts, lengths=lengths_of(groups), cost=cost, groups=tuple(groups)
    )


def lengths_of(groups: Sequence[Group]) -> dict[str, Lengths]:
    """Return statistics of the lengths of each agent's completions in valid episodes."""
    turns: dict[str, list[Turn]] = {}
    for group in groups:
        for episode in group.valid:
            for turn in episode.turns:
                turns.setdefault(turn.agent, []).append(turn)
    found = {}
    for agent, own in turns.items():
        read, written = zip(*(turn.token_counts for turn in own), strict=True)
        ordered = sorted(written)
        found[agent] = Lengths(
            answers=len(own),
            mean=fmean(written),
            median=median(written),
            p95=ordered[ceil(0.95 * len(ordered)) - 1],
            longest=ordered[-1],
            cut=fmean(turn.finish_reason == "length" for turn in own),
            read=fmean(read),
        )
    return found


def cost_of(groups: Sequence[Group], prices: Mapping[str, tuple[float, float]]) -> float:
    """Return the mean cost of an episode, including failed episodes.

    The argument `prices` contains prices per million tokens (`evaluation.prices`).
    """
    free = prices.get("default", (0.0, 0.0))
    episodes = [episode for group in groups for episode in group.episodes]
    spent = 0.0
    for turn in (turn for episode in episodes for turn in episode.turns):
        (read, written), (reading, writing) = turn.token_counts, prices.get(turn.agent, free)
        spent += (read * reading + written * writing) / 1e6
    return spent / max(1, len(episodes))


def at_k(groups: Sequence[Group], samples: int, environment: Environment, seed: int) -> dict[str, MeanScore]:
    """Return avg@k, maj@k and pass@j (for j = k and all powers of two up to k) of groups of k = `samples` episodes.

    The metric pass@j is the probability that at least one of j answers solves the problem. If c of n scored answers are correct, the
    unbiased estimate of pass@j is 1 − C(n − c, j) / C(n, j) (arXiv:2107.03374, section 2.1). Problems with n < j are excluded.
    Confidence intervals are computed over problems, because answers to the same problem are not independent.
    """
    scores = [[e.success for e in group.valid if e.success is not None] for group in groups]
    failed = sum(not group.valid for group in groups)
    means = [sum(own) / len(own) for own in scores if own]
    found = {f"avg@{samples}": rate_of(means, len(groups), failed)}
    for j in sorted({*(2**power for power in range(samples.bit_length())), samples}):
        solved = [(len(own), sum(score >= 1.0 for score in own)) for own in scores if len(own) >= j]
        chances = [1.0 - comb(n - c, j) / comb(n, j) for n, c in solved]
        found[f"pass@{j}"] = rate_of(chances, len(groups), failed)
    if offers(environment, Answerable) and has_comparable_answers(environment):
        chosen = [Group(group.task, (chosen_by_majority(environment, group, seed),)) for group in groups]
        found[f"maj@{samples}"] = summarise(chosen).rate
    return found


def summarise(groups: Sequence[Group], returns: Returns = own_returns) -> Evaluation:
    """Return a summary of groups. All means exclude failed episodes and episodes without a score.

    If there are several episodes per task, the success is first averaged over the episodes of each task and then over tasks.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    scores = [
        episode.success for episode in episodes if episode.error is None and episode.success is not None
    ]
    failed = sum(episode.error is not None for episode in episodes)
    errors = Counter(" ".join(episode.error.split()) for episode in episodes if episode.error is not None)
    reasons = errors or Counter(
        str(e.info[UNSCORED]) for e in episodes if e.success is None and UNSCORED in e.info
    )
    reason = reasons.most_common(1)[0][0] if reasons else ""
    rate = rate_of(scores, len(episodes), failed, reason)
    if len(groups) < len(episodes):
        by_task = [[e.success for e in group.valid if e.success is not None] for group in groups]
        means = [sum(own) / len(own) for own in by_task if own]
        rate = rate_of(means, len(groups), sum(not group.valid for group in groups), reason)
    # The return of an episode without rewards and score is unknown, unless the environment rewards turns.
    by_turn = any(turn.reward for group in groups for e in group.valid for turn in e.turns)
    rewarded = [
        Group(g.task, tuple(e for e in g.valid if by_turn or e.rewards or e.success is not None))
        for g in groups
    ]
    # Episodes by each boolean in `info`.
    members: dict[str, list[Episode]] = {}
    for episode in episodes:
        for name, value in episode.info.items():
            if isinstance(value, bool) and episode.error is None:
                members.setdefault(str(name) if value else f"not {name}", []).append(episode)
    metrics = rollout_metrics(rewarded, returns)
    agents = episodes[0].agents if episodes else ()
    earned = {agent: metrics.get(f"return/{agent}") for agent in agents}
    return Evaluation(
        problems=len(groups),
        success=rate.value,
        interval=rate.interval,
        reward={agent: value for agent, value in earned.items() if value is not None},
        tokens=sum(len(t.completion_ids) for e in episodes for t in e.turns) / max(1, len(episodes)),
        failed=rate.failed,
        scored=rate.scored,
        stderr=rate.stderr,
        reason=rate.reason,
        parts={
            name: rate_of([e.success for e in part if e.success is not None], len(part), 0)
            for name, part in sorted(members.items())
        },
        part_reward={
            part: {agent: metrics[name] for agent in agents if (name := f"return/{part}/{agent}") in metrics}
            for part in by_part([episode for episode in episodes if episode.error is None])
        },
        info={
            name.removeprefix("info/"): value for name, value in metrics.items() if name.startswith("info/")
        },
        reward_functions={
            name.removeprefix("reward_function/"): value
            for name, value in metrics.items()
            if name.startswith("reward_function/")
        },
        counts={name: count for name, count in reported_counts(rewarded).items() if name in metrics},
        games=bool(episodes) and not any(episode.task.question for episode in episodes),
        groups=tuple(groups),
    )


def own_scores(groups: Sequence[Group]) -> dict[str, MeanScore]:
    """Return the mean of each agent's own terminal rewards as metrics `reward/<agent>`. Agents without such rewards are absent."""
    return _own(groups, lambda episode, agent: episode.rewards.get(agent, 0.0))


def own_totals(groups: Sequence[Group]) -> dict[str, MeanScore]:
    """Return the mean of all rewards of each agent in an episode as metrics `reward/<agent>`, for games that reward turns."""
    return _own(groups, lambda episode, agent: episode.total(agent))


def _own(groups: Sequence[Group], earned: Callable[[Episode, str], float]) -> dict[str, MeanScore]:
    episodes = [episode for group in groups for episode in group.episodes]
    whole = [episode for episode in episodes if episode.error is None]
    failed = len(episodes) - len(whole)
    rewarded = dict.fromkeys(agent for episode in whole for agent in episode.rewards)
    return {
        agent: rate_of([earned(e, agent) for e in acted(agent, whole)], len(episodes), failed)
        for agent in rewarded
    }


def verifier_metrics(groups: Sequence[Group], score: Mapping[TurnKey, float]) -> dict[str, float]:
    """Return `verifier_score/<agent>` (mean score of the agent's turns) and `verifier_auc` (against the environment's grades)."""
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


# -------- Baselines with the same number of tokens: one agent alone, and a majority vote of its answers
#
# A team that beats one agent may simply have used more tokens. So each agent gets the team's mean number of tokens per problem,
# once as the limit of one answer, and once for several answers at temperature 1 with a majority vote (self-consistency,
# 2203.11171).


@dataclass(frozen=True, slots=True)
class Baseline:
    """A baseline that uses the same number of tokens as the team."""

    agents: tuple[str, ...]
    """Name of the agent that answers alone. If several agents have the same weights, system message and sampling settings, all of their
    names are listed."""
    answers: int
    """Number of answers per problem. If there are several answers, the majority answer is scored."""
    result: Evaluation
    """Results of the baseline, in which `result.tokens` counts the tokens of all answers."""
    failed_answers: int = 0
    """Number of answers that ended with an error and therefore had no vote."""


def soloists(setup: RolloutSetup) -> list[tuple[str, ...]]:
    """Return the agents that can answer alone, with equal agents in groups. The result is empty for games.

    Agents that use endpoints are excluded, because their tokens cannot be counted.
    """
    if not has_comparable_answers(setup.environment):
        return []
    alike: dict[tuple[object, ...], list[str]] = {}
    for agent in setup.team.agents:
        policy = setup.team.policy(agent.name)
        if policy.endpoint is None:
            sampling = setup.sampling_of(agent)
            alone = policy.name, agent.system, agent.examples, sampling, repr(agent.chat_template_kwargs)
            alike.setdefault(alone, []).append(agent.name)
    return [tuple(names) for names in alike.values()]


async def compute_matched(
    setup: RolloutSetup, tasks: Sequence[Task], tokens: float, seed: int
) -> list[Baseline]:
    """Return baselines that use `tokens` completion tokens per problem.

    There is one baseline for a single answer of each agent, and one baseline for each vote of at least two answers. A single answer
    is sampled with the team's sampling settings in `setup`. Ties in a vote are broken with `seed`. If the team has only one agent,
    the result is empty.
    """
    found: list[Baseline] = []
    votes: list[Baseline] = []
    for names in soloists(setup) if len(setup.team.agents) > 1 else []:
        alone = await answer_alone(setup, tasks, names[0], tokens, seed)
        found.append(Baseline(names, 1, alone, alone.failed))
        answers = int(tokens // max(1.0, alone.tokens))
        if answers > 1:
            voted, failed = await _vote(setup, tasks, names[0], tokens, answers, seed)
            votes.append(Baseline(names, answers, voted, failed))
    return found + votes


async def answer_alone(
    setup: RolloutSetup, tasks: Sequence[Task], agent: str, tokens: float, seed: int
) -> Evaluation:
    """Let one agent answer every task with at most `tokens` completion tokens, and return the results."""
    limit = max(1, round(tokens))
    sampling = replace(setup.sampling_of(setup.team[agent]), max_tokens=limit)
    groups = await rollout(_alone(setup, agent, sampling), tasks, 1, derive_seed(seed, "alone", agent))
    return summarise(groups)


async def vote(
    setup: RolloutSetup, tasks: Sequence[Task], agent: str, tokens: float, answers: int, seed: int
) -> Evaluation:
    """Let one agent answer every task `answers` times at temperature 1 and score the majority answer.

    The number of `tokens` is divided equally among the answers. Failed answers have no vote. A problem fails if all of its answers
    fail.
    """
    return (await _vote(setup, tasks, agent, tokens, answers, seed))[0]


async def _vote(
    setup: RolloutSetup, tasks: Sequence[Task], agent: str, tokens: float, answers: int, seed: int
) -> tuple[Evaluation, int]:
    limit = max(1, int(tokens // answers))
    own = setup.sampling_of(setup.team[agent])
    sampling = Sampling(limit, temperature=1.0, stop=own.stop, constraint=own.constraint)
    seed = derive_seed(seed, "vote", agent)
    groups = await rollout(_alone(setup, agent, sampling), tasks, answers, seed)
    chosen = [Group(group.task, (chosen_by_majority(setup.environment, group, seed),)) for group in groups]
    spent = sum(len(turn.completion_ids) for group in groups for e in group.episodes for turn in e.turns)
    failed = sum(len(group.episodes) - len(group.valid) for group in groups)
    return replace(summarise(chosen), tokens=spent / max(1, len(groups))), failed


def chosen_by_majority(environment: object, group: Group, seed: int) -> Episode:
    """Return an episode of a group whose answer (`Episode.answer`) is the most frequent answer among the valid episodes.

    Answers are equal if `Answerable.extract` returns the same string for them. Ties are broken with `seed` and the task.
    """
    assert offers(environment, Answerable), "a vote needs answers that can be compared"
    voters = group.valid
    if not voters:
        return group.episodes[0]
    answers = {str(k): episode.answer for k, episode in enumerate(voters)}
    found = {k: environment.extract(text) for k, text in answers.items()}
    text = majority(answers, found, derive_seed(seed, group.task.id))
    return next(episode for episode in voters if episode.answer == text)


def _alone(setup: RolloutSetup, agent: str, sampling: Sampling) -> RolloutSetup:
    """Return a copy of the rollout setup with only one agent, which reads only the question."""
    solver = replace(setup.team[agent], prompt="{question}")
    policy = setup.team.policy(agent)
    team = Team.alone(solver, policy, setup.team.bases)
    return replace(setup, team=team, workflow=Solo(), sampling={agent: sampling})
