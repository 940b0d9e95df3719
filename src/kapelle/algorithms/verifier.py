"""A verifier: how likely an answer is right, learned from the answers of a frozen team.

A scalar head on a LoRA of its own reads the question and one answer and gives one score at the answer's last
token; σ(score) is the probability that the answer is right. `labels` is binary cross-entropy against each turn's
label (the verifier of MAPoRL, 2502.18439, and of 2110.14168), `pairs` is −log σ(s_right − s_wrong) over answers
to one question (Bradley–Terry, as in 2203.02155 eq. 1).

Labels. `data: rollout`: the frozen team plays train questions and the environment grades; a turn's label is its
`Turn.score` where the workflow scored it, else what its agent was paid at the end, for the agent's last turn.
Turns without a label are left out. `data: recorded`: recorded solutions with their labels (environment
`labelled`). With `labels: process` each step of a worked solution has a label too (2305.20050), found by working it out
again (`grading.math.steps`, no person or model is asked): the verifier also gives a score after each step, which learns whether
all steps so far are right. The score at the end, which is what pays, then stands on scores that say where it went wrong.

Balance. With `balance: question` right and wrong answers to one question weigh the same in sum, and a question
whose answers are all right or all wrong has weight 0: it would only teach which questions are easy.

Deviations: 2110.14168 scores every token; here there is one score at the end, or after each step. 2305.20050 takes the product
of a solution's steps for its score; here the score at the end has learned from the outcome. Weights take the place of MAPoRL's
resampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from kapelle.algorithm import Algorithm, Credit, CriticSpec, Data, Loss, Outputs, Targets, Update
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
    """Settings of a verifier's training."""

    name: Literal["verifier"] = "verifier"
    data: Literal["rollout", "recorded"] = "rollout"
    """`rollout`: the frozen team's answers, graded. `recorded`: solutions that the environment has recorded."""
    objective: Literal["labels", "pairs"] = "labels"
    """`labels`: right or wrong, one by one. `pairs`: a right one over a wrong one."""
    labels: Literal["outcome", "process"] = "outcome"
    """`outcome`: whether the answer is right. `process`: that, and after each step of a worked solution (`120+12=132`) whether all
    steps so far are right, by recomputation; a solution without equations has its outcome alone."""
    balance: Literal["question", "none"] = "question"
    """Balance of right and wrong answers, with `objective: labels`; pairs are balanced by construction."""
    calibration: Kind = "none"
    """How a score becomes the probability that an answer is right: σ(score) with `none`; `temperature` and `isotonic` are fitted on
    half of the held-out questions and measured on the others (`metrics.calibration`). Saved with the verifier, and used wherever it pays."""
    group_size: int = Field(default=8, ge=1)
    """Episodes per question."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the samples of a step."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps into which each pass is divided."""

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
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
            lacks="no question has a right and a wrong answer",
        )


class VerifierTargets:
    """The targets of a verifier, and how well it separated right from wrong before the update."""

    def __init__(self, settings: Verifier) -> None:
        self._settings = settings
        self._row: dict[str, float] = {}

    def __call__(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return each labelled turn's label as the target, and its weight or pair; others have no target."""
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
            # The first steps have no value where there are more of them than tokens.
            targets[key] = torch.tensor([*(float(step.right) for step in worked[-steps:]), label])
        pairs = 0
        for g in range(len(groups)):
            own = {key: label for key, label in labels.items() if key.group == g}
            if self._settings.objective == "pairs":
                # The k-th right answer is paired with the k-th wrong one.
                right = [key for key, label in own.items() if label > 0.5]
                wrong = [key for key, label in own.items() if label <= 0.5]
                for both in zip(right, wrong, strict=False):
                    for key, target in zip(both, (1.0, 0.0), strict=True):
                        targets[key][-1] = target
                        credit[key] = Credit(torch.zeros(1), targets[key], pair=pairs)
                    pairs += 1
            else:
                balance = self._settings.balance == "question"
                weights = balanced(list(own.values())) if balance else [1.0] * len(own)
                for key, weight in zip(own, weights, strict=True):
                    if weight > 0:
                        credit[key] = Credit(torch.zeros(1), targets[key], weight)
        self._row = {}
        if labels:
            is_right = [label > 0.5 for label in labels.values()]
            self._row["verifier_right_share"] = sum(is_right) / len(is_right)
            area = area_under_curve([float(signals.values[key][-1]) for key in labels], is_right)
            if area is not None:
                self._row["verifier_auc"] = area
        return credit

    def metrics(self) -> Mapping[str, float]:
        """Return the share of right answers and the area under the curve before the update."""
        return self._row

    def state(self) -> dict[str, object]:
        """Return nothing: there is no memory."""
        return {}

    def load_state(self, state: Mapping[str, object]) -> None:
        """Do nothing: there is no memory."""


def balanced(labels: Sequence[float]) -> list[float]:
    """Return weights of one question's answers: right and wrong (label > ½) each sum to half the number of answers.

    All are 0 when one kind is missing.
    """
    right = sum(label > 0.5 for label in labels)
    wrong = len(labels) - right
    if not right or not wrong:
        return [0.0] * len(labels)
    return [len(labels) / (2 * (right if label > 0.5 else wrong)) for label in labels]


def weighted_cross_entropy(values_K: Tensor, targets: Targets) -> Loss:
    """Return Σ w·BCE(value, label) over the counted answers, Σ w, and the share judged rightly."""
    weight_K = targets[Column.WEIGHT] * targets.mask_K
    total = (verifier_loss(values_K, targets[Column.RETURN]) * weight_K).sum()
    agree_K = (values_K.detach() > 0) == (targets[Column.RETURN] > 0.5)
    weight = weight_K.sum()
    return Loss(total, weight, {"verifier_accuracy": ((agree_K * weight_K).sum(), weight)})


def bradley_terry_over_pairs(values_K: Tensor, targets: Targets) -> Loss:
    """Return Σ −log σ(s_right − s_wrong) over the batch's pairs, and how many they are.

    The score of an answer is its last one. Those after its steps, with `labels: process`, learn by cross-entropy, and weigh
    together as much as the pairs: a pair's steps are averaged.
    """
    assert targets.pair_S is not None, "pairs are compared"
    numbers_N, pair_S = torch.unique(targets.pair_S, return_inverse=True)
    pairs = len(numbers_N)
    pair_K = pair_S[targets.segment_K]
    last_K = torch.ones_like(pair_K, dtype=torch.bool)
    last_K[:-1] = targets.segment_K[1:] != targets.segment_K[:-1]
    right_K = targets[Column.RETURN] > 0.5
    right_N = segment_sum(values_K, right_K & last_K, pair_K, pairs)
    wrong_N = segment_sum(values_K, ~right_K & last_K, pair_K, pairs)
    assert 2 * pairs == int(last_K.sum()), "both sides of a pair are in one batch"
    result = bradley_terry_loss(right_N, wrong_N)
    weight = values_K.new_tensor(float(pairs)).detach()
    right = (result.margin_N > 0).to(weight.dtype).sum()
    steps_N = segment_mean(verifier_loss(values_K, targets[Column.RETURN]), ~last_K, pair_K, pairs)
    return Loss((result.loss_N + steps_N).sum(), weight, {"verifier_accuracy": (right, weight)})


def step_ends(question: str, text: str) -> list[int]:
    """Return where the steps of a worked solution end, in characters."""
    return [step.end for step in worked_steps(question, text)]


def _no_policy(outputs: Outputs, targets: Targets) -> Loss:
    raise AssertionError("a verifier trains no policy; `checks` refuses a team that does")
