"""Where regularised self-play settles: at the quantal response equilibrium, with a reference that moves at an equilibrium, and on average nearer than at last."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
from experiments.lab import Arm, TableRun, recipe_of
from experiments.sampled_games import Credit, Plan, SampledGame

from kapelle.environments.openspiel.tree import tree_of

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


@pytest.mark.long
def test_an_entropy_bonus_draws_both_players_to_the_quantal_response() -> None:
    assert apart(settled({"entropy_coefficient": 0.3}), quantal(0.3)) < 0.08


@pytest.mark.long
def test_a_reference_that_follows_draws_nearer_to_the_equilibrium_than_one_that_stays() -> None:
    """The start says paper in 6 of 100 games; a penalty that stays holds play there, one that is moved lets it continue."""
    loss = {"kl_coefficient": 0.5, "kl_estimator": "k2"}
    equilibrium = [1 / 4, 1 / 2, 1 / 4]
    stays, follows = settled(loss), settled(loss, reference_every=20)
    assert apart(stays, equilibrium) > 0.3
    assert apart(follows, equilibrium) < 0.2


def game(name: str) -> SampledGame:
    pytest.importorskip("pyspiel")
    return SampledGame(tree_of(name))


def even(played: SampledGame) -> np.ndarray[Any, np.dtype[np.float64]]:
    return played.softmax(np.zeros(played.tree.entries))


def test_games_on_arrays_are_those_of_the_tree() -> None:
    kuhn = game("kuhn_poker")
    assert kuhn.nash_conv(even(kuhn)) == pytest.approx(11 / 12)
    assert kuhn.nash_conv(kuhn.average([even(kuhn)] * 3)) == pytest.approx(11 / 12)
    policy_E = kuhn.softmax(np.linspace(-1.0, 2.0, kuhn.tree.entries))
    move_N, advantage_N = kuhn.play(policy_E, Plan(deals=20_000, group=2), np.random.default_rng(0))
    met = np.bincount(kuhn.tree._state_of_entry[move_N], minlength=len(kuhn.tree.states)) / 40_000
    assert met == pytest.approx(list(kuhn.tree.visits(kuhn.table(policy_E)).values()), abs=0.01)
    # In a state that every game on a card meets, what games gain over their group's mean adds up to 0.
    first_N = np.isin(
        kuhn.tree._state_of_entry[move_N], [list(kuhn.tree.states).index(card) for card in "012"]
    )
    assert advantage_N[first_N].sum() == pytest.approx(0.0, abs=1e-6)
    assert advantage_N[first_N].std() > 0.5


def test_knowing_what_a_position_is_worth_takes_noise_out_and_bends_nothing() -> None:
    kuhn = game("kuhn_poker")
    policy_E = kuhn.softmax(np.linspace(-1.0, 2.0, kuhn.tree.entries))
    sums, spread = {}, {}
    for credit in get_args(Credit):
        plan = Plan(deals=40_000, group=4, credit=credit)
        move_N, advantage_N = kuhn.play(policy_E, plan, np.random.default_rng(0))
        states = kuhn.tree._state_of_entry
        gain_E = np.bincount(move_N, advantage_N, kuhn.tree.entries)
        gradient_E = gain_E - policy_E * np.bincount(states, gain_E)[states]
        sums[credit] = gradient_E / 160_000
        spread[credit] = advantage_N.std()
    assert sums["value"] == pytest.approx(sums["exact"], abs=0.01)
    # A group of four holds the move's own game: three quarters of the difference to the others.
    assert sums["group"] / 0.75 == pytest.approx(sums["exact"], abs=0.01)
    assert np.abs(sums["exact"]).max() > 0.1
    assert spread["exact"] < 0.8 * spread["value"]
    assert spread["value"] < 0.9 * spread["group"] / 0.75


def test_an_average_is_of_whole_games_and_not_of_probabilities() -> None:
    """Who never bets at first and who always does: after a first pass the average plays as the one that passes."""
    kuhn = game("kuhn_poker")
    one, other = (kuhn.softmax(sign * np.tile([8.0, -8.0], kuhn.tree.entries // 2)) for sign in (1, -1))
    mixed = kuhn.table(kuhn.average([one, other]))
    first, later = mixed["0"], mixed["0pb"]
    assert first[0] == pytest.approx(0.5)
    assert later[0] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
def test_leduc_poker_comes_within_a_seventh_of_even_play_on_sampled_games() -> None:
    leduc = game("leduc_poker")
    found = leduc.measure(Plan(), 2)
    assert max(found["later half"]) < 0.15 * leduc.nash_conv(even(leduc))
