from __future__ import annotations

import pytest
from pydantic import ValidationError

from kapelle.environments.matrix import Game, Matrix
from kapelle.errors import ConfigError, EpisodeError
from kapelle.types import Message

# Per game: optima, equilibria and payoff range of the literature.
KNOWN = [
    ("climbing", ("AA",), ("AA", "BB"), (-30, 11)),
    ("penalty", ("AA", "CC"), ("AA", "BB", "CC"), (-100, 10)),
    ("xor", ("AB", "BA"), ("AB", "BA"), (0, 1)),
    ("prisoners_dilemma", ("CC",), ("DD",), (0, 5)),
    ("stag_hunt", ("SS",), ("SS", "HH"), (1, 4)),
    ("matching_pennies", ("HH", "HT", "TH", "TT"), (), (-1, 1)),
]


def equilibria_of(game: Game) -> tuple[str, ...]:
    """Return the joint moves from which no player gains by a deviation."""
    return tuple(
        joint
        for joint in game.payoffs
        if not any(
            game.payoffs[joint[:k] + other + joint[k + 1 :]][k] > game.payoffs[joint][k]
            for k, moves in enumerate(game.moves)
            for other in moves
        )
    )


@pytest.mark.parametrize(("name", "optima", "equilibria", "bounds"), KNOWN)
def test_optima_equilibria_and_range_are_those_of_the_literature(
    name: str, optima: tuple[str, ...], equilibria: tuple[str, ...], bounds: tuple[float, float]
) -> None:
    environment = Matrix.model_validate({"game": name})
    assert environment.table.optima == optima
    assert equilibria_of(environment.table) == equilibria
    assert environment.reward_range == bounds


@pytest.mark.parametrize(
    ("name", "joint", "payoffs"),
    [
        ("climbing", "AA", (11, 11)),
        ("climbing", "AB", (-30, -30)),
        ("climbing", "CB", (0, 0)),
        ("climbing", "CC", (5, 5)),
        ("penalty", "AC", (-100, -100)),
        ("penalty", "BB", (2, 2)),
        ("prisoners_dilemma", "CD", (0, 5)),
        ("stag_hunt", "HS", (3, 1)),
        ("matching_pennies", "HT", (-1, 1)),
    ],
)
def test_payoffs_of_the_literature(name: str, joint: str, payoffs: tuple[float, float]) -> None:
    assert Matrix.model_validate({"game": name}).table.payoffs[joint] == payoffs


THREE = {a + b + c: float(a == b == c == "B") for a in "AB" for b in "AB" for c in "AB"}


async def test_a_custom_game_of_three_players() -> None:
    environment = Matrix(game="custom", payoffs=THREE, rules="none")
    agents = ["x", "y", "z"]
    world = environment.start(environment.task("train", 0), agents, seed=0)
    assert [world.observe(agent) for agent in agents] == ["1/3 AB", "2/3 AB", "3/3 AB"]
    assert await world.step({"x": "B", "y": "B", "z": "B"}) == {"x": 1.0, "y": 1.0, "z": 1.0}
    assert environment.table.optima == ("BBB",)
    assert world.outcome().success == 1.0


async def test_players_can_have_different_moves_and_payoffs() -> None:
    payoffs = {"UL": (1, 2), "UR": (3, 4), "DL": (5, 6), "DR": (7, 0)}
    environment = Matrix(game="custom", payoffs=payoffs, rules="none")
    assert environment.table.moves == ("UD", "LR")
    world = environment.start(environment.task("test", 0), ["row", "column"], seed=0)
    assert world.observe("column") == "2/2 LR"
    assert await world.step({"row": "D", "column": "L"}) == {"row": 5.0, "column": 6.0}


async def test_rounds_are_observed_and_rewarded_one_by_one() -> None:
    environment = Matrix(game="prisoners_dilemma", rounds=3, memory=2, rules="none")
    world = environment.start(environment.task("train", 0), ["a", "b"], seed=0)
    assert world.observe("a") == "1/2 CD"
    assert await world.step({"a": "C", "b": "D"}) == {"a": 0.0, "b": 5.0}
    assert world.observe("b") == "2/2 CD CD"
    assert await world.step({"a": "C", "b": " C\n"}) == {"a": 3.0, "b": 3.0}
    assert world.movers() == ("a", "b")
    assert world.observe("a") == "1/2 CD CD CC"
    await world.step({"a": "D", "b": "D"})
    assert world.observe("a") == "1/2 CD CC DD"
    assert world.movers() == ()
    assert world.outcome().success == pytest.approx(1 / 3)
    assert environment.reward_range == (0, 15)


@pytest.mark.parametrize("text", ["", "AB", "a", "А", "A.", "Z", "\u200bA", "1"])
async def test_an_invalid_move_receives_the_least_payoff(text: str) -> None:
    environment = Matrix(game="climbing")
    world = environment.start(environment.task("train", 0), ["a", "b"], seed=0)
    assert await world.step({"a": text, "b": "C"}) == {"a": -30.0, "b": -30.0}
    outcome = world.outcome()
    assert outcome.success == 0.0
    assert outcome.info["invalid"] == {"a": 1, "b": 0}
    assert outcome.info["rounds"] == ["-C"]


async def test_without_pure_coordination_the_others_receive_the_average() -> None:
    environment = Matrix(game="prisoners_dilemma", invalid=-2)
    world = environment.start(environment.task("train", 0), ["a", "b"], seed=0)
    # b defected: 5 against C, 1 against D.
    assert await world.step({"a": "?", "b": "D"}) == {"a": -2.0, "b": 3.0}
    assert environment.reward_range == (-2.0, 5.0)


async def test_a_round_takes_a_move_of_every_player() -> None:
    environment = Matrix(game="xor")
    world = environment.start(environment.task("train", 0), ["a", "b"], seed=0)
    with pytest.raises(EpisodeError, match="turn"):
        await world.step({"a": "A"})
    await world.step({"a": "A", "b": "B"})
    with pytest.raises(EpisodeError):
        await world.step({"a": "A", "b": "B"})


async def test_missing_rounds_count_as_failed() -> None:
    environment = Matrix(game="xor", rounds=4)
    world = environment.start(environment.task("train", 0), ["a", "b"], seed=0)
    assert world.outcome().success == 0.0
    await world.step({"a": "A", "b": "B"})
    assert world.outcome().truncated
    assert world.outcome().success == 0.25


def test_impossible_games_are_errors() -> None:
    with pytest.raises(ValidationError, match="custom"):
        Matrix(game="custom")
    with pytest.raises(ValidationError, match="custom"):
        Matrix(game="xor", payoffs=THREE)
    with pytest.raises(ValidationError, match="'AB'"):
        Matrix(game="custom", payoffs={"AA": 1, "BA": 2, "BB": 0})
    with pytest.raises(ValidationError, match="one letter per player"):
        Matrix(game="custom", payoffs={"AA": 1, "B": 2})
    with pytest.raises(ValidationError, match="one letter per player"):
        Matrix(game="custom", payoffs={"AA": (1, 2, 3)})
    with pytest.raises(ValidationError, match="digits"):
        Matrix(game="custom", payoffs={"-A": 1})
    with pytest.raises(ValidationError, match="finite"):
        Matrix(game="custom", payoffs={"A": float("nan")})
    with pytest.raises(ValidationError, match="least payoff"):
        Matrix(game="climbing", invalid=0)


def test_the_team_must_have_one_agent_per_player() -> None:
    with pytest.raises(ConfigError, match="2 players"):
        Matrix(game="xor").check(["a", "b", "c"])


def test_the_script_makes_legal_moves_of_every_kind() -> None:
    environment = Matrix(game="custom", payoffs={"UL": 1, "UR": 3, "DL": 5, "DR": 7})
    task = environment.task("train", 0)
    messages = (
        Message("user", "1/2 UD"),
        Message("assistant", "U"),
        Message("user", "You see 2/2 LR UL. Move:"),
    )
    assert {environment.script("b", task, messages, seed) for seed in range(50)} == {"L", "R"}
    assert {environment.script("a", task, messages[:1], seed) for seed in range(50)} == {"U", "D"}


RPS = {"RR": 0, "RP": -1, "RS": 1, "PR": 1, "PP": 0, "PS": -1, "SR": -1, "SP": 1, "SS": 0}
"""Rock, paper, scissors: the payoff of the first player."""


def test_exact_values_of_a_zero_sum_table_by_hand() -> None:
    game = Matrix(game="custom", payoffs={joint: (payoff, -payoff) for joint, payoff in RPS.items()})
    uniform = {"0": dict.fromkeys(range(3), 1 / 3), "1": dict.fromkeys(range(3), 1 / 3)}
    returns, gain = game.exact_values(uniform)
    assert (*returns, gain) == pytest.approx((0.0, 0.0, 0.0))
    rock = {"0": {0: 1.0}, "1": dict.fromkeys(range(3), 1 / 3)}
    # Paper beats rock by 1; the other player cannot gain.
    assert game.best_response(rock, 1)[0] == pytest.approx(1.0)
    assert game.best_response(rock, 1)[1] == {"1": 1}
    returns, gain = game.exact_values(rock)
    assert (*returns, gain) == pytest.approx((0.0, 0.0, 1.0))


def test_exact_values_of_three_players() -> None:
    payoffs = {
        a + b + c: (float(a == b), float(b == c), float(c == a)) for a in "AB" for b in "AB" for c in "AB"
    }
    game = Matrix(game="custom", payoffs=payoffs)
    policy = {"0": {0: 1.0}, "1": {0: 0.25, 1: 0.75}, "2": {1: 1.0}}
    # Expected and best payoffs: first 1/4 and 3/4, second 3/4 and 1, third 0 and 1.
    returns, gain = game.exact_values(policy)
    assert returns == pytest.approx((0.25, 0.75, 0.0))
    assert gain == pytest.approx(0.5 + 0.25 + 1.0)


def test_information_states_are_the_observations() -> None:
    game = Matrix(
        game="custom", payoffs={joint: (payoff, -payoff) for joint, payoff in RPS.items()}, rules="none"
    )
    decisions = list(game.decisions())
    assert [(each.player, each.text, each.moves) for each in decisions] == [
        (0, "1/2 RPS", ("R", "P", "S")),
        (1, "2/2 RPS", ("R", "P", "S")),
    ]
    with pytest.raises(ConfigError, match="rounds: 1"):
        list(Matrix(game="xor", rounds=2).decisions())


LEVERS = {a + b: (0.0 if a != b else 0.9 if a == "D" else 1.0) for a in "ABCD" for b in "ABCD"}
"""A small lever game (2003.02979): three equal levers, and a unique one with a smaller payoff."""


def test_interchangeable_letters() -> None:
    assert Matrix(game="custom", payoffs=LEVERS).table.alike() == ["ABC", "D"]
    assert Matrix(game="xor").table.alike() == ["AB"]
    assert Matrix(game="climbing").table.alike() == ["A", "B", "C"]
    pays = {joint: (payoff, -payoff) for joint, payoff in RPS.items()}
    assert Matrix(game="custom", payoffs=pays).table.alike() == ["R", "P", "S"]


async def test_other_play_renames_the_partners_letters() -> None:
    game = Matrix(game="custom", payoffs=LEVERS, rules="none", rounds=2, other_play=True)
    met = set()
    for seed in range(40):
        world = game.start(game.task("train", 0), ("a", "b"), seed)
        rewards = await world.step({"a": "A", "b": "A"})
        meant = game.renamed(1, seed)
        assert rewards["a"] == rewards["b"] == float(meant["A"] == "A")
        own = {letter: name for name, letter in meant.items()}
        assert world.observe("a") == f"1/2 ABCD A{meant['A']}"
        assert world.observe("b") == f"2/2 ABCD {own['A']}A"
        assert await world.step({"a": "D", "b": "D"}) == {"a": 0.9, "b": 0.9}
        met.add(meant["A"])
    assert met == {"A", "B", "C"}
    assert game.renamed(0, 3) == {letter: letter for letter in "ABCD"}
