"""Several processes learn what one learns: every algorithm, at the same batch, to 1e-5 after three steps in float32."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.algorithms.test_every_algorithm import run_of
from tests.support.ranks import run_ranks
from tests.support.tiny import frozen_copy, same_bits
from torch import Tensor

from kapelle import Trainer
from kapelle.algorithms import BUILTIN as ALGORITHMS
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
        critics = [critic.name for critic in trainer.team.critics.values() if critic.trained]
        weights: Weights = {
            name: {key: tensor.cpu() for key, tensor in frozen_copy(trainer.engine.weights(name)).items()}
            for name in [*trainer.team.trained, *critics]
        }
    return weights, [{k: v for k, v in row.items() if not k.startswith(OTHERWISE)} for row in rows]


SELECTING: Mapping[str, Any] = {
    "environment": {"tasks": 6, "levels": 2},
    "tasks": {
        "difficulty": {"samples": 3},
        "curriculum": {"start": 0.5, "steps": 2},
        "replay": {"groups": 2},
    },
    "training": {"critic_warmup": 1},
}
"""Choosing tasks, learning again, and critics alone at first."""


def learn_all(cases: Sequence[Case], steps: int = 3) -> list[tuple[Weights, list[dict[str, float]]]]:
    return [learned(case, steps) for case in cases]


def furthest(one: Weights, other: Weights) -> float:
    assert one.keys() == other.keys()
    return max(
        float((tensor - other[name][key]).abs().max())
        for name, weights in one.items()
        for key, tensor in weights.items()
    )


def check(cases: Sequence[Case], ranks: int, steps: int = STEPS) -> None:
    every = run_ranks(ranks, learn_all, cases, steps)
    for number, case in enumerate(cases):
        alone, rows = learned(case, steps)
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
    ("magrpo", {"team": {"sampling": {"max_tokens": 3, "regex": "[a-d]{2}"}}}),
]


FSDP: dict[str, Any] = {"train_engine": {"name": "fsdp"}}
RECOMPUTED: dict[str, Any] = {"training": {"gradient_checkpointing": True}}
SHARDED: list[Case] = [
    ("ppo", {"algorithm": {"epochs": 2, "minibatches": 3}, **OFTEN, **FSDP}),
    ("happo", {"team": {"lora": {"dropout": 0.3}}, **RECOMPUTED, **FSDP}),
    ("sft", {"team": {"sharing": "shared"}, **FSDP}),
    ("reinforce_plus_plus", {"training": {"tasks_per_step": 1}, "team": {"sharing": "shared"}, **FSDP}),
]


WHOLE: dict[str, Any] = {"team": {"sharing": "shared"}, **FSDP}
FROZEN: list[Case] = [
    ("grpo", {"algorithm": {"loss": {"kl_coefficient": 0.1}}, **WHOLE}),
    ("ppo", {"algorithm": {"gae": {"kl_in_reward": 0.05}}, **WHOLE}),
    ("qmix", WHOLE),
    ("dpo", WHOLE),
    (
        "mappo",
        {**FSDP, "team": {"sharing": "shared", "critic_train": "full"}, "optimizer": {"weight_decay": 0.1}},
    ),
]
"""All weights train beside frozen copies of them: references for a KL in the loss or in the reward, or for pairs; embedders."""


@pytest.mark.long
@pytest.mark.slow
def test_two_processes_share_out_what_trains_in_full_and_its_frozen_copies() -> None:
    check(FROZEN[:2], 2)


@pytest.mark.long
@pytest.mark.slow
def test_two_processes_with_a_part_of_the_base_each_learn_what_one_learns() -> None:
    check(SHARDED, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "steps"),
    [
        ([FEW[1], FEW[6], ("mappo", SELECTING)], 2),
        pytest.param([FEW[0], *FEW[2:6]], STEPS, marks=pytest.mark.long),
    ],
    ids=["some", "the others"],
)
def test_two_processes_learn_what_one_learns(cases: Sequence[Case], steps: int) -> None:
    check(cases, 2, steps)


LEAGUE: dict[str, Any] = {
    "league": {"population": "pfsp", "enter": {"every": 1}, "slots": 2, "exploiter": {}},
    "training": {"tasks_per_step": 4},
}


APART: dict[str, Any] = {
    "league": {
        "population": {"name": "fcp", "partners": 2, "spread": 0.2},
        "enter": {"every": 1},
        "slots": 2,
    },
    "training": {"tasks_per_step": 4},
}
"""Partners of fictitious co-play who begin apart."""
IN_LINE: dict[str, Any] = {
    "league": {
        "population": {"name": "psro", "games": 2, "learners": 2, "refresh": 1},
        "enter": {"every": 2},
        "slots": 2,
        "keep": 2,
    },
    "training": {"tasks_per_step": 4},
}
"""Two learners, one of which answers the other's draft (pipeline PSRO)."""


@pytest.mark.long
@pytest.mark.slow
def test_two_processes_play_one_league() -> None:
    check([("grpo", {**league, **engine}) for league in (LEAGUE, APART, IN_LINE) for engine in ({}, FSDP)], 2)


SPLIT: dict[str, Any] = {
    **WHOLE,
    "model": {"embedded": {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 2, "intermediate": 32}},
    "train_engine": {"name": "fsdp", "tensor_parallel": 2},
}


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_that_compute_products_together_learn_what_one_learns(ranks: int) -> None:
    full = {**SPLIT, "team": {"sharing": "shared", "critic_train": "full"}}
    formed = {**SPLIT, "team": {"sharing": "shared", "sampling": {"max_tokens": 3, "regex": "[a-d]{2}"}}}
    cases = [("grpo", {**FROZEN[0][1], **SPLIT}), ("dpo", SPLIT), ("qmix", SPLIT), ("mappo", full)]
    check([*cases, ("magrpo", formed)], ranks)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_algorithm(ranks: int) -> None:
    check([(name, {}) for name in ALGORITHMS] + FEW, ranks)


@pytest.mark.ranks
def test_every_algorithm_with_a_part_of_the_base_in_each_process() -> None:
    check([(name, FSDP) for name in ALGORITHMS] + SHARDED + FROZEN, 3)


ONE_PASS: Mapping[str, dict[str, Any]] = {"mmd": {"algorithm": {"epochs": 1}}}
"""Adam lets rounding grow with every update, and this algorithm takes four a step: its ten steps are ten updates too."""


@pytest.mark.ranks
def test_ten_steps_of_every_algorithm_with_a_part_of_the_base_in_each_process() -> None:
    long = {"training": {"steps": 10}, **FSDP}
    check([(name, {**long, **ONE_PASS.get(name, {})}) for name in ALGORITHMS], 2, 10)


def resumed(
    run: Path, steps: int, engine: str, settled: Mapping[str, Any] | None = None, *, splits: bool = False
) -> dict[str, Any]:
    """Train a run, or continue with it, up to a step; return the engine's state.

    Critics, a policy that trains all weights, and a reference of it; without critics, whose adapters no one can split, if it `splits`.
    """
    settings = run_of("grpo" if splits else "ppo")
    settings["algorithm"] |= {"loss": {"kl_coefficient": 0.1}} if splits else {"gae": {"kl_in_reward": 0.05}}
    if splits:
        settings |= {"team": {**settings["team"], "sharing": "shared"}, "model": SPLIT["model"]}
    settings["train_engine"] = {"name": engine, **(settled or {})}
    settings["checkpoint"] = {"every": 1}
    settings["training"]["steps"] = 6
    with Trainer(**settings, run_dir=run, resume=(run / "config.yaml").exists()) as trainer:
        before = deepcopy(dict(trainer.engine.state()))
        list(trainer.steps(steps))
        return {"before": before, "after": deepcopy(dict(trainer.engine.state())), "done": trainer.done}


@pytest.mark.ranks
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_what_some_ranks_have_saved_others_load_to_the_bit(engine: str, tmp_path: Path) -> None:
    saved = run_ranks(4, resumed, tmp_path / "run", 2, engine)
    for ranks in (2, 3):
        shutil.copytree(tmp_path / "run", tmp_path / str(ranks))
        loaded = run_ranks(ranks, resumed, tmp_path / str(ranks), 1, engine)
        for each in loaded:
            assert same_bits(each["before"], saved[0]["after"])
            assert each["done"] == 3
            assert same_bits(each["after"], loaded[0]["after"])
    shutil.copytree(tmp_path / "run", tmp_path / "same")
    again = run_ranks(4, resumed, tmp_path / "same", 1, engine)
    whole = run_ranks(4, resumed, tmp_path / "whole", 3, engine)
    assert same_bits(again[0]["after"], whole[0]["after"])
    alone = resumed(tmp_path / "run", 1, "torch")
    assert same_bits(alone["before"], saved[0]["after"])


OFFLOAD = {"cpu_offload": True, "reshard_after_forward": False}
PAIRS = {"tensor_parallel": 2}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ways", "splits"),
    [
        ([(1, "torch", {}), (2, "fsdp", {}), (3, "fsdp", OFFLOAD), (2, "ddp", {}), (2, "fsdp", OFFLOAD), (1, "fsdp", {})], False),
        ([(1, "torch", {}), (2, "fsdp", PAIRS), (4, "fsdp", PAIRS), (3, "fsdp", {}), (2, "fsdp", PAIRS), (2, "ddp", {})], True),
    ],
)  # fmt: skip
def test_what_was_saved_in_one_way_is_loaded_in_every_other(
    ways: Sequence[tuple[int, str, Mapping[str, Any]]], splits: bool, tmp_path: Path
) -> None:
    """Each way trains a step from what the one before it has saved, and saves it."""
    saved: Any = None
    for done, (ranks, engine, settled) in enumerate(ways, 1):
        resume = partial(resumed, tmp_path / "run", 1, engine, settled, splits=splits)
        for each in (found := [resume()] if ranks == 1 else run_ranks(ranks, resume)):
            assert not isinstance(each, str), each
            assert each["done"] == done
            assert saved is None or same_bits(each["before"], saved)
            assert same_bits(each["after"], found[0]["after"])
        saved = found[0]["after"]
