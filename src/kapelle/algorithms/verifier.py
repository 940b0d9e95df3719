"""A verifier: how likely an answer is right, learned from answers of a team that is not trained.

A scalar head on a LoRA of its own reads the question and one answer and gives one score at the answer's last
token; σ(score) is the probability that the answer is right. `labels` is binary cross-entropy against each turn's
label (the verifier of MAPoRL, 2502.18439, and of 2110.14168), `pairs` is −log σ(s_right − s_wrong) over answers
to one question (Bradley–Terry, as in 2203.02155 eq. 1).

Labels. `data: rollout`: the frozen team plays train questions and the environment grades; a turn's label is its
`Turn.score` where the workflow scored it, else what its agent was paid at the end, for the agent's last turn.
Turns without a label teach nothing. `data: recorded`: recorded solutions with their labels (environment
`labelled`).

Balance. With `balance: question` right and wrong answers to one question weigh the same in sum, and a question
whose answers are all right or all wrong weighs nothing: it would only teach which questions are easy.

Deviations: 2110.14168 scores every token; here there is one score at the end. Weights take the place of MAPoRL's
resampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from pydantic import Field

from kapelle.algorithm import Algorithm, Credit, CriticSpec, Data, Loss, Outputs, Targets, Update
from kapelle.functional.masking import segment_sum
from kapelle.functional.preferences import bradley_terry_loss, verifier_loss
from kapelle.metrics.statistics import area_under_curve
from kapelle.rows import Column, Signals, TurnKey, label_of, turns_of
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.settings.base import Settings
from kapelle.signals.critic_values import CriticValues
from kapelle.types import Group


class Verifier(Settings):
    """Settings of a verifier's training."""

    name: Literal["verifier"] = "verifier"
    data: Literal["rollout", "recorded"] = "rollout"
    """`rollout`: the frozen team's answers, graded. `recorded`: solutions that the environment has recorded."""
    objective: Literal["labels", "pairs"] = "labels"
    """`labels`: right or wrong, one by one. `pairs`: a right one over a wrong one."""
    balance: Literal["question", "none"] = "question"
    """Read with `objective: labels`; pairs are balanced by construction."""
    group_size: int = Field(default=8, ge=1)
    """Episodes per question."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the samples of a step."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps into which each pass is divided."""

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        loss = bradley_terry_over_pairs if self.objective == "pairs" else weighted_cross_entropy
        return Algorithm(
            name=self.name,
            policy_loss=_no_policy,
            data=Data("rollout" if self.data == "rollout" else "demonstrations", self.group_size),
            needs=(CriticValues(CriticSpec("answer", loss, "shared", everyone=True)),),
            update=Update(self.epochs, self.minibatches),
            memory=lambda team, seed: VerifierTargets(self),
            lacks="no question has a right and a wrong answer",
        )


class Labelled(NamedTuple):
    """A turn with its label."""

    key: TurnKey
    label: float


class VerifierTargets:
    """The targets of a verifier, and how well it separated right from wrong before the update."""

    def __init__(self, settings: Verifier) -> None:
        self._settings = settings
        self._row: dict[str, float] = {}

    def __call__(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return each labelled turn's label as the target, and its weight or pair; others have no target."""
        turns = {
            key: label_of(groups[key.group].episodes[key.episode], turn)
            for key, turn in turns_of(groups, trained_only=False)
        }
        credit = {key: Credit(torch.zeros(1), weight=0.0) for key in turns}
        labelled = [Labelled(key, label) for key, label in turns.items() if label is not None]
        for g in range(len(groups)):
            own = [each for each in labelled if each.key.group == g]
            give = self._paired if self._settings.objective == "pairs" else self._weighed
            credit |= give(own, sum(c.pair is not None for c in credit.values()) // 2)
        self._row = _how_well(labelled, signals)
        return credit

    def _weighed(self, own: Sequence[Labelled], _pairs: int) -> dict[TurnKey, Credit]:
        weights = balanced([each.label for each in own]) if self._settings.balance == "question" else None
        return {
            each.key: Credit(torch.zeros(1), torch.tensor([each.label]), weight)
            for each, weight in zip(own, weights or [1.0] * len(own), strict=True)
            if weight > 0
        }

    def _paired(self, own: Sequence[Labelled], pairs: int) -> dict[TurnKey, Credit]:
        """Pair the k-th right answer with the k-th wrong one."""
        right = [each for each in own if each.label > 0.5]
        wrong = [each for each in own if each.label <= 0.5]
        return {
            each.key: Credit(torch.zeros(1), torch.tensor([target]), pair=pairs + k)
            for k, both in enumerate(zip(right, wrong, strict=False))
            for each, target in zip(both, (1.0, 0.0), strict=True)
        }

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


def _how_well(labelled: Sequence[Labelled], signals: Signals) -> dict[str, float]:
    if not labelled:
        return {}
    right = [each.label > 0.5 for each in labelled]
    row = {"verifier_right_share": sum(right) / len(right)}
    area = area_under_curve([float(signals.values[each.key]) for each in labelled], right)
    return row if area is None else {**row, "verifier_auc": area}


def weighted_cross_entropy(values_K: Tensor, targets: Targets) -> Loss:
    """Return Σ w·BCE(value, label) over the counted answers, Σ w, and the share judged rightly."""
    weight_K = targets[Column.WEIGHT] * targets.mask_K
    total = (verifier_loss(values_K, targets[Column.RETURN]) * weight_K).sum()
    agree_K = (values_K.detach() > 0) == (targets[Column.RETURN] > 0.5)
    weight = weight_K.sum()
    return Loss(total, weight, {"verifier_accuracy": ((agree_K * weight_K).sum(), weight)})


def bradley_terry_over_pairs(values_K: Tensor, targets: Targets) -> Loss:
    """Return Σ −log σ(s_right − s_wrong) over the batch's pairs, and how many they are."""
    assert targets.pair_S is not None, "pairs are compared"
    numbers_N, pair_S = torch.unique(targets.pair_S, return_inverse=True)
    pair_K = pair_S[targets.segment_K]
    right_K = targets[Column.RETURN] > 0.5
    right_N = segment_sum(values_K, right_K, pair_K, len(numbers_N))
    wrong_N = segment_sum(values_K, ~right_K, pair_K, len(numbers_N))
    assert 2 * len(numbers_N) == len(pair_K), "both sides of a pair are in one batch"
    result = bradley_terry_loss(right_N, wrong_N)
    weight = values_K.new_tensor(float(len(numbers_N))).detach()
    right = (result.margin_N > 0).to(weight.dtype).sum()
    return Loss(result.loss_N.sum(), weight, {"verifier_accuracy": (right, weight)})


def _no_policy(outputs: Outputs, targets: Targets) -> Loss:
    raise AssertionError("a verifier trains no policy; `checks` refuses a team that does")
