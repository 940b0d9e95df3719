"""Measures of games: by hand for given moves, and as metrics of a run."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

pytest.importorskip("pyspiel")

from tests.cli.conftest import call
from tests.environments.openspiel.test_playthroughs import Recorded

from kapelle.environments.openspiel.environment import GameState, OpenSpiel, Players
from kapelle.environments.openspiel.hanabi import choose, read_card
from kapelle.runs.reader import read_episodes, read_evaluations, read_metrics

SMALL: dict[str, Any] = {
    "players": 2,
    "colors": 2,
    "ranks": 3,
    "hand_size": 2,
    "max_information_tokens": 3,
    "max_life_tokens": 2,
}


async def played(
    environment: OpenSpiel, moves: list[str], *agents: str, deal: list[int] | None = None
) -> GameState:
    """Return an episode after these moves, with the cards of `deal` in order."""
    if deal is None:
        world = environment.start(environment.task("train", 0), agents, 0)
    else:
        seats = {agent: (player,) for player, agent in enumerate(agents)}
        world = GameState(environment.loaded, Players(seats, {}), environment.conduct, Recorded(deal), seed=0)
    for move in moves:
        await world.step(dict.fromkeys(world.movers(), move))
    return world


async def test_hanabi_by_hand() -> None:
    # OpenSpiel numbers cards colour by colour: 0 R1, 1 R2, 2 R3, 3 Y1, …
    environment = OpenSpiel(game="hanabi", parameters=SMALL)
    moves = [
        "(Reveal player +1 rank 1)",  # a: a one of any colour fits
        "(Play 0)",  # b plays it knowing that
        "(Play 0)",  # a plays R3 and loses a life
        "(Discard 1)",  # b discards Y2 and regains the hint
        "(Play 0)",  # a plays Y1 without a hint, and it fits
    ]
    world = await played(environment, moves, "a", "b", deal=[2, 3, 0, 4, 1, 5, 3, 0, 1, 0])
    info = world.outcome().info
    assert {name: info[name] for name in ("score", "lives", "hints_left")} == {
        "score": 2.0,
        "lives": 1.0,
        "hints_left": 3.0,
    }
    by_agent = ("played", "fitted", "misplayed", "known", "discarded", "hinted")
    assert {name: info[name] for name in by_agent} == {
        "played": {"a": 2.0, "b": 1.0},
        "fitted": {"a": 1.0, "b": 1.0},
        "misplayed": {"a": 1.0, "b": 0.0},
        "known": {"a": 0.0, "b": 1.0},
        "discarded": {"a": 0.0, "b": 1.0},
        "hinted": {"a": 1.0, "b": 0.0},
    }
    # b knew one of four properties of its two cards when it played, and none of the later cards.
    assert info["knowledge"] == {"a": 0.0, "b": (0.25 + 0.0) / 2}


async def test_the_score_remains_after_the_last_life() -> None:
    environment = OpenSpiel(game="hanabi", parameters={**SMALL, "max_life_tokens": 1})
    world = await played(environment, ["(Play 0)", "(Play 0)"], "a", "b", deal=[0, 3, 2, 4, 1, 5])
    outcome = world.outcome()
    assert (outcome.info["score"], outcome.info["lives"], outcome.success) == (1.0, 0.0, 0.0)


async def test_leduc_by_hand() -> None:
    # Raise, raise, call: five chips each; then raise by four and fold.
    environment = OpenSpiel(game="leduc_poker")
    moves = ["Raise", "Raise", "Call", "Raise", "Fold"]
    info = (await played(environment, moves, "a", "b", deal=[0, 2, 4])).outcome().info
    assert info["bet"] == {"a": 9.0, "b": 5.0}
    assert (info["pot"], info["made"], info["draw"]) == (14.0, 5.0, 0.0)
    assert info["raised"] == {"a": 2.0, "b": 1.0}
    assert info["folded"] == {"a": 0.0, "b": 1.0}
    assert info["won"] == {"a": 1.0, "b": 0.0}


@pytest.mark.parametrize(
    ("moves", "bets", "folded"),
    [
        (["Pass", "Pass"], (1.0, 1.0), (0.0, 0.0)),
        (["Bet", "Pass"], (2.0, 1.0), (0.0, 1.0)),
        (["Pass", "Bet", "Bet"], (2.0, 2.0), (0.0, 0.0)),
        (["Pass", "Bet", "Pass"], (1.0, 2.0), (1.0, 0.0)),
    ],
)
async def test_kuhn_by_hand(moves: list[str], bets: tuple[float, float], folded: tuple[float, float]) -> None:
    info = (await played(OpenSpiel(game="kuhn_poker"), moves, "a", "b", deal=[0, 1])).outcome().info
    assert tuple(info["bet"].values()) == bets
    assert info["pot"] == sum(bets)
    assert tuple(info["folded"].values()) == folded
    assert info["won"] == {"a": float(folded[1]), "b": 1.0 - folded[1]}


async def test_a_draw_has_no_winner_and_an_invalid_move_loses_by_form() -> None:
    moves = ["x(1,1)", "o(0,0)", "x(0,1)", "o(2,1)", "x(1,0)", "o(1,2)", "x(0,2)", "o(2,0)", "x(2,2)"]
    info = (await played(OpenSpiel(game="tic_tac_toe"), moves, "a", "b")).outcome().info
    assert (info["won"], info["draw"], info["made"]) == ({"a": 0.0, "b": 0.0}, 1.0, 9.0)
    lost = await played(OpenSpiel(game="tic_tac_toe", invalid="forfeit"), ["x(1,1)", "what?"], "a", "b")
    assert lost.outcome().info["lost_by_form"] == {"a": 0.0, "b": 1.0}
    assert lost.outcome().info["won"] == {"a": 1.0, "b": 0.0}


def test_a_card_knows_what_it_can_be() -> None:
    card = read_card("R1 || X1|RY1")
    assert (card.face, card.told, card.colors, card.ranks, card.known) == ("R1", "X1", "RY", "1", 0.5)
    assert card.fits({"R": 0, "Y": 0})
    assert not card.fits({"R": 1, "Y": 0})
    assert card.may_fit({"R": 1, "Y": 0})


def points(bold: bool | None, deals: int = 60) -> float:
    """Return the mean share of points of two players: scripted ones, or random ones for None."""
    game = OpenSpiel(game="hanabi", parameters={**SMALL, "max_life_tokens": 3}).loaded
    earned = []
    for deal in range(deals):
        draw, state = random.Random(deal), game.new_initial_state()
        while not state.is_terminal():
            if state.is_chance_node():
                outcomes, chances = zip(*state.chance_outcomes(), strict=True)
                state.apply_action(draw.choices(outcomes, chances)[0])
            elif bold is None:
                state.apply_action(draw.choice(state.legal_actions()))
            else:
                state.apply_action(choose(state, state.current_player(), draw, bold=bold))
        earned.append(state.returns()[0] / game.max_utility())
    return fmean(earned)


def test_scripted_players_beat_chance_and_bold_ones_are_best() -> None:
    chance, careful, bold = points(None), points(False), points(True)
    assert chance < 0.3
    assert 0.55 < careful < bold
    assert bold > 0.7


QUICK = (
    *(
        "model.embedded.hidden=16",
        "model.embedded.layers=1",
        "model.embedded.heads=2",
        "model.embedded.kv_heads=1",
    ),
    *("model.embedded.intermediate=32", "warmup=null", "training.steps=4", "training.tasks_per_step=2"),
    *("algorithm.group_size=1", "evaluation.problems=2", "evaluation.problems_while_training=2"),
    *("evaluation.every=2", "evaluation.before_and_after=false", "team.sampling.max_tokens=2"),
)


def test_a_run_on_a_curriculum_has_levels_and_measures_in_its_tables(tmp_path: Path) -> None:
    run = tmp_path / "run"
    levels = (
        "environment.curriculum=[{tasks: 2, parameters: {colors: 1}}, {tasks: 3, parameters: {ranks: 2}}]"
    )
    short = "environment.wording=short"
    result = call("train", "mars_hanabi_curriculum", *QUICK, levels, short, "--run-dir", str(run))
    assert result.code == 0, result.err
    rows = read_metrics(run)
    # Two tasks a step: both of level 1; both of level 2; one of level 2 and the game itself; the game itself.
    assert [row["info/level"] for row in rows] == [1.0, 2.0, 2.5, 3.0]
    for row in rows:
        assert {
            "info/score",
            "info/lives",
            "info/fitted/first",
            "info/knowledge/second",
            "info/lost_by_form/first",
        } <= row.keys()
    for step, (colors, ranks) in zip((1, 2, 4), ((1, 3), (2, 2), (2, 3)), strict=True):
        for episode in read_episodes(run, step):
            observation = episode.turns[0].new_messages[-1].content
            stacks = observation.split(" F")[1].split(" ")[0]
            assert len(stacks) == 2 * colors
            assert f"{'RYGWB'[:colors]}{'12345'[:ranks]}" in observation
    [middle] = read_evaluations(run)
    assert middle["step"] == 2
    assert {"level", "score", "lives", "fitted/first"} <= middle["info"].keys()
    assert middle["info"]["level"] == 3.0


@pytest.mark.parametrize(
    ("level", "why"),
    [
        ("{tasks: 2, parameters: {colours: 1}}", "curriculum.0"),
        ("{tasks: 2, parameters: {players: 3}}", "curriculum.0"),
    ],
)
def test_an_unusable_level_is_an_error(level: str, why: str) -> None:
    result = call("train", "mars_hanabi_curriculum", f"environment.curriculum=[{level}]", "--dry-run")
    assert result.code == 2
    assert why in result.err


def test_a_curriculum_in_a_mixture_advances_by_the_parts_share() -> None:
    from kapelle.environments.mixture import Mixture

    game = {
        "name": "openspiel",
        "game": "hanabi",
        "parameters": SMALL,
        "curriculum": [{"tasks": 10, "parameters": {"colors": 1}}],
    }
    mixture = Mixture.model_validate({"parts": {
        "cards": {"environment": game, "weight": 1.0},
        "poker": {"environment": {"name": "openspiel", "game": "kuhn_poker"}, "weight": 3.0},
    }})  # fmt: skip
    cards = [index for index in range(60) if mixture.task("train", index).part == "cards"][:3]
    levels = {
        played: {mixture.task_after(played, index).data["data"]["level"] for index in cards}
        for played in (0, 39, 40, 400)
    }
    assert levels == {0: {1}, 39: {1}, 40: {2}, 400: {2}}
