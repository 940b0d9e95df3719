"""Implements `kapelle validate RECIPE --judge GRADED.jsonl`, which measures how well the judges of a recipe agree with graded answers.

The rows of the file have the form `{question, text, score}`, where `score` is true, false or a number in [0, 1]. Rows
with the same question are answers to the same question. The 95 % intervals are bootstrapped over questions, because
answers to the same question are not independent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from statistics import correlation, fmean

from kapelle.environments.grading.judge import judge_attempts, judge_rubric
from kapelle.environments.judged import Ranking, Rubric, shown
from kapelle.environments.rewarded import Rewarded
from kapelle.errors import ConfigError, DataError
from kapelle.functional.statistics import (
    Interval,
    area_under_curve,
    bootstrap_interval,
    mean_interval,
    share_text,
)
from kapelle.runtime.console import say
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.row_files import DataRow, read_rows
from kapelle.settings.schema import RunConfig
from kapelle.setup.frozen_models import FrozenModels

SEED = 0
"""The seed of the bootstrap, which makes the intervals reproducible."""


@dataclass(frozen=True, slots=True)
class GradedText:
    """An answer, and the grade that a person or a grader gave to the answer."""

    question: str
    text: str
    score: float
    """The grade of the answer, in [0, 1]."""
    row: DataRow


def read_graded(file: Path) -> dict[str, list[GradedText]]:
    """Return the graded answers of each question. Raises DataError for the first row without a text or a score."""
    found: dict[str, list[GradedText]] = {}
    for row in read_rows(file):
        question, text, score = (row.fields.get(key) for key in ("question", "text", "score"))
        if not isinstance(question, str) or not isinstance(text, str):
            raise DataError(
                f"{row.place} has no string in `question` or in `text`. Write {{question, text, score}}."
            )
        if not isinstance(score, int | float) or not 0 <= score <= 1:
            raise DataError(
                f"{row.place}: `score` is {score!r:.40}. Write true, false or a number from 0 to 1."
            )
        found.setdefault(question, []).append(GradedText(question, text, float(score), row))
    if not found:
        raise DataError(f"'{file}' has no rows. Write one per line: {{question, text, score}}.")
    return found


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95 % interval. The interval is None if it cannot be computed."""

    value: float
    interval: Interval | None

    def __str__(self) -> str:
        """Format the number and its interval, for example as `0.93 [0.88, 0.97]`."""
        ends = f" [{self.interval[0]:.2f}, {self.interval[1]:.2f}]" if self.interval else ""
        return f"{self.value:.2f}{ends}"


@dataclass(frozen=True, slots=True)
class JudgeAgreement:
    """How well a reward, or one criterion of a reward, agrees with the grades."""

    name: str
    """The name of the reward or criterion, such as `rubric`, `rubric/clear` or `rank`."""
    graded: int
    """The number of answers that the judge scored."""
    ungraded: int
    """The number of answers for which the judge gave no verdict."""
    auc: Estimate | None = None
    """The probability that a good answer scores higher than a bad answer, across questions. This value is available only if the
    grades are true and false."""
    accuracy: Estimate | None = None
    """The share of answers whose score is on the correct side of ½, where a score of ½ counts half. This value is available
    only if the grades are true and false."""
    spearman: Estimate | None = None
    """The mean rank correlation within a question, over the questions whose grades differ."""
    pairs: Estimate | None = None
    """The share of pairs of answers to the same question with different grades that the judge orders in the same way as the
    grades. Ties in the judge's scores count half."""
    disagreement: float | None = None
    """For rankings, the mean difference between the scores of an answer in the two orders of presentation."""
    reversed: float | None = None
    """For rankings, the share of the pairs whose preferred answer changes with the order of presentation."""


@dataclass(frozen=True, slots=True)
class JudgeReport:
    """The values that `--json` prints."""

    questions: int
    answers: int
    calls: int
    cached: int
    rewards: Sequence[JudgeAgreement] = field(default_factory=list)

    def __str__(self) -> str:
        """Return the agreement of all judges as a table."""
        lines = [
            f"{self.answers} graded answers to {self.questions} questions; {self.calls} judge calls, {self.cached} replies from the cache"
        ]
        for each in self.rewards:
            parts = [f"{each.graded} scored, {each.ungraded} without a verdict"]
            parts += [
                f"{name} {estimate}"
                for name in ("AUC", "accuracy", "Spearman", "pairs")
                if (estimate := getattr(each, name.lower())) is not None
            ]
            if each.disagreement is not None and each.reversed is not None:
                parts.append(
                    f"orders differ by {each.disagreement:.2f} and reverse {share_text(each.reversed, None)} of pairs"
                )
            lines.append(f"{each.name:16} {'; '.join(parts)}")
        return "\n".join(lines)


Scored = Sequence[tuple[float, float]]
"""The judge's score and the grade of each answer to one question."""


def agree(name: str, by_question: Sequence[Scored], ungraded: int) -> JudgeAgreement:
    """Return how well scores agree with grades. The scores and grades are grouped by question."""
    every = [pair for scored in by_question for pair in scored]
    if not every:
        return JudgeAgreement(name, 0, ungraded)
    auc = accuracy = None
    if all(grade in (0.0, 1.0) for _, grade in every):
        auc = _estimated(by_question, _auc)
        accuracy = _estimated(by_question, _accuracy)
    spearman = [found for scored in by_question if (found := _spearman(scored)) is not None]
    spearman_interval = bootstrap_interval(spearman, SEED) if len(spearman) >= 10 else mean_interval(spearman)
    return JudgeAgreement(
        name,
        len(every),
        ungraded,
        auc,
        accuracy,
        Estimate(fmean(spearman), spearman_interval) if spearman else None,
        _estimated(by_question, _pairs),
    )


def _estimated(
    by_question: Sequence[Scored], statistic: Callable[[Sequence[Scored]], float | None]
) -> Estimate | None:
    found = statistic(by_question)
    if found is None:
        return None
    if len(by_question) < 2:
        return Estimate(found, None)
    # A resample may contain only one kind of answer; the value of the whole sample then replaces it.

    def resampled(drawn: Sequence[float]) -> float:
        value = statistic([by_question[int(k)] for k in drawn])
        return found if value is None else value

    numbers = range(len(by_question))
    return Estimate(found, bootstrap_interval(numbers, SEED, resampled, resamples=1000))


def _auc(by_question: Sequence[Scored]) -> float | None:
    every = [pair for scored in by_question for pair in scored]
    return area_under_curve([score for score, _ in every], [grade == 1.0 for _, grade in every])


def _accuracy(by_question: Sequence[Scored]) -> float | None:
    every = [pair for scored in by_question for pair in scored]
    return fmean(0.5 if score == 0.5 else float((score > 0.5) == (grade == 1.0)) for score, grade in every)


def _pairs(by_question: Sequence[Scored]) -> float | None:
    found = []
    for scored in by_question:
        for (one, grade), (other, rival) in combinations(scored, 2):
            if grade != rival:
                found.append(0.5 if one == other else float((one > other) == (grade > rival)))
    return fmean(found) if found else None


def _spearman(scored: Scored) -> float | None:
    """Return the rank correlation, where equal values share a rank.

    The result is None if all grades are equal, and 0 if all scores are equal.
    """
    scores, grades = (_ranks([pair[k] for pair in scored]) for k in (0, 1))
    if len({*grades}) < 2:
        return None
    return correlation(scores, grades) if len({*scores}) > 1 else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < value for other in values) + (values.count(value) + 1) / 2 for value in values]


# -------- Calls of the judges


async def judge_answers(
    environment: Rewarded, graded: Mapping[str, Sequence[GradedText]]
) -> list[JudgeAgreement]:
    """Score the answers with every judge of an environment, and return the agreement of each judge.

    For rubrics, the agreement of each criterion is also returned.
    """
    found: list[JudgeAgreement] = []
    for reward, label in zip(environment.rewards, environment.labels, strict=True):
        name = label.removeprefix("reward/")
        if isinstance(reward, Rubric):
            found += await _grade_by_rubric(environment, reward, name, graded)
        elif isinstance(reward, Ranking):
            found.append(await _grade_by_ranking(environment, reward, name, graded))
    return found


async def _grade_by_rubric(
    environment: Rewarded, reward: Rubric, name: str, graded: Mapping[str, Sequence[GradedText]]
) -> list[JudgeAgreement]:
    judge = environment.judge_of(reward)
    every = [each for answers in graded.values() for each in answers]
    verdicts = await asyncio.gather(
        *(
            judge_rubric(judge, each.question, each.text, reward.criteria, _reference(reward, each))
            for each in every
        )
    )
    missing = sum(verdict.grade.status == "ungraded" for verdict in verdicts)

    def scored(score: Callable[[int], float]) -> list[Scored]:
        by_question: dict[str, list[tuple[float, float]]] = {}
        for k, (each, verdict) in enumerate(zip(every, verdicts, strict=True)):
            if verdict.grade.status != "ungraded":
                by_question.setdefault(each.question, []).append((score(k), each.score))
        return list(by_question.values())

    found = [agree(name, scored(lambda k: verdicts[k].grade.score), missing)]
    for criterion in reward.rubric:
        own = scored(lambda k, criterion=criterion: verdicts[k].criteria[criterion])  # type: ignore[misc]
        found.append(agree(f"{name}/{criterion}", own, missing))
    return found


async def _grade_by_ranking(
    environment: Rewarded, reward: Ranking, name: str, graded: Mapping[str, Sequence[GradedText]]
) -> JudgeAgreement:
    judge = environment.judge_of(reward)
    groups = [answers for answers in graded.values() if len(answers) > 1]
    if not groups:
        raise ConfigError(
            f"`{name}` compares answers to the same question, but no graded question has two answers. Add answers, or validate a rubric."
        )
    compared = await asyncio.gather(
        *(
            judge_attempts(
                judge,
                answers[0].question,
                [each.text for each in answers],
                reward.rank,
                _reference(reward, answers[0]),
            )
            for answers in groups
        )
    )
    missing, scored = 0, list[Scored]()
    for answers, verdict in zip(groups, compared, strict=True):
        pairs = [
            (grade.score, each.score)
            for each, grade in zip(answers, verdict.grades, strict=True)
            if grade.status != "ungraded"
        ]
        missing += len(answers) - len(pairs)
        scored += [pairs] if pairs else []
    both = [verdict for verdict in compared if verdict.disagreement is not None]
    base = agree(name, scored, missing)
    return replace(
        base,
        disagreement=fmean(verdict.disagreement or 0.0 for verdict in both) if both else None,
        reversed=fmean(verdict.reversed or 0.0 for verdict in both) if both else None,
    )


def _reference(reward: Rubric | Ranking, answer: GradedText) -> str | None:
    if reward.reference is None:
        return None
    if reward.reference not in answer.row.fields:
        raise DataError(
            f"{answer.row.place} has no `{reward.reference}`, which the judge reads. Add it, or set `reference: null`."
        )
    return shown(answer.row.fields[reward.reference])


def report(config: RunConfig, file: Path) -> JudgeReport:
    """Score graded answers with the judges of a recipe. Raises ConfigError if the recipe has no judge."""
    environment = config.environment
    if not isinstance(environment, Rewarded) or not any(
        isinstance(each, Rubric | Ranking) for each in environment.rewards
    ):
        raise ConfigError(
            "This recipe has no judge for --judge. Add a `rubric` or a `rank` to `environment.rewards` (environment `rewarded`)."
        )
    graded = read_graded(file)
    frozen = FrozenModels(config.model)
    judged = environment.with_models(frozen)
    try:
        found = run_async(lambda: judge_answers(judged, graded))
    finally:
        frozen.close()
    costs = judged.costs()
    return JudgeReport(
        len(graded),
        sum(map(len, graded.values())),
        int(costs["judge/calls"]),
        int(costs["judge/cached"]),
        found,
    )


def print_report(found: JudgeReport, *, as_json: bool) -> None:
    """Print the agreement as text or, if `as_json` is true, as one JSON object."""
    say(json.dumps(asdict(found)) if as_json else str(found))
