"""Several processes learn what one learns: every algorithm, at the same batch, to 1e-5 after three steps in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tests.algorithms.test_every_algorithm import run_of
from tests.support.ranks import run_ranks
from tests.support.tiny import frozen_copy, learners_of, same_bits
from torch import Tensor

from kapelle import Trainer
from kapelle.algorithm import BUILTIN_ALGORITHMS
from kapelle.models.language_model import load_language_model
from kapelle.settings.schema import ModelConfig

ROUNDING = 1e-5
STEPS = 3

OTHERWISE = ("time/", "preference_accuracy/")
"""Metrics that rounding may change: the sign of a difference that is zero."""

Weights = dict[str, Mapping[str, Tensor]]
Case = tuple[str, Mapping[str, Any]]
"""An algorithm, and what is set besides `run_of`, section by section."""


def learned(case: Case, steps: int = STEPS) -> tuple[Weights, list[dict[str, float]]]:
    """Return what a run learns, and its rows without times."""
    name, over = case
    settings = run_of(name)
    settings["optimizer"] = {"lr": 1e-2, "eps": 1e-4}  # no division by rounding
    for section, values in over.items():
        settings[section] = {**settings.get(section, {}), **values}
    if name == "distill":
        another = {"embedded": {**settings["model"]["embedded"], "seed": 9}}
        settings["models"] = {"teacher": load_language_model(ModelConfig.model_validate(another))}
    with Trainer(**settings) as trainer:
        rows = [dict(step.metrics) for step in trainer.steps(steps)]
        weights: Weights = {
            name: frozen_copy(each.parameters) for name, each in learners_of(trainer.engine).items()
        }
    return weights, [{k: v for k, v in row.items() if not k.startswith(OTHERWISE)} for row in rows]


def learn_all(cases: Sequence[Case]) -> list[tuple[Weights, list[dict[str, float]]]]:
    return [learned(case) for case in cases]


def furthest(one: Weights, other: Weights) -> float:
    assert one.keys() == other.keys()
    return max(
        float((tensor - other[name][key]).abs().max())
        for name, weights in one.items()
        for key, tensor in weights.items()
    )


def check(cases: Sequence[Case], ranks: int) -> None:
    every = run_ranks(ranks, learn_all, cases)
    for number, case in enumerate(cases):
        alone, rows = learned(case)
        begun, _ = learned(case, 0)
        assert furthest(alone, begun) > 1e-3, case
        for answer in every:
            assert not isinstance(answer, str), answer
            weights, theirs = answer[number]
            assert furthest(weights, alone) <= ROUNDING, case
            assert same_bits(weights, every[0][number][0])
            for row, other in zip(rows, theirs, strict=True):
                assert list(row) == list(other)
                assert row == pytest.approx(other, rel=1e-3, abs=1e-4), case


OFTEN = {"training": {"tasks_per_step": 3, "microbatch_tokens": 64}}
FEW: list[Case] = [
    ("grpo", {"training": {"tasks_per_step": 3}}),
    ("ppo", {"algorithm": {"epochs": 2, "minibatches": 3}, **OFTEN}),
    ("happo", {"training": {"tasks_per_step": 3}, "team": {"lora": {"dropout": 0.3}}}),
    ("dpo", {"training": {"tasks_per_step": 3}}),
    ("qmix", {}),
    ("reinforce_plus_plus", {"training": {"tasks_per_step": 1}}),
]


@pytest.mark.slow
def test_two_processes_learn_what_one_learns() -> None:
    check(FEW, 2)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_algorithm(ranks: int) -> None:
    check([(name, {}) for name in BUILTIN_ALGORITHMS] + FEW, ranks)
