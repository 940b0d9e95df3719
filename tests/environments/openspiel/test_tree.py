"""Exact values over a game's tree, against OpenSpiel's own solvers and against episodes."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("pyspiel")

import pyspiel

from kapelle.environments.openspiel.games import check_size, load_game, walk
from kapelle.environments.openspiel.tree import GameTree, Table, tree_of
from kapelle.errors import ConfigError

GAMES = ["kuhn_poker", "kuhn_poker(players=3)", "leduc_poker", "tiny_hanabi", "goofspiel_turns"]
WRITTEN = {
    "goofspiel_turns": "turn_based_simultaneous_game(game=goofspiel(imp_info=True,num_cards=3,points_order=descending))"
}


def tree(name: str) -> GameTree:
    return tree_of(WRITTEN.get(name, name))


def drawn(found: GameTree, seed: int, sharpness: float = 3.0) -> Table:
    """Return a policy whose probabilities are drawn, some of them small."""
    draw = random.Random(seed)
    policy = {}
    for key, actions in zip(found.states, found.actions, strict=True):
        weights = [draw.random() ** sharpness for _ in actions]
        policy[key] = {action: w / sum(weights) for action, w in zip(actions, weights, strict=True)}
    return policy


def first_move(found: GameTree) -> Table:
    """Return the policy that always takes its first legal move: it folds where it can."""
    return {
        key: {action: float(action == actions[0]) for action in actions}
        for key, actions in zip(found.states, found.actions, strict=True)
    }


def nash_conv(found: GameTree, policy: Table) -> float:
    best = [found.best_response(policy, player)[0] for player in range(found.players)]
    return sum(best) - sum(found.values(policy))


@pytest.mark.parametrize("name", GAMES)
@pytest.mark.parametrize("kind", ["drawn", "first"])
def test_values_and_nash_conv_are_those_of_openspiel(name: str, kind: str) -> None:
    found = tree(name)
    game = pyspiel.load_game(WRITTEN.get(name, name))
    policy = drawn(found, 1) if kind == "drawn" else first_move(found)
    table = pyspiel.TabularPolicy({key: list(chances.items()) for key, chances in policy.items()})
    returns = pyspiel.expected_returns(game.new_initial_state(), table, -1, True)
    assert found.values(policy) == pytest.approx(list(returns), abs=1e-9)
    assert nash_conv(found, policy) == pytest.approx(pyspiel.nash_conv(game, table), abs=1e-9)


def test_a_player_who_always_folds_loses_its_ante() -> None:
    """Who folds to every raise and else calls loses the ante of 1 in every game of Leduc against whoever always raises."""
    found = tree("leduc_poker")
    fold, call = 0, 1
    folds = {
        key: {action: float(action == (fold if fold in actions else call)) for action in actions}
        for key, actions in zip(found.states, found.actions, strict=True)
    }
    value, _ = found.best_response(folds, 0)
    assert value == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("name", ["kuhn_poker", "leduc_poker", "kuhn_poker(players=3)"])
def test_a_best_response_earns_its_value_when_it_is_played(name: str) -> None:
    found = tree(name)
    policy = drawn(found, 2)
    for player in range(found.players):
        value, moves = found.best_response(policy, player)
        played = {
            key: {action: float(action == moves[key]) for action in chances} if key in moves else chances
            for key, chances in policy.items()
        }
        assert found.values(played)[player] == pytest.approx(value, abs=1e-12)
        # A change of any move gains nothing.
        for key, move in list(moves.items())[::7]:
            other = {**played, key: {action: float(action != move) for action in played[key]}}
            total = sum(other[key].values())
            other[key] = (
                {action: chance / total for action, chance in other[key].items()} if total else played[key]
            )
            assert found.values(other)[player] <= value + 1e-12


def test_visits_by_hand() -> None:
    found = tree("kuhn_poker")
    visits = found.visits({key: {0: 0.75, 1: 0.25} for key in found.states})
    assert visits["0"] == pytest.approx(1 / 3)
    assert visits["1p"] == pytest.approx(1 / 3 * 3 / 4)
    assert visits["1b"] == pytest.approx(1 / 3 * 1 / 4)
    assert visits["2pb"] == pytest.approx(1 / 3 * 3 / 4 * 1 / 4)


def test_a_game_that_is_too_large_is_an_error() -> None:
    with pytest.raises(ConfigError, match="samples the chance"):
        GameTree(load_game("bridge_uncontested_bidding", {}))
    with pytest.raises(ConfigError, match="100 nodes"):
        GameTree(load_game("leduc_poker", {}), most=100)


@pytest.mark.parametrize("name", ["chess", "bridge"])
def test_a_huge_game_is_an_error_at_once(name: str) -> None:
    with pytest.raises(ConfigError, match="too many"):
        next(walk(load_game(name, {})))


@pytest.mark.parametrize("name", ["kuhn_poker", "leduc_poker", "tiny_hanabi"])
def test_the_estimate_accepts_a_game_that_fits(name: str) -> None:
    game, found = load_game(name, {}), tree(name)
    check_size(game, found.histories)
    assert GameTree(game, most=found.histories).histories == found.histories


def test_simultaneous_moves_by_hand() -> None:
    """Rock, paper, scissors: even play has no gain; against always rock each player gains 1 by paper.

    Prisoners' dilemma: even play gives (5 + 0 + 10 + 1)/4 = 4 and defection against it (10 + 1)/2, 1.5 more for each.
    """
    rps, dilemma = tree("matrix_rps()"), tree("matrix_pd()")
    assert nash_conv(rps, {key: dict.fromkeys(range(3), 1 / 3) for key in rps.states}) == pytest.approx(0.0)
    assert nash_conv(rps, {key: {0: 1.0} for key in rps.states}) == pytest.approx(2.0)
    assert nash_conv(dilemma, {key: {0: 0.5, 1: 0.5} for key in dilemma.states}) == pytest.approx(3.0)


@pytest.mark.parametrize(
    "name",
    [
        "goofspiel(imp_info=True,num_cards=3,points_order=descending)",
        "oshi_zumo(coins=2,horizon=3,size=1)",
        "matching_pennies_3p",
    ],
)
def test_simultaneous_moves_have_the_values_of_moves_in_turns(name: str) -> None:
    found, turns = tree(name), pyspiel.convert_to_turn_based(pyspiel.load_game(name))
    even = {
        key: dict.fromkeys(own, 1 / len(own)) for key, own in zip(found.states, found.actions, strict=True)
    }
    expected = pyspiel.nash_conv(turns, pyspiel.UniformRandomPolicy(turns))
    assert nash_conv(found, even) == pytest.approx(expected, abs=1e-9)
