"""Evaluate the team of a run, or the verifier that the run trains, on held-out tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from kapelle.algorithm import Algorithm
from kapelle.algorithms.signals.verifier import VerifierScores, logits
from kapelle.engines.train.protocol import TrainEngine
from kapelle.environment import Answerable, Environment, has_comparable_answers, offers
from kapelle.functional.calibration import UNCALIBRATED, Kind, fit_calibration
from kapelle.functional.statistics import area_interval, area_under_curve, mean_interval
from kapelle.models.devices import return_freed_memory
from kapelle.rollout.episodes import shared_rollout
from kapelle.rollout.evaluation.evaluate import Evaluation, evaluate_held_out
from kapelle.rollout.setup import RolloutSetup
from kapelle.rows import TurnKey, label_of, turns_of
from kapelle.runs.definitions import own_returns
from kapelle.runtime.interrupts import StopRequested
from kapelle.runtime.randomness import capture_random, derive_seed, restore_random
from kapelle.settings.schema import RunConfig
from kapelle.setup.problems import choose_tasks
from kapelle.setup.prompt_lengths import short_enough
from kapelle.training.selection import draws_of
from kapelle.training.starting import Pieces
from kapelle.types import Group, Task

# -------- How well a verifier judges answers to held-out questions
#
# The questions are those of the test split that no training step contains. The team answers each question several times as in training,
# and the environment grades the answers. Answers to one question are not independent, so intervals are computed over questions.
#
# There are two areas under the curve. `auc` is over all answers: it is high if the verifier recognises hard questions, even if it
# cannot distinguish two answers to one question. `auc_within` compares only answers to the same question. Only such differences can
# improve an agent, because a critic subtracts what all answers to a question have in common.
#
# A verifier that rewards a team is also measured on the team's answers at every evaluation, because training changes them.

BINS = 10
"""The number of equal bins of [0, 1] in which predicted probabilities are compared with the share of correct answers."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """How well a verifier separates correct from incorrect answers."""

    questions: int
    answers: int
    right: float
    """The share of correct answers."""
    auc: float | None
    """The probability that a correct answer scores higher than an incorrect answer, over all answers. The AUC is None if all
    answers are correct or all are incorrect."""
    interval: tuple[float, float] | None
    """The 95 % interval of `auc`, with questions as clusters (`functional.statistics.area_interval`)."""
    both: int
    """The number of questions with both correct and incorrect answers."""
    auc_within: float | None
    """The AUC among the answers to one question, averaged over questions with both correct and incorrect answers. The AUC is
    None if there are no such questions."""
    interval_within: tuple[float, float] | None
    """The 95 % interval of `auc_within` over questions, by Student's t. The interval is None for fewer than two questions."""
    brier: float | None
    """The Brier score: the mean squared difference between the predicted probability and the label, which is 1 or 0."""
    calibration_error: float | None
    """The mean absolute difference between the mean prediction and the share of correct answers over ten bins, weighted by
    the number of answers in each bin."""
    bins: tuple[tuple[float, float, int], ...]
    """A tuple (mean prediction, share of correct answers, number of answers) for every bin with answers."""
    answered: Mapping[str, Any] | None = None
    """The same values, without `bins`, over the answers in which the environment finds a final answer. On these answers, a
    verifier that only recognises texts without a final answer is at chance level. The field is None if all answers have a
    final answer or the environment does not extract answers."""
    calibrated: Mapping[str, Any] | None = None
    """The result of a calibration: the `calibration` that was fitted on half of the questions (`fitted` is the number of
    answers), and `calibration_error` and `brier` on the other half (`answers` is the number of answers), after and `before`
    the calibration. The field is None if there is no calibration."""


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer with its question, the predicted probability that the answer is correct, and whether the answer is correct."""

    question: str
    probability: float
    right: bool
    answered: bool = True
    """Whether the environment finds a final answer in the text of the answer."""
    score: float = 0.0
    """The logit of the verifier for the answer."""


def judgement_of(judged: Sequence[Judged], calibration: Kind = "none") -> Judgement:
    """Return how well the answers were judged. A `calibration` is fitted on half of the questions and measured on the other half."""
    answered = [each for each in judged if each.answered]
    found = _judgement(judged)
    if len(answered) < len(judged):
        row = asdict(_judgement(answered))
        found = replace(
            found, answered={key: row[key] for key in row if key not in ("bins", "answered", "calibrated")}
        )
    if calibration == "none":
        return found
    # Split by a hash of the question, so that a question is in the same half at every step of a run.
    fitted = [each for each in judged if derive_seed("calibration", each.question) % 2]
    others = [each for each in judged if not derive_seed("calibration", each.question) % 2]
    made = fit_calibration(calibration, [each.score for each in fitted], [each.right for each in fitted])
    if made is None or not others:
        return found
    before = _judgement(others)
    after = _judgement([replace(each, probability=made.probability(each.score)) for each in others])
    kept = {
        "calibration": made.row(),
        "fitted": len(fitted),
        "answers": len(others),
        "calibration_error": after.calibration_error,
        "brier": after.brier,
        "before": {"calibration_error": before.calibration_error, "brier": before.brier},
    }
    return replace(found, calibrated=kept)


def _judgement(judged: Sequence[Judged]) -> Judgement:
    predicted, right = [each.probability for each in judged], [each.right for each in judged]
    questions = [each.question for each in judged]
    parts: dict[int, list[Judged]] = {}
    for each in judged:
        parts.setdefault(min(BINS - 1, int(each.probability * BINS)), []).append(each)
    bins = [
        (fmean(each.probability for each in part), fmean(each.right for each in part), len(part))
        for _, part in sorted(parts.items())
    ]
    count = len(judged)
    by_question: dict[str, list[Judged]] = {}
    for each in judged:
        by_question.setdefault(each.question, []).append(each)
    areas = [
        area_under_curve([each.probability for each in answers], [each.right for each in answers])
        for answers in by_question.values()
    ]
    within = [area for area in areas if area is not None]  # only questions with correct and incorrect answers
    spread = mean_interval(within)
    return Judgement(
        questions=len(set(questions)),
        answers=count,
        right=fmean(right) if count else 0.0,
        auc=area_under_curve(predicted, right),
        interval=area_interval(predicted, right, questions),
        both=len(within),
        auc_within=fmean(within) if within else None,
        interval_within=None if spread is None else (max(0.0, spread[0]), min(1.0, spread[1])),
        brier=fmean((each.probability - each.right) ** 2 for each in judged) if count else None,
        calibration_error=sum(abs(mean - share) * n for mean, share, n in bins) / count if count else None,
        bins=tuple(bins),
    )


def held_out_tasks(
    config: RunConfig,
    environment: Environment,
    steps: int,
    count: int,
    fits: Callable[[Task], bool] | None = None,
) -> list[Task]:
    """Return up to `count` test tasks with distinct questions that do not occur in the first `steps` training steps."""
    draws = draws_of(environment, config, fits)
    trained = {task.question for step in range(1, steps + 1) for task in draws.of(step, 0)}
    size = environment.size("test")
    # For an infinite split, twice as many tasks leave enough questions.
    most = 2 * count + len(trained) if size is None else size
    held_out: dict[str, Task] = {}
    for task in choose_tasks(environment, "test", most, fits=fits):
        if task.question not in trained:
            held_out.setdefault(task.question, task)
    return list(held_out.values())[:count]


def judged_answers(
    groups: Sequence[Group],
    environment: Environment,
    given: Mapping[TurnKey, float],
    probability: Callable[[float], float] = float,
) -> list[Judged]:
    """Return every graded answer of the groups with its logit in `given` and the probability that corresponds to the logit."""
    reader = environment if offers(environment, Answerable) and has_comparable_answers(environment) else None
    found: list[Judged] = []
    for key, turn in turns_of(groups, trained_only=False):
        label = label_of(groups[key.group].episodes[key.episode], turn)
        if label is not None:
            answered = reader is None or reader.extract(turn.text) is not None
            question, score = groups[key.group].task.question, given[key]
            found.append(Judged(question, probability(score), label > 0.5, answered, score))
    return found


def judge_held_out(
    config: RunConfig,
    setup: RolloutSetup,
    engine: TrainEngine,
    samples: int,
    steps: int,
    problems: int,
    calibration: Kind = "none",
) -> Evaluation:
    """Sample `samples` answers of the team to each held-out question, and evaluate the verifier on these answers.

    Questions that occur in the first `steps` training steps are excluded.
    """
    fits = short_enough(config, setup.team, setup.engine.renderer)
    tasks = held_out_tasks(config, setup.environment, steps, problems, fits)
    groups = shared_rollout(setup, tasks, samples, derive_seed(config.seed, "held-out"))
    judged = judged_answers(groups, setup.environment, logits(groups, engine), UNCALIBRATED.probability)
    episodes = [episode for group in groups for episode in group.episodes]
    return Evaluation(
        problems=len(tasks),
        success=None,
        interval=None,
        reward={},
        tokens=sum(len(t.completion_ids) for e in episodes for t in e.turns) / max(1, len(episodes)),
        failed=sum(episode.error is not None for episode in episodes),
        groups=tuple(groups),
        verifier=asdict(judgement_of(judged, calibration)),
        fewer=f"{problems} requested, but no more held-out questions are left"
        if len(tasks) < problems
        else "",
    )


class HeldOut:
    """Evaluate the team of a run on held-out tasks or, if the run trains a verifier, evaluate the verifier."""

    def __init__(self, config: RunConfig, algorithm: Algorithm, pieces: Pieces) -> None:
        self._config, self._algorithm, self._pieces = config, algorithm, pieces
        self._judged: tuple[int, int, Evaluation] | None = None
        """The step, the number of problems and the result of the last evaluation of the trained verifier."""
        self._paid: tuple[int, Mapping[str, Any]] | None = None
        """The step of the last evaluation of the team, and how well the verifier that rewards the team judged its answers."""

    def known(self, done: int, problems: int) -> Evaluation | None:
        """Return the evaluation of the verifier after `done` steps, or None if there is none."""
        return self._judged[2] if self._judged is not None and self._judged[:2] == (done, problems) else None

    def judgement(self, done: int) -> Mapping[str, Any] | None:
        """Return the judgement of the current verifier weights, which is saved together with the weights.

        If the verifier is trained further while it rewards the team, it keeps its calibration.
        """
        payer = self._algorithm.need(VerifierScores)
        if payer is not None and payer.refresh is not None:
            known = self._paid[1] if self._paid is not None and self._paid[0] == done else {}
            return {**known, "calibrated": {"calibration": payer.calibration.row()}}
        return self._judged[2].verifier if self._judged is not None and self._judged[0] == done else None

    def measure(self, done: int, problems: int, greedy: bool | None) -> Evaluation:
        """Evaluate the weights after `done` steps.

        If the evaluation is interrupted, the states of the random generators are restored.
        """
        drawn = capture_random()
        return_freed_memory()  # before and after the largest KV cache of the run
        try:
            if self._algorithm.judges:
                acting, engine = self._pieces.acting, self._pieces.engine
                samples = self._algorithm.data.group_size
                assert self._algorithm.critic is not None, "it judges"
                kind = self._algorithm.critic.calibration
                result = judge_held_out(self._config, acting, engine, samples, done, problems, kind)
                self._judged = (done, problems, result)
                return result
            setup = self._pieces.setup
            fits = short_enough(self._config, setup.team, setup.engine.renderer)
            returns, settings = self._algorithm.returns or own_returns, self._config.evaluation
            if greedy is not None:
                settings = settings.model_copy(update={"greedy": greedy, "temperature": None})
            result = evaluate_held_out(setup, settings, problems, self._config.seed, returns, fits)
            payer = self._algorithm.need(VerifierScores)
            if payer is not None:
                engine = self._pieces.engine
                own = result.groups[: result.problems]  # without additional sets
                judged = judged_answers(own, setup.environment, payer.judge(own, engine))
                result = replace(result, judged=asdict(judgement_of(judged)))
                self._paid = done, result.judged or {}
        except StopRequested:
            restore_random(drawn)
            raise
        finally:
            return_freed_memory()
        return result
