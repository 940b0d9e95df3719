"""Where regularised self-play settles: at the quantal response equilibrium, and with a reference that moves at an equilibrium."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
from experiments.lab import Arm, TableRun, recipe_of

LETTERS = "RPS"
WINS = {"RS": 2.0, "PR": 1.0, "SP": 1.0}
"""A rock wins 2: the equilibrium draws rock, paper and scissors with 1/4, 1/2 and 1/4."""
PAID = {a + b: WINS.get(a + b, 0.0) - WINS.get(b + a, 0.0) for a, b in product(LETTERS, repeat=2)}


def quantal(temperature: float) -> list[float]:
    """Return the strategy that is the softmax of its moves' values against itself over the temperature."""
    chances = [1 / 3] * 3
    for _ in range(20_000):
        values = [sum(chances[k] * PAID[own + LETTERS[k]] for k in range(3)) for own in LETTERS]
        likes = [math.exp(value / temperature) for value in values]
        chances = [0.99 * p + 0.01 * like / sum(likes) for p, like in zip(chances, likes, strict=True)]
    return chances


def settled(loss: dict[str, Any], reference_every: int = 0) -> list[list[float]]:
    """Return how both players play on average in the last quarter of 200 steps, from a start that hardly ever says paper."""
    steps = 200
    game = {
        "name": "matrix",
        "game": "custom",
        "rules": "none",
        "payoffs": {j: (w, -w) for j, w in PAID.items()},
    }
    grpo = {"name": "grpo", "group_size": 64, "team_reward": "individual", "scale": "none"}
    recipe = recipe_of(game, Arm({**grpo, "loss": loss, "reference_every": reference_every}), 0.1, 0)
    recipe["optimizer"] = {"lr": 0.1, "betas": (0.0, 0.95), "max_grad_norm": None, "schedule": "linear"}
    recipe["training"]["steps"] = steps
    run = TableRun(recipe, lambda seen: {"P": -2.0})
    total = [[0.0] * 3, [0.0] * 3]
    for step in range(steps):
        run.step()
        if step >= steps * 3 // 4:
            total = [
                [sum_ + run.likes(s, x) for sum_, x in zip(own, LETTERS, strict=True)]
                for s, own in enumerate(total)
            ]
    return [[value / (steps // 4) for value in own] for own in total]


def apart(found: list[list[float]], point: list[float]) -> float:
    """Return the total variation distance to a point, mean of both players."""
    return sum(abs(a - b) for own in found for a, b in zip(own, point, strict=True)) / 4


def test_the_quantal_response_is_the_softmax_of_its_own_values() -> None:
    assert quantal(100.0) == pytest.approx([1 / 3] * 3, abs=0.01)
    rock, paper, scissors = quantal(0.3)
    values = (2 * scissors - paper, rock - scissors, paper - 2 * rock)
    total = sum(math.exp(value / 0.3) for value in values)
    assert [math.exp(value / 0.3) / total for value in values] == pytest.approx([rock, paper, scissors])


@pytest.mark.slow
def test_an_entropy_bonus_draws_both_players_to_the_quantal_response() -> None:
    assert apart(settled({"entropy_coefficient": 0.3}), quantal(0.3)) < 0.08


@pytest.mark.slow
def test_a_reference_that_follows_draws_nearer_to_the_equilibrium_than_one_that_stays() -> None:
    """The start says paper in 6 of 100 games; a penalty that stays holds play there, one that is moved lets it go on."""
    loss = {"kl_coefficient": 0.5, "kl_estimator": "k2"}
    equilibrium = [1 / 4, 1 / 2, 1 / 4]
    stays, follows = settled(loss), settled(loss, reference_every=20)
    assert apart(stays, equilibrium) > 0.3
    assert apart(follows, equilibrium) < 0.2
