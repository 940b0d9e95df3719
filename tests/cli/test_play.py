from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspiel")

from tests.cli.conftest import Kapelle
from tests.faults.data import write_data
from tests.faults.recipes import write_recipes

from kapelle.cli.play import Person, PlayedTable, seated
from kapelle.environments.openspiel.environment import OpenSpiel
from kapelle.errors import ConfigError
from kapelle.setup.recipe import builtin_recipes
from kapelle.workflows.play import PlayWorkflow

Type = Callable[..., None]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Type:
    """Let somebody type these lines, and leave after them."""

    def prepare(*lines: str) -> None:
        waiting: Iterator[str] = iter(lines)

        def read(_: str = "") -> str:
            try:
                return next(waiting)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr(builtins, "input", read)

    return prepare


def test_a_hand_against_the_equilibrium(kapelle: Kapelle, typed: Type) -> None:
    typed("bte", "b")
    said = kapelle("play", "kuhn_poker", "--against", "nash", "environment.wording=short")
    assert said.code == 0, said.err
    lines = said.out.split("\n")
    assert lines[1] == "1/2 1 <Pass | Bet>"
    assert lines[2] == "'bte' is none of the legal moves: Pass, Bet. Type one, or its first letters."
    assert lines[4].startswith("moves   1: Bet, 2: ")
    assert lines[5].split()[0] == "you"
    returns = [float(value) for value in lines[6].removeprefix("seats").split(",")]
    assert returns == [float(lines[5].split()[1]), -float(lines[5].split()[1])]


def test_the_second_seat_against_the_script(kapelle: Kapelle, typed: Type) -> None:
    typed("Bet", "Bet")
    said = kapelle("play", "kuhn_poker", "--seat", "2", "--seed", "3")
    assert said.code == 0, said.err
    assert "You are player 2 of 2" in said.out
    assert "You are player 1 of 2" not in said.out
    assert "player_1" in said.out


def test_other_environments_and_recipes_are_played_too(kapelle: Kapelle, typed: Type) -> None:
    typed("B")
    said = kapelle("play", "matrix", "environment.game=xor")
    assert "1/2 AB" in said.out
    assert said.out.splitlines()[-1] in {"success 1.00", "success 0.00"}
    typed("132")
    assert "success" in kapelle("play", "arithmetic").out


def test_whoever_leaves_is_told_that_the_game_is_not_over(kapelle: Kapelle, typed: Type) -> None:
    typed()
    said = kapelle("play", "tic_tac_toe", "--against", "mcts")
    assert said.code == 2
    assert said.err == "kapelle: The game was left before it was over.\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Name one environment"),
        (["kuhn_pokr"], "not an environment, recipe or run directory"),
        (["kuhn_poker", "--against", "nsh"], "Did you mean 'nash'"),
        (["kuhn_poker", "--seat", "3"], "seats 1 to 2"),
        (["kuhn_poker", "--seat", "3", "--against", "nash"], "kuhn_poker has 2 players"),
        (["kuhn_poker", "--against", "mcts"], "sees the whole state"),
        (["matrix", "--against", "mcts"], "games of OpenSpiel"),
        (["tic_tac_toe", "--seat", "0"], "0 is less than 1"),
        (["kuhn_poker", "--exact"], "--exact takes a run directory"),
    ],
)
def test_what_cannot_be_played_is_said_in_one_line(kapelle: Kapelle, words: list[str], message: str) -> None:
    said = kapelle("play", *words)
    assert said.code == 2
    assert message in said.err
    assert said.err.count("\n") == 1


def test_without_openspiel_the_package_is_named_first(
    kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyspiel", None)
    said = kapelle("play", "kuhn_poker", "--against", "nash").err
    assert said.startswith("kapelle: The environment `openspiel` needs the package open_spiel")
    assert "'kuhn_poker' is not an environment" in said
    misspelt = kapelle("play", "demmo").err
    assert misspelt.startswith(
        "kapelle: 'demmo' is not an environment, recipe or run directory. Did you mean"
    )


@pytest.mark.long
@pytest.mark.slow
def test_a_trained_team_plays_the_other_seats(kapelle: Kapelle, typed: Type) -> None:
    tiny = ["model.embedded.hidden=16", "model.embedded.layers=1", "model.embedded.intermediate=32"]
    small = ["warmup.steps=1", "warmup.demonstrations=8", "training.steps=1", "training.tasks_per_step=2"]
    trained = kapelle(
        "train", "kuhn", *tiny, *small, "evaluation.problems=2", "--run-dir", "run", "--no-rich"
    )
    assert trained.code == 0, trained.err
    typed("Pass", "Pass")
    said = kapelle("play", "run", "--seat", "1")
    assert said.code == 0, said.err
    assert (
        "You are player 1 of 2 in Kuhn Poker.\nYour card: 0\nMoves so far: none\nLegal moves: <Pass | Bet>\n"
        in said.out
    )
    assert "Kuhn poker: each of the 2 players" in said.out, "a person is told the rules"
    assert "you " in said.out
    assert "second" in said.out
    typed("Pass", "Pass")
    for opponent in ("random", "nash"):
        met = kapelle("play", "run", "--against", opponent)
        assert met.code == 0, met.err
        assert "You are player 1 of 2 in Kuhn Poker." in met.out
        typed("p", "p")
    typed("Pass", "Pass")
    other = kapelle("play", "kuhn_poker", "--against", "run")
    assert other.code == 0, other.err
    assert "Your card: 1\nMoves so far: none\n" in other.out
    typed("Pass", "Pass")
    worded = kapelle("play", "run", "environment.wording=short")
    assert worded.out.startswith("\n1/2 0 <Pass | Bet>\n"), "the team's own words, for whoever asks for them"
    exact = kapelle("play", "run", "--exact")
    assert exact.code == 0, exact.err
    lines = [line.split() for line in exact.out.splitlines()]
    assert lines[0][0] == "policy"
    assert lines[1][:3] == ["uniform", "0.917", "0.458"]
    assert lines[2][0] == "1"
    assert 0 <= float(lines[2][1]) <= 4
    assert len(lines) == 3, "one checkpoint has no average"
    more = ("training.steps=4", "checkpoint.every=1", "checkpoint.keep=4", "--no-rich")
    longer = kapelle("train", "--resume", "run", *more)
    assert longer.code == 0, longer.err
    rows = [line[:12].strip() for line in kapelle("play", "run", "--exact").out.splitlines()]
    assert rows == ["policy", "uniform", "1", "2", "3", "4", "average", "later half"]


def test_a_solver_leaves_one_seat(typed: Type) -> None:
    environment = OpenSpiel.model_validate({"game": "kuhn_poker", "opponents": {1: "random"}})
    play, mine = seated(PlayedTable(environment, PlayWorkflow(), None), 2, input)
    assert play.team.names == (mine,) == ("player_1",)
    assert Person(input).policies == ("you",)
    with pytest.raises(ConfigError):
        seated(PlayedTable(OpenSpiel(), PlayWorkflow(), None), 3, input)


@pytest.fixture(scope="session")
def recipes_with_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipes that come with kapelle, small, on made-up data."""
    folder = tmp_path_factory.mktemp("recipes")
    write_data(folder / "data")
    write_recipes(folder / "recipes", folder / "data", folder / "ended")
    return folder / "recipes"


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", builtin_recipes())
def test_every_recipe_can_be_played(
    kapelle: Kapelle, typed: Type, recipes_with_data: Path, name: str
) -> None:
    typed(*["1", "Pass", "a0", "Play 0", "Call"] * 10)
    file = recipes_with_data / f"{name}.yaml"
    said = kapelle("play", file if file.is_file() else name)
    assert (said.code, said.err) == (0, "")
    assert " reads:\n" in said.out
    assert "\nyou " in said.out


def test_who_has_nothing_to_do_in_tests_plays_a_task_of_training(kapelle: Kapelle, typed: Type) -> None:
    typed("47+85")
    said = kapelle("play", "proposals", "environment.proposer=player_1")
    assert said.code == 0, said.err
    assert said.out.split()[0].isdigit(), "the number to begin with"
    typed("132")
    solver = kapelle("play", "proposals", "environment.proposer=player_1", "--seat", "2")
    assert "+" in solver.out.split()[0], "a fixed problem"


def test_a_seat_that_is_not_there_is_answered_with_those_that_are(kapelle: Kapelle) -> None:
    said = kapelle("play", "demo", "--seat", "9")
    assert (said.code, said.err) == (2, "kapelle: --seat 9: there are seats 1 to 2 (reasoner, actor).\n")


@pytest.mark.parametrize(("held_out", "seed"), [("none", "0"), ("share", "50")])
def test_questions_of_a_small_data_set_are_played_at_any_seed(
    kapelle: Kapelle, typed: Type, tmp_path: Path, held_out: str, seed: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "{k}+1?"}}\n' for k in range(20)))
    (tmp_path / "pays.py").write_text("def one(completion):\n    return 1.0\n")
    words = [f"environment.path={rows}", f"environment.eval_path={held_out}", "environment.test_share=0.3"]
    reward = f'environment.rewards=[{{"function": "{tmp_path}/pays.py:one"}}]'
    typed("2")
    said = kapelle("play", "rewarded", *words, reward, "--seed", seed)
    assert (said.code, "+1?" in said.out) == (0, True), said.err
