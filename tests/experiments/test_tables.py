"""Teams of tables: what they sample is what the trainer scores, and their updates are those of the exact gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from experiments.lab import Arm, TableRun, exact_gradient, moves, recipe_of

GRPO: Mapping[str, Any] = {"name": "rloo", "group_size": 4, "team_reward": "sum"}


def run_of(game: Mapping[str, Any], **over: Any) -> TableRun:
    return TableRun(recipe_of(game, Arm(GRPO), 1.0, 0, **over))


@pytest.mark.parametrize(
    ("game", "chance"),
    [
        ({"name": "sum_game", "seats": 3}, 0.25),
        ({"name": "sum_game", "seats": 2, "pays": "all"}, 1 / 16),
        ({"name": "relay", "seats": 2}, 1 / 16),
        ({"name": "essay", "seats": 1, "letters": 2, "longest": 3}, 1 / 3),  # A, B or the end
        ({"name": "matrix", "game": "climbing"}, 2 * (11 - 30 - 30 + 7 + 6 + 5) / 9),
    ],
)
def test_before_training_a_team_is_worth_what_chance_is(game: Mapping[str, Any], chance: float) -> None:
    assert run_of(game).value == pytest.approx(chance)


def test_what_was_sampled_is_what_the_trainer_scores() -> None:
    run = run_of({"name": "essay", "seats": 2, "letters": 3, "longest": 4})
    for _ in range(3):
        _, metrics = run.step()
        assert metrics["parity/max"] < 1e-5


@pytest.mark.slow
def test_an_update_is_the_exact_gradient_on_average() -> None:
    run = run_of({"name": "relay", "seats": 2, "letters": 2})
    exact = exact_gradient(run)
    found = [moved for moved, _ in moves(run, 60)]
    for name, gradient in exact.items():
        moved = torch.stack([each[name] for each in found])
        mean, error = moved.mean(0), moved.std(0) / math.sqrt(len(found))
        assert bool((error.max() > 0) & (gradient.abs().max() > 0.01))
        # RLOO's mean over an agent's tokens is ∇J: one token per episode.
        assert bool(((mean - gradient).abs() <= 5 * error + 1e-6).all()), name


def test_a_teacher_of_tables_stays_as_it_starts_and_demonstrations_are_the_experts() -> None:
    game = {"name": "experiments.relays:ShownRelay", "seats": 2, "letters": 3}
    for algorithm in ({"name": "distill", "teacher": "teacher"}, {"name": "sft"}):
        recipe = recipe_of(game, Arm(algorithm), 8.0, 0, training={"tasks_per_step": 8})
        run = TableRun(recipe, teacher=lambda seen: {"B": 3.0} if seen.startswith("2/") else {"A": 3.0})
        for _ in range(30):
            run.step()
        assert run.say(0, "1/2")["A"] > 0.8
        assert run.say(1, "2/2 A")["B"] > 0.8
        # Fine-tuning sees no wrong letter; distillation does, because the first agent gives any letter.
        assert (run.say(1, "2/2 C")["B"] == pytest.approx(1 / 3)) == (algorithm["name"] == "sft")
