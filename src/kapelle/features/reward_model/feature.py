"""Use a reward model in training, and refresh a verifier on graded answers of the team that it rewards.

A fixed verifier was trained on answers of an earlier team. During training, the team shifts to answers with high scores, whether they
are correct or not (arXiv:2210.10760). After each step, the environment therefore grades some of the team's answers, and the verifier
is trained on stored answers. Grades are counted, because they have a cost. The metric `verifier_auc` of a step is measured on its
answers before the verifier is trained on them. Answers of evaluations are never graded for this purpose.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kapelle.algorithm import Loss, Outputs, Targets
from kapelle.algorithms.shared.rewards import with_scores
from kapelle.algorithms.signals.samples import conversation_sample
from kapelle.algorithms.signals.verifier import calibration_of, scores
from kapelle.algorithms.verifier import balanced, weighted_cross_entropy
from kapelle.engines.train.protocol import Objective
from kapelle.features.reward_model.settings import RefreshConfig, RewardModelConfig
from kapelle.functional.statistics import merge_rows
from kapelle.rows import Column, Signals, label_of, turns_of
from kapelle.runtime.randomness import derive_seed
from kapelle.team import VERIFIER
from kapelle.training.feature import Feature, StartedRun, StepInProgress
from kapelle.types import Group, Message


class ScoredRewards(Feature):
    """Adds a trained verifier's scores of turns, multiplied by a weight, to the rewards of these turns."""

    def __init__(self, settings: RewardModelConfig, run: StartedRun) -> None:
        self._settings, self._learners = settings, run.learners

    def rewarded(self, groups: Sequence[Group], signals: Signals | None) -> Sequence[Group]:
        """Return groups in which the scores were added to the rewards of the turns.

        If no signals are given, the turns are scored in this call.
        """
        settings = self._settings
        score = (
            scores(groups, self._learners, calibration_of(settings.path))
            if signals is None
            else signals.score
        )
        return with_scores(groups, score, settings.weight)


class GradedAnswer(NamedTuple):
    """An answer with its label."""

    prompt: tuple[Message, ...]
    text: str
    label: float
    """Correctness of the answer, in [0, 1]."""


class RefreshedVerifier(Feature):
    """Trains the verifier on stored answers. Each step adds some graded answers."""

    def __init__(self, settings: RefreshConfig, run: StartedRun) -> None:
        self._settings, self._seed, self._engine = settings, run.config.seed, run.engine
        self._remembered: tuple[GradedAnswer, ...] = ()
        """Stored answers, oldest first."""
        self._labels = 0

    def after_update(self, step: StepInProgress) -> None:
        """Grade some answers of the step, and train the verifier."""
        step.metrics |= self.learn(step.number, step.groups)

    def learn(self, number: int, groups: Sequence[Group]) -> dict[str, float]:
        """Grade some answers of step `number`, train the verifier, and return metrics.

        Correct and incorrect answers have equal total weights in every update. There is no update as long as all stored answers are
        correct or all are incorrect.
        """
        settings = self._settings
        answers = turns_of(groups, trained_only=False)
        drawn = random.Random(derive_seed(self._seed, "refresh", number))
        count = min(len(answers), max(1, round(settings.share * len(answers))))
        for place in sorted(drawn.sample(range(len(answers)), count)):
            key, turn = answers[place]
            label = label_of(groups[key.group].episodes[key.episode], turn)
            if label is not None:
                self._labels += 1
                graded = GradedAnswer(groups[key.group].task.prompt_messages, turn.text, label)
                self._remembered = (*self._remembered, graded)[-settings.memory :]
        rows: list[dict[str, float]] = []
        for _ in range(settings.updates):
            batch = drawn.sample(self._remembered, min(settings.batch, len(self._remembered)))
            samples = [
                conversation_sample(
                    VERIFIER,
                    self._engine.renderer(VERIFIER),
                    each.prompt,
                    each.text,
                    {Column.RETURN: torch.tensor([each.label]), Column.WEIGHT: torch.tensor([weight])},
                )
                for each, weight in zip(batch, balanced([each.label for each in batch]), strict=True)
                if weight > 0
            ]
            if samples:
                rows.append(
                    self._engine.update(samples, Objective(_no_policy, weighted_cross_entropy, parity=False))
                )
        return {**merge_rows(rows), "verifier_labels": float(self._labels)}

    def state(self) -> dict[str, Any]:
        """Return the stored answers and the number of labels."""
        remembered = [
            [[[m.role, m.content, m.structured] for m in each.prompt], each.text, each.label]
            for each in self._remembered
        ]
        return {"remembered": remembered, "labels": self._labels}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned."""
        self._remembered = tuple(
            GradedAnswer(tuple(Message(r, c, structured=more) for r, c, more in messages), text, label)
            for messages, text, label in state["remembered"]
        )
        self._labels = int(state["labels"])


def _no_policy(outputs: Outputs, targets: Targets) -> Loss:
    raise AssertionError("only the verifier has samples here")
