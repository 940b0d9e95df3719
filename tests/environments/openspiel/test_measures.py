"""What games measure beside results: by hand for played-out games, and as metrics of a run's table."""

from __future__ import annotations

import random
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

pytest.importorskip("pyspiel")

from tests.cli.conftest import call

from kapelle.environments.openspiel.environment import GameWorld, OpenSpiel
from kapelle.environments.openspiel.hanabi import choose, read_card, read_table
from kapelle.runs.definitions import rollout_metrics
from kapelle.runs.reader import read_episodes, read_evaluations, read_metrics

ROOT = Path(__file__).parents[3]
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
) -> GameWorld:
    """Return a world after these moves, with the cards that `deal` names drawn in order."""
    world = environment.start(environment.task("train", 0), agents, 0)
    if deal is not None:
        world.state = world._game.new_initial_state()
        left = iter(deal)

        def draw() -> None:
            while world.state.is_chance_node():
                world.state.apply_action(next(left))

        world._go_on = draw  # type: ignore[method-assign]
        draw()
    for move in moves:
        await world.step(dict.fromkeys(world.movers(), move))
    return world


async def test_hanabi_by_hand() -> None:
    # OpenSpiel numbers cards colour by colour: 0 R1, 1 R2, 2 R3, 3 Y1, …
    environment = OpenSpiel(game="hanabi", parameters=SMALL)
    moves = [
        "(Reveal player +1 rank 1)",  # a: b's R1 is a one, so it fits whatever its colour
        "(Play 0)",  # b plays it knowing that
        "(Play 0)",  # a plays R3 and loses a life
        "(Discard 1)",  # b throws Y2 away and gets the hint back
        "(Play 0)",  # a plays Y1 blindly, and it fits
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
    # b knew one of four things about its two cards when it played, and of the cards left one thing at most after it.
    assert info["knowledge"]["a"] == 0.0
    assert 0.0 < info["knowledge"]["b"] <= 0.25


async def test_what_is_lost_with_the_last_life_is_still_the_score() -> None:
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


async def test_a_draw_has_no_winner_and_who_writes_nonsense_loses_by_form() -> None:
    moves = ["x(1,1)", "o(0,0)", "x(0,1)", "o(2,1)", "x(1,0)", "o(1,2)", "x(0,2)", "o(2,0)", "x(2,2)"]
    info = (await played(OpenSpiel(game="tic_tac_toe"), moves, "a", "b")).outcome().info
    assert (info["won"], info["draw"], info["made"]) == ({"a": 0.0, "b": 0.0}, 1.0, 9.0)
    lost = await played(OpenSpiel(game="tic_tac_toe", invalid="forfeit"), ["x(1,1)", "what?"], "a", "b")
    assert lost.outcome().info["lost_by_form"] == {"a": 0.0, "b": 1.0}
    assert lost.outcome().info["won"] == {"a": 1.0, "b": 0.0}


def test_a_card_says_what_it_can_be() -> None:
    card = read_card("R1 || X1|RY1")
    assert (card.face, card.told, card.colors, card.ranks, card.known) == ("R1", "X1", "RY", "1", 0.5)
    assert card.fits({"R": 0, "Y": 0})
    assert not card.fits({"R": 1, "Y": 0})
    assert card.may_fit({"R": 1, "Y": 0})


def points(bold: bool | None, deals: int = 120) -> float:
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


def test_scripted_players_are_far_better_than_chance_and_the_bold_ones_better_still() -> None:
    chance, careful, bold = points(None), points(False), points(True)
    assert chance < 0.3
    assert 0.55 < careful < bold
    assert bold > 0.7


async def test_a_scripted_partner_plays_a_seat_by_what_it_sees() -> None:
    environment = OpenSpiel(game="hanabi", parameters=SMALL, opponents={2: {"name": "hanabi", "bold": True}})
    world = environment.start(environment.task("train", 0), ["a"], 0)
    while world.movers():
        view = read_table(world.state.observation_string(0))
        hint = next(iter(view.hands[1]))[1]
        await world.step({"a": f"(Reveal player +1 rank {hint})"})
    info = world.outcome().info
    assert info["opponents"] == {"2": "hanabi"}
    assert any(move.startswith("2: ") for move in info["moves"])
    assert set(info["played"]) == {"a"}, "what opponents did is no agent's"


def test_the_scripted_player_of_hanabi_plays_nothing_else() -> None:
    said = call("validate", "kuhn", "environment.opponents={2: hanabi}", "team.agents=1")
    assert said.code == 2
    assert "plays Hanabi alone" in said.out + said.err


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
    short = "environment.wording=short"  # the stacks of a game, and no more of them
    said = call("train", "mars_hanabi_curriculum", *QUICK, levels, short, "--run-dir", str(run))
    assert said.code == 0, said.err
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
            heard = episode.turns[0].heard[-1].content
            stacks = heard.split(" F")[1].split(" ")[0]
            assert len(stacks) == 2 * colors
            assert f"{'RYGWB'[:colors]}{'12345'[:ranks]}" in heard
    [middle] = read_evaluations(run)
    assert middle["step"] == 2
    assert {"level", "score", "lives", "fitted/first"} <= middle["info"].keys()
    assert middle["info"]["level"] == 3.0, "tests are the game itself"


@pytest.mark.parametrize(
    ("level", "why"),
    [
        (
            "{tasks: 2, parameters: {colours: 1}}",
            "environment.curriculum.0: The game 'hanabi' has no parameter 'colours'",
        ),
        ("{tasks: 2, parameters: {players: 3}}", "environment.curriculum.0 is a game for 3 players"),
        ("{tasks: 0, parameters: {}}", "environment.curriculum.0.tasks"),
        ("{steps: 3, parameters: {}}", "environment.curriculum.0.steps"),
    ],
)
def test_a_level_that_is_none_is_named_before_anything_starts(level: str, why: str) -> None:
    said = call("train", "mars_hanabi_curriculum", f"environment.curriculum=[{level}]", "--dry-run")
    assert said.code == 2
    assert why in said.err
    assert len(said.err.strip().splitlines()) == 1


def test_in_a_mixture_a_part_goes_on_by_its_share_of_the_tasks() -> None:
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


def test_a_run_has_every_metric_that_the_page_for_users_of_mars_names(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "coming_from" / "mars.md").read_text("utf-8").split("## Metrics")[1]
    named = {
        name
        for line in page.splitlines()
        if line.startswith("| ")
        for name in re.findall(r"`([^`]+)`", line.split("|")[2])
    }
    assert len(named) > 30
    found: set[str] = set()
    penalty = "algorithm.loss.kl_coefficient=0.1"
    for recipe, *more in (
        ("mars_hanabi_curriculum",),
        ("kuhn", "environment.game=leduc_poker", "model.embedded.context=256"),
    ):
        run = tmp_path / recipe
        said = call(
            "train",
            recipe,
            *QUICK,
            penalty,
            "training.steps=1",
            "algorithm.group_size=2",
            *more,
            "--run-dir",
            str(run),
        )
        assert said.code == 0, said.err
        found |= read_metrics(run)[0].keys()
    patterns = {name: re.sub(r"<\w+>", r"[\\w@]+", name) for name in named}
    assert [
        name for name, pattern in patterns.items() if not any(re.fullmatch(pattern, each) for each in found)
    ] == []


def test_measures_of_agents_become_metrics_of_agents() -> None:
    from tests.support.episodes import episode, group, turn

    one = episode(turn("a", 0), turn("b", 1), info={"fitted": {"a": 2.0, "b": 0.0}, "score": 2.0})
    other = episode(turn("a", 0), turn("b", 1), info={"fitted": {"a": 1.0, "b": 1.0}, "score": 4.0})
    row = rollout_metrics([group(one, other)])
    assert (row["info/score"], row["info/fitted/a"], row["info/fitted/b"]) == (3.0, 1.5, 0.5)
