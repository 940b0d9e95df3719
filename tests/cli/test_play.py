from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("pyspiel")

from tests.cli.conftest import Kapelle

Type = Callable[..., None]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Type:
    """Let someone type these lines, and leave after them."""

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
    assert (
        lines[2] == "'bte' is not one of the legal moves: Pass, Bet. Type one of them, or its first letters."
    )
    assert lines[4].startswith("moves   you: Bet, nash: ")
    assert lines[5].split()[0] == "you"
    returns = [float(value) for value in lines[6].removeprefix("roles").split(",")]
    assert returns == [float(lines[5].split()[1]), -float(lines[5].split()[1])]


def test_a_person_in_the_second_role_against_the_script(kapelle: Kapelle, typed: Type) -> None:
    typed("Bet", "Bet")
    said = kapelle("play", "kuhn_poker", "--role", "2", "--seed", "3")
    assert said.code == 0, said.err
    assert "You are player 2 of 2" in said.out
    assert "You are player 1 of 2" not in said.out
    assert "player_1" in said.out


def test_a_person_reads_the_last_move_of_each_player(kapelle: Kapelle, typed: Type) -> None:
    typed("x(0,0)")
    said = kapelle("play", "tic_tac_toe", "--against", "random")
    assert "\nLast moves: 1: x(0,0), 2: o(" in said.out


def test_other_environments_and_recipes_are_played_too(kapelle: Kapelle, typed: Type) -> None:
    typed("B")
    said = kapelle("play", "matrix", "environment.game=xor")
    assert "1/2 AB" in said.out
    assert "\nmoves   you: B, player_2: " in said.out
    assert said.out.splitlines()[-1] in {"success 1.00", "success 0.00"}
    typed("132")
    assert "success" in kapelle("play", "arithmetic").out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kuhn_pokr"], "not an environment, recipe or run directory"),
        (["kuhn_poker", "--against", "nsh"], "Did you mean 'nash'"),
        (["kuhn_poker", "--role", "3"], "roles 1 to 2"),
        (["kuhn_poker", "--against", "mcts"], "sees the whole state"),
        (["kuhn_poker", "--exact"], "--exact takes"),
    ],
)
def test_wrong_arguments_of_play_end_with_one_line(kapelle: Kapelle, words: list[str], message: str) -> None:
    said = kapelle("play", *words)
    assert said.code == 2
    assert message in said.err
    assert said.err.count("\n") == 1
