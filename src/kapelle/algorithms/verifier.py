"""Train a verifier: a model that estimates the probability that an answer is correct.

The verifier is trained on the answers of a frozen team. A scalar head with a separate LoRA reads the question and one answer,
and returns one score at the last token of the answer. The sigmoid σ(score) is the probability that the answer is correct.

- `objective: labels`: binary cross-entropy with the label of each turn (as in MAPoRL, arXiv:2502.18439, and in
  arXiv:2110.14168).
- `objective: pairs`: −log σ(s_correct − s_incorrect) over answers to one question (Bradley–Terry, as in arXiv:2203.02155, eq.
  1).

Labels. With `data: rollout`, the frozen team answers train questions and the environment grades the answers. The label of a
turn is its `Turn.score` if the workflow scored the turn. Otherwise, the label of an agent's last turn is the agent's terminal
reward. Turns without a label are excluded. With `data: recorded`, the data are recorded solutions with labels (environment
`labelled`).

With `labels: process`, each step of a worked solution also has a label (arXiv:2305.20050), which is found by recomputing the
step (`grading.math.steps`, without human labels or models). The verifier then also returns a score after each step, which is
trained to predict whether all steps so far are correct. The score at the end is the reward.

Balance. With `balance: question`, the correct and the incorrect answers to a question have equal total weight. A question
with only correct or only incorrect answers has weight 0, because the verifier would learn from it only how easy the question
is.

Deviations from the papers:

- arXiv:2110.14168 scores every token; this verifier returns one score at the end of an answer, or one after each step.
- arXiv:2305.20050 scores a solution by the product over its steps; the final score of this verifier is trained on the
  outcome.
- Weights of answers replace the resampling of MAPoRL.
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
    """Settings of the algorithm that trains a verifier."""

    name: Literal["verifier"] = "verifier"
    data: Literal["rollout", "recorded"] = "rollout"
    """The source of the answers: graded answers of the frozen team (`rollout`), or recorded solutions of the environment
    (`recorded`)."""
    objective: Literal["labels", "pairs"] = "labels"
    """The loss function: cross-entropy per answer (`labels`), or the Bradley–Terry loss over pairs of a correct and an
    incorrect answer (`pairs`)."""
    labels: Literal["outcome", "process"] = "outcome"
    """What is labelled. With `outcome`, the label states whether the answer is correct. With `process`, there is also a label
    after each equation of a worked solution (`120+12=132`), which states whether all steps so far are correct according to a
    recomputation."""
    balance: Literal["question", "none"] = "question"
    """Whether the correct and the incorrect answers to a question have equal total weight (`question`) or all answers have
    equal weight (`none`). This setting is used only with `objective: labels`; pairs are balanced by construction."""
    calibration: Kind = "none"
    """How a score is converted to a probability. With `none`, the probability is σ(score). The calibrations `temperature` and
    `isotonic` are fitted on half of the held-out questions and evaluated on the other half (`metrics.calibration`). The
    calibration is saved with the verifier and used for rewards."""
    group_size: int = Field(default=8, ge=1)
    """The number of episodes per question."""
    epochs: int = Field(default=1, ge=1)
    """The number of passes over the samples of each step."""
    minibatches: int = Field(default=1, ge=1)
    """The number of optimiser steps into which each pass over the samples is divided."""

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
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
    """Compute the targets of a verifier.

    The metrics show how well the verifier separated correct from incorrect answers before the update.
    """

    def __init__(self, settings: Verifier) -> None:
        self._settings = settings
        self._metrics: dict[str, float] = {}

    def __call__(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return the target of each labelled turn with its weight or the number of its pair. Turns without a label have weight 0."""
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
        """Return the share of correct answers, and the area under the ROC curve (AUC) before the update."""
        return self._metrics


def balanced(labels: Sequence[float]) -> list[float]:
    """Return weights for the answers to one question.

    The weights of the correct answers (label > ½) and those of the incorrect answers each sum to half the number of answers.
    All weights are 0 if all answers are correct or all are incorrect.
    """
    correct = sum(label > 0.5 for label in labels)
    incorrect = len(labels) - correct
    if not correct or not incorrect:
        return [0.0] * len(labels)
    return [len(labels) / (2 * (correct if label > 0.5 else incorrect)) for label in labels]


def weighted_cross_entropy(values_K: Tensor, targets: Targets) -> Loss:
    """Return the weighted sum of the binary cross-entropy over the answers, the sum of the weights, and the accuracy."""
    weight_K = targets[Column.WEIGHT] * targets.mask_K
    total = (verifier_loss(values_K, targets[Column.RETURN]) * weight_K).sum()
    agree_K = (values_K.detach() > 0) == (targets[Column.RETURN] > 0.5)
    weight = weight_K.sum()
    return Loss(total, weight, {"verifier_accuracy": ((agree_K * weight_K).sum(), weight)})


def bradley_terry_over_pairs(values_K: Tensor, targets: Targets) -> Loss:
    """Return the sum of −log σ(s_correct − s_incorrect) over the pairs of a batch, and the number of pairs.

    The score of an answer is the score at its end. With `labels: process`, the scores after the steps are trained with
    cross-entropy, averaged over the steps of a pair, so that these losses have the same total weight as the losses of the
    pairs.
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
    """Return the positions (in characters) at which the steps of a worked solution end."""
    return [step.end for step in worked_steps(question, text)]


def _no_policy(outputs: Outputs, targets: Targets) -> Loss:
    raise AssertionError("a verifier trains no policy")
