from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("pyspiel")

from kapelle.environments.openspiel.environment import OpenSpiel
from kapelle.environments.openspiel.games import equilibrium, opponent_named, play_table, regret_policy
from kapelle.environments.openspiel.text import read_listed
from kapelle.errors import ConfigError


async def results(environment: OpenSpiel, games: int, say: Mapping[str, str] | None = None) -> list[float]:
    """Return rewards of games in which the agent moves at random, or by `say` from the last part of its observation."""
    earned = []
    for seed in range(games):
        world = environment.start(environment.task("train", seed), ["agent"], seed)
        draw = random.Random(f"agent/{seed}")
        while world.movers():
            view = world.observe("agent")
            known = (say or {}).get(view.split(" <")[0].split()[-1])
            await world.step({"agent": known or draw.choice(read_listed(view))})
        earned.append(world.outcome().rewards["agent"])
    return earned


def game(name: str, **settings: Any) -> OpenSpiel:
    return OpenSpiel.model_validate({"game": name, "wording": "short", **settings})


async def test_tree_search_does_not_lose_tic_tac_toe_to_chance() -> None:
    earned = await results(game("tic_tac_toe", opponents={2: {"name": "mcts", "simulations": 300}}), 20)
    assert sum(value > 0 for value in earned) == 0
    assert sum(value < 0 for value in earned) >= 14


async def test_tree_search_repeats_by_its_seed() -> None:
    environment = game("tic_tac_toe", opponents={1: {"name": "mcts", "simulations": 10}})
    openings = [
        environment.start(environment.task("train", 0), ["a"], seed).outcome().info["moves"][0]
        for seed in (1, 1, 2, 3, 4)
    ]
    assert openings[0] == openings[1]
    assert len(set(openings)) > 1


@pytest.mark.slow
async def test_an_equilibrium_has_the_value_of_the_game_and_beats_a_bad_player() -> None:
    second = game("kuhn_poker", opponents={1: {"name": "nash", "tolerance": 0.001}})
    # The value of the game for the second player is 1/18; the best response to an equilibrium earns no more.
    best = {"0p": "Pass", "0b": "Pass", "1p": "Pass", "1b": "Pass", "2p": "Bet", "2b": "Bet"}
    earned = await results(second, 1000, best)
    assert sum(earned) / len(earned) == pytest.approx(1 / 18, abs=0.08)
    worst = {"0p": "Bet", "0b": "Bet", "1p": "Bet", "1b": "Bet", "2p": "Pass", "2b": "Pass"}
    lost = await results(second, 400, worst)
    assert sum(lost) / len(lost) < -0.2


def test_moves_are_drawn_from_a_table() -> None:
    state = OpenSpiel().loaded.new_initial_state()
    for card in (1, 2):
        state.apply_action(card)
    choose = play_table({"1": {0: 0.9, 1: 0.1}}, seed=0)
    assert sum(choose(state, 0) for _ in range(1000)) == pytest.approx(100, abs=30)


def test_cfr_approaches_the_equilibrium() -> None:
    """A call with the jack always loses and with the king always wins."""
    policy = regret_policy("kuhn_poker()", 200)
    assert policy["0b"][1] < 0.01
    assert policy["2b"][1] > 0.99
    assert policy["0p"][1] == pytest.approx(1 / 3, abs=0.05)


async def test_a_scripted_opponent_makes_its_first_legal_move() -> None:
    environment = game("tic_tac_toe", opponents={1: {"name": "scripted", "moves": ["x(1,1)", "X(0,0)"]}})
    world = environment.start(environment.task("train", 0), ["a"], 0)
    await world.step({"a": "o(0,1)"})
    await world.step({"a": "o(0,2)"})
    assert world.outcome().info["moves"] == ["1: x(1,1)", "2: o(0,1)", "1: x(0,0)", "2: o(0,2)", "1: x(1,0)"]
    assert world.outcome().info["opponents"] == {"1": "scripted"}


async def test_a_random_opponent_joins_simultaneous_moves() -> None:
    earned = await results(game("matrix_rps", opponents={2: "random"}), 60)
    assert set(earned) == {-1.0, 0.0, 1.0}


@pytest.mark.parametrize(
    ("written", "form"),
    [
        ("mcts(200)", "mcts(simulations=100)"),
        ("nash)", "nash(tolerance=0.01)"),
        ("mcts(simulations=1,simulations=2)", "mcts(simulations=100)"),
        ("scripted(pass|bet)", "scripted(moves=…)"),
        ("random(3)", "random"),
    ],
)
def test_an_unreadable_opponent_is_an_error_with_the_form(written: str, form: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(form)):
        opponent_named(written)


def test_settings_of_an_opponent_are_in_brackets() -> None:
    assert opponent_named("mcts( simulations = 200 )").model_dump() == {"name": "mcts", "simulations": 200}
    assert opponent_named("nash()") == opponent_named("nash")
    assert opponent_named("scripted(moves=x(1)|bet)").model_dump()["moves"] == ("x(1)", "bet")


async def test_an_equilibrium_of_simultaneous_moves_is_played() -> None:
    """Against always rock the even mixture earns 0 on average, and a move of each kind comes up."""
    earned = await results(game("matrix_rps", opponents={2: "nash"}), 300, {"Non-terminal": "Rock"})
    assert {*earned} == {-1.0, 0.0, 1.0}
    assert sum(earned) / 300 == pytest.approx(0.0, abs=0.15)
    assert [sorted(own.values()) for own in equilibrium("matrix_rps()", 0.001).values()] == [
        pytest.approx([1 / 3] * 3, abs=0.01)
    ] * 2
