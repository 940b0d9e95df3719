"""Verifier: a model that estimates the probability that an answer is correct, trained on the answers of a frozen team.

A scalar head on its own LoRA reads the question and one answer, and gives one score at the answer's last token. σ(score) is the
probability that the answer is correct.

- `objective: labels`: binary cross-entropy with each turn's label (MAPoRL's verifier, 2502.18439; also 2110.14168).
- `objective: pairs`: −log σ(s_correct − s_incorrect) over answers to one question (Bradley–Terry, as in 2203.02155 eq. 1).

Labels. With `data: rollout`, the frozen team answers train questions and the environment grades the answers. A turn's label is its
`Turn.score` if the workflow scored it; else the terminal reward of its agent, for the agent's last turn. Turns without a label
are excluded. With `data: recorded`, the data are recorded solutions with labels (environment `labelled`).

With `labels: process`, each step of a worked solution has a label too (2305.20050), found by recomputing the step
(`grading.math.steps`, without human labels or models). The verifier then also gives a score after each step, which is
trained to show whether all steps so far are correct. The score at the end, which is the reward, can build on these scores.

Balance. With `balance: question`, correct and incorrect answers to one question have equal total weight. A question with only
correct or only incorrect answers has weight 0, because it would teach only how easy the question is.

Deviations from the papers:

- 2110.14168 scores every token; here there is one score at the end, or one after each step.
- 2305.20050 scores a solution by the product over its steps; here the score at the end is trained on the outcome.
- Weights replace MAPoRL's resampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from kapelle.algorithm import (
    Algorithm,
    Credit,
    CreditMemory,
    CriticSpec,
    Data,
    Loss,
    Outputs,
    Targets,
    Update,
)
from kapelle.algorithms.signals.critic_values import CriticValues
from kapelle.environments.grading.math.steps import worked_steps
from kapelle.functional.calibration import Kind
from kapelle.functional.masking import segment_mean, segment_sum
from kapelle.functional.preferences import bradley_terry_loss, verifier_loss
from kapelle.functional.statistics import area_under_curve
from kapelle.rows import Column, Signals, TurnKey, label_of, turns_of
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.settings.base import Settings
from kapelle.types import Group


class Verifier(Settings):
    """Settings of the training of a verifier."""

    name: Literal["verifier"] = "verifier"
    data: Literal["rollout", "recorded"] = "rollout"
    """Source of answers: `rollout` (graded answers of the frozen team) or `recorded` (the environment's solutions)."""
    objective: Literal["labels", "pairs"] = "labels"
    """Loss: cross-entropy per answer (`labels`), or Bradley–Terry over pairs of a correct and an incorrect one (`pairs`)."""
    labels: Literal["outcome", "process"] = "outcome"
    """Labels: whether the answer is correct (`outcome`); with `process` also, after each equation of a worked solution
    (`120+12=132`), whether all steps so far are correct, by recomputation."""
    balance: Literal["question", "none"] = "question"
    """Balance of correct and incorrect answers, with `objective: labels`; pairs are balanced by construction."""
    calibration: Kind = "none"
    """Mapping from score to probability: σ(score) with `none`; `temperature` and `isotonic` are fitted on half of the held-out
    questions and evaluated on the other half (`metrics.calibration`). It is saved with the verifier and used for rewards."""
    group_size: int = Field(default=8, ge=1)
    """Episodes per question."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the samples of a step."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps into which each pass is divided."""

    def build(self) -> Algorithm:
        """Return the algorithm."""
        loss = bradley_terry_over_pairs if self.objective == "pairs" else weighted_cross_entropy
        ends = step_ends if self.labels == "process" else None
        return Algorithm(
            name=self.name,
            policy_loss=_no_policy,
            data=Data("rollout" if self.data == "rollout" else "demonstrations", self.group_size),
            needs=(
                CriticValues(
                    CriticSpec(
                        "answer", loss, "shared", everyone=True, ends=ends, calibration=self.calibration
                    )
                ),
            ),
            update=Update(self.epochs, self.minibatches),
            memory=lambda team, seed: VerifierTargets(self),
            lacks="no question has both a correct and an incorrect answer",
        )


class VerifierTargets(CreditMemory):
    """Targets of a verifier; its metrics show how well it separated correct from incorrect answers before the update."""

    def __init__(self, settings: Verifier) -> None:
        self._settings = settings
        self._metrics: dict[str, float] = {}

    def __call__(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return each labelled turn's target, and its weight or pair; turns without a label have weight 0."""
        credit: dict[TurnKey, Credit] = {}
        labels: dict[TurnKey, float] = {}
        targets: dict[TurnKey, Tensor] = {}
        for key, turn in turns_of(groups, trained_only=False):
            credit[key] = Credit(torch.zeros(1), weight=0.0)
            label = label_of(groups[key.group].episodes[key.episode], turn)
            if label is None:
                continue
            labels[key] = label
            steps = 0 if self._settings.labels == "outcome" else len(signals.values[key]) - 1
            worked = worked_steps(groups[key.group].task.question, turn.text) if steps else []
            # If there are more steps than tokens, the first steps have no value.
            targets[key] = torch.tensor([*(float(step.right) for step in worked[-steps:]), label])
        pairs = 0
        for g in range(len(groups)):
            own = {key: label for key, label in labels.items() if key.group == g}
            if self._settings.objective == "pairs":
                # The k-th correct answer is paired with the k-th incorrect one.
                correct = [key for key, label in own.items() if label > 0.5]
                incorrect = [key for key, label in own.items() if label <= 0.5]
                for pair in zip(correct, incorrect, strict=False):
                    for key, target in zip(pair, (1.0, 0.0), strict=True):
                        targets[key][-1] = target
                        credit[key] = Credit(torch.zeros(1), targets[key], pair=pairs)
                    pairs += 1
            else:
                balance = self._settings.balance == "question"
                weights = balanced(list(own.values())) if balance else [1.0] * len(own)
                for key, weight in zip(own, weights, strict=True):
                    if weight > 0:
                        credit[key] = Credit(torch.zeros(1), targets[key], weight)
        self._metrics = {}
        if labels:
            is_correct = [label > 0.5 for label in labels.values()]
            self._metrics["verifier_right_share"] = sum(is_correct) / len(is_correct)
            area = area_under_curve([float(signals.values[key][-1]) for key in labels], is_correct)
            if area is not None:
                self._metrics["verifier_auc"] = area
        return credit

    def metrics(self) -> Mapping[str, float]:
        """Return the share of correct answers and the area under the curve before the update."""
        return self._metrics


def balanced(labels: Sequence[float]) -> list[float]:
    """Return weights of one question's answers: correct (label > ½) and incorrect ones each sum to half their number.

    All weights are 0 if one kind is missing.
    """
    correct = sum(label > 0.5 for label in labels)
    incorrect = len(labels) - correct
    if not correct or not incorrect:
        return [0.0] * len(labels)
    return [len(labels) / (2 * (correct if label > 0.5 else incorrect)) for label in labels]


def weighted_cross_entropy(values_K: Tensor, targets: Targets) -> Loss:
    """Return Σ w·BCE(value, label) over the counted answers, Σ w, and the accuracy."""
    weight_K = targets[Column.WEIGHT] * targets.mask_K
    total = (verifier_loss(values_K, targets[Column.RETURN]) * weight_K).sum()
    agree_K = (values_K.detach() > 0) == (targets[Column.RETURN] > 0.5)
    weight = weight_K.sum()
    return Loss(total, weight, {"verifier_accuracy": ((agree_K * weight_K).sum(), weight)})


def bradley_terry_over_pairs(values_K: Tensor, targets: Targets) -> Loss:
    """Return Σ −log σ(s_correct − s_incorrect) over the batch's pairs, and their number.

    The score of an answer is its last one. With `labels: process`, the scores after its steps learn by cross-entropy,
    averaged over the steps of a pair, so that these losses have the same total weight as the pairs.
    """
    assert targets.pair_S is not None, "every sequence belongs to a pair"
    numbers_N, pair_S = torch.unique(targets.pair_S, return_inverse=True)
    pairs = len(numbers_N)
    pair_K = pair_S[targets.segment_K]
    last_K = torch.ones_like(pair_K, dtype=torch.bool)
    last_K[:-1] = targets.segment_K[1:] != targets.segment_K[:-1]
    correct_K = targets[Column.RETURN] > 0.5
    correct_N = segment_sum(values_K, correct_K & last_K, pair_K, pairs)
    incorrect_N = segment_sum(values_K, ~correct_K & last_K, pair_K, pairs)
    assert 2 * pairs == int(last_K.sum()), "both sides of a pair are in one batch"
    result = bradley_terry_loss(correct_N, incorrect_N)
    weight = values_K.new_tensor(float(pairs)).detach()
    ordered = (result.margin_N > 0).to(weight.dtype).sum()
    steps_N = segment_mean(verifier_loss(values_K, targets[Column.RETURN]), ~last_K, pair_K, pairs)
    return Loss((result.loss_N + steps_N).sum(), weight, {"verifier_accuracy": (ordered, weight)})


def step_ends(question: str, text: str) -> list[int]:
    """Return the positions, in characters, at which the steps of a worked solution end."""
    return [step.end for step in worked_steps(question, text)]


def _no_policy(outputs: Outputs, targets: Targets) -> Loss:
    raise AssertionError("a verifier trains no policy")
