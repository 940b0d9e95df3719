"""Results of pairs, who won, and the ratings that follow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.episode_lines import change_rows
from tests.support.viewed_runs import client_of, write_run

from kapelle.viewer.league import opposed, standing
from kapelle.viewer.skimming import FIXED, SkimmedPair, SkimmedPlayer, Tally, players_of, tallies


def turn(agent: str, version: int, policy: str = "") -> dict[str, Any]:
    return {"agent": agent, "policy": policy or agent, "version": version}


def test_players_have_the_returns_of_their_roles() -> None:
    info = {"returns": [-1.0, 0.0, 1.0], "seats": {"a": [3], "b": [1]}, "opponents": {"2": "random"}}
    turns = [turn("a", 4), turn("b", 4, "shared"), turn("a", 5)]
    assert players_of({"info": info}, turns, {"a": 0.3, "b": 0.1}) == (
        SkimmedPlayer("shared", 4, -1.0),
        SkimmedPlayer("opponent random", FIXED, 0.0),
        SkimmedPlayer("a", 4, 1.0),
    )


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"returns": "x", "seats": [1]},
        {"returns": [1], "seats": {"a": [1], "b": [2]}},
        {"returns": [float("nan"), 0], "seats": {"a": [1], "b": [2]}, "opponents": {"x" * 99: 1, "-1": 2}},
        {"returns": [1, 2], "seats": {"a": [10**30], "b": ["1"]}},
    ],
)
def test_without_reported_returns_rewards_count(info: Any) -> None:
    paid = players_of({"info": info}, [turn("a", 1)], {"a": 1.0, "b": -1.0})
    assert paid == (SkimmedPlayer("a", 1, 1.0), SkimmedPlayer("b", FIXED, -1.0))


def game(*paid: float) -> tuple[str, Sequence[SkimmedPlayer]]:
    return "", [SkimmedPlayer(f"p{k}", 1, each) for k, each in enumerate(paid)]


def test_cooperative_games_have_no_league() -> None:
    def met(*games: tuple[str, Sequence[SkimmedPlayer]]) -> list[tuple[int, SkimmedPair, Tally]]:
        return [(1, pair, tally) for pair, tally in tallies(games).items()]

    assert opposed(met(game(1, 1), game(0, 0))) == {}
    assert opposed(met(game(1, 0), game(0, 1))) == {}, "each for itself"
    assert list(opposed(met(game(1, -1), game(0, 0)))) == [""]


def test_an_opponent_links_early_and_late_versions() -> None:
    def rows(against: str, other: int) -> list[tuple[int, SkimmedPair, Tally]]:
        return [
            (v, SkimmedPair("", "a", v, against, v if other else FIXED), Tally(50 + v, 0, 50 - v))
            for v in range(40)
        ]

    alone = standing(rows("b", 1))
    assert (alone["ladders"], alone["apart"], len(alone["pairs"])) == ([], True, 6)
    both = standing(rows("opponent random", 0))
    (ladder,) = both["ladders"]
    assert [row["name"] for row in ladder] == [
        "a v35–39", "a v28–34", "a v21–27", "a v14–20", "a v7–13", "a v0–6", "opponent random",
    ]  # fmt: skip
    assert both["cells"][0][6]["games"] == 700
    assert both["cells"][0][6]["share"] == pytest.approx(1 - both["cells"][6][0]["share"])
    assert both["cells"][0][1] is None


def test_the_page_of_a_run_whose_agents_are_opposed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "duel", steps=4)
    write_run(tmp_path / "pair", steps=2)
    change_rows(
        run / "episodes" / "train",
        lambda _, row: row["rewards"].update(critic=-row["rewards"]["critic"]),
    )
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "return/solver": 1.0, "return/critic": -1.0}\n')
    rows = [{"part": "", "step": 2, "nash_conv": 0.5, "exploitability": 0.25}, {"step": "x"}, 7]
    (run / "exact.json").write_text(json.dumps({"format": 1, "rows": rows}))
    with client_of(tmp_path) as web:
        assert "/run/duel/league" in web.get("/run/duel").text
        assert "/run/pair/league" not in web.get("/run/pair").text
        text = web.get("/run/duel/league").text
        assert "25.0 %" in text, "the critic lost 8 of 16 games and drew the others"
        assert "There is no ladder" in text
        drawn = web.get("/run/duel/league.json").json()
        panels = {panel["name"]: panel for section in drawn["sections"] for panel in section["panels"]}
        assert panels["exploitability"]["series"][0]["y"] == [0.25]
        assert not any("of your own" in panel["known_as"] for panel in panels.values())
        assert "no players to rank" in web.get("/run/pair/league").text
        board = "<details open><summary>read"
        assert board not in web.get("/run/pair/episode/train/1/0").text
        seats = {"seats": {"solver": [1], "critic": [2]}}
        change_rows(tmp_path / "pair" / "episodes" / "train", lambda _, row: row.update(info=seats))
        assert board in web.get("/run/pair/episode/train/1/0").text, "a player's board is in sight"
