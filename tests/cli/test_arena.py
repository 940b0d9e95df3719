"""`kapelle arena`: its output and files, how it continues, and errors before anything loads."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import TINY, Kapelle

pytest.importorskip("pyspiel")

from kapelle.rollout.episodes import collect_scheduled

GAME = ("--environment", "kuhn_poker", "--games", "12")


def test_the_table_and_the_files(kapelle: Kapelle) -> None:
    said = kapelle("arena", "nash", "random", "s=scripted", *GAME, "--output", "a")
    assert said.code == 0, said.err
    assert "kuhn_poker(): 12 deals" in said.out
    assert "kept in a, picture: a/arena.svg" in said.err
    found = json.loads(Path("a/arena.json").read_bytes())
    assert [each["label"] for each in found["players"]] == ["nash", "random", "s"]
    assert found["payoffs"][0][1]["mean"] == pytest.approx(-found["payoffs"][1][0]["mean"])
    assert found["payoffs"][0][0] is None
    assert sum(found["results"][0][1]) == 12
    for each in found["players"]:
        assert each["elo"]["low"] <= each["elo"]["rating"] <= each["elo"]["high"]
    with Path("a/arena.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    assert float(rows[0]["payoff"]) == found["payoffs"][0][1]["mean"]
    assert b"<svg" in Path("a/arena.svg").read_bytes()


def test_a_league_run_names_commands_that_fit(kapelle: Kapelle) -> None:
    said = kapelle("train", "kuhn_league", *TINY, "league.enter.every=1", "--run-dir", "run")
    assert said.code == 0, said.err
    assert "\nplay it   kapelle play run\n" in said.out
    assert "\nmeasure   kapelle arena run run@0\n" in said.out
    assert kapelle("arena", "run", "run@0", "--games", "2", "--output", "a").code == 0


def test_a_stopped_arena_continues(kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch) -> None:
    kapelle("arena", "nash", "random", "scripted", *GAME, "--output", "whole")
    times = 0
    collect = collect_scheduled

    async def stopped(*of: object, **how: object) -> object:
        nonlocal times
        times += 1
        if times == 2:
            raise KeyboardInterrupt
        return await collect(*of, **how)  # type: ignore[arg-type]

    monkeypatch.setattr("kapelle.rollout.evaluation.arena.collect_scheduled", stopped)
    said = kapelle("arena", "nash", "random", "scripted", *GAME, "--output", "a")
    assert said.code == 130
    assert "Repeat the command with --output a to continue" in said.err
    assert len(list(Path("a/pairs").iterdir())) == 1
    assert not Path("a/arena.json").exists()
    again = kapelle("arena", "nash", "random", "scripted", *GAME, "--output", "a")
    assert "1 of 3 pairs are already finished" in again.err
    assert times == 4
    for name in ("arena.json", "arena.csv", "arena.svg"):
        assert Path("a", name).read_bytes() == Path("whole", name).read_bytes()
    whole = json.loads(Path("whole/arena.json").read_bytes())
    turned = kapelle("arena", "scripted", "random", "nash", *GAME, "--output", "a", "--json")
    assert "3 of 3 pairs are already finished" in turned.err
    assert turned.json["payoffs"][2][0] == whole["payoffs"][0][2]
    assert turned.json["results"][2][0] == whole["results"][0][2]
    more = kapelle("arena", "nash", "random", "scripted", "cfr", *GAME, "--output", "a")
    assert "3 of 6 pairs are already finished" in more.err, "a player may join later"
    assert times == 7


def test_results_that_cannot_be_written_lose_no_game(kapelle: Kapelle) -> None:
    kapelle("arena", "nash", "random", *GAME, "--output", "a")
    Path("a/arena.json").unlink()
    Path("a/arena.json").mkdir()
    words = ("arena", "nash", "random", "scripted", *GAME, "--output", "a")
    said = kapelle(*words)
    assert said.code == 2
    assert "Finished pairs are kept. Repeat the command with --output a to continue." in said.err
    Path("a/arena.json").rmdir()
    assert "3 of 3 pairs are already finished" in kapelle(*words).err


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        ({"games": []}, "contains 0 deals of nash and random, not 12 of"),
        ({"failed": -1}, "are not all counts"),
        ({"seatings": []}, "`role_orders` are []"),
    ],
)
def test_a_damaged_pair_is_named_before_anything_is_played(
    kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch, edit: dict[str, Any], reason: str
) -> None:
    kapelle("arena", "nash", "random", *GAME, "--output", "a")
    file = Path("a/pairs/nash~random.json")
    file.write_text(json.dumps({**json.loads(file.read_bytes()), **edit}))
    monkeypatch.setattr("kapelle.comparison.arena.load", lambda *_: pytest.fail("loaded"))
    said = kapelle("arena", "nash", "random", "scripted", *GAME, "--output", "a")
    assert (said.code, said.err.count("\n")) == (2, 1), said.err
    assert f"kapelle: {file}" in said.err
    assert reason in said.err
    assert "Remove it to roll out the pair again" in said.err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ("nash", "nsh", *GAME),
            "OpenSpiel has no player 'nsh', and there is no such run or model folder. Did you mean 'nash'?",
        ),
        (("nash", "mcts", *GAME), "The opponent `mcts` sees the whole state"),
        (("run", "nash", *GAME), "'run' was trained on arithmetic"),
        (("./rum@2", "nash"), "'./rum@2' is not a run: rum has no config.yaml"),
        (
            ("nash", "http://localhost:1/v1", *GAME),
            "contains no model name. Write http://localhost:1/v1#MODEL",
        ),
        (("nash", "random", "training.steps=3", *GAME), "'training.steps=3' cannot be set in an arena"),
        (("nash", "random", "envronment.invalid=forfeit", *GAME), "Did you mean 'environment'?"),
    ],
)
@pytest.mark.usefixtures("no_model")
def test_bad_input_is_one_line_before_anything_loads(
    kapelle: Kapelle, run: Path, words: tuple[str, ...], reason: str
) -> None:
    said = kapelle("arena", *words, "--output", "a")
    assert said.code == 2
    assert reason in said.err
    assert said.err.count("\n") == 1
    assert not Path("a").exists()
