"""The page of a league's pool shows the numbers in its files, and opens for files with any content."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.viewed_runs import STANDING, client_of, put_standing, write_league_run

from kapelle.runs.summary import opposed, plays_against
from kapelle.viewer.library import MetricTable, ViewedRun
from kapelle.viewer.lines import Tail
from kapelle.viewer.pool import pool, read_entries
from kapelle.viewer.skimming import FIXED, SkimmedPlayer, players_of


def opened(run: Path) -> ViewedRun:
    return ViewedRun(run.name, run, MetricTable(Tail(run / "metrics.jsonl")))


def test_numbers_of_the_newest_entry_are_those_of_its_file(tmp_path: Path) -> None:
    run = write_league_run(tmp_path / "run", STANDING)
    shown = pool(opened(run))
    assert shown is not None
    rows = {row["name"]: row for row in shown["members"]}
    assert list(rows) == ["self@4", "self@0", "solver"], "by rating"
    assert rows["self@4"]["rating"] == (120.4, 60.0, 181.0)
    assert rows["self@4"]["bar"] == [47.7, 73.8, 100.0], "of the range from -50.5 to 181"
    assert [rows[name]["entered"] for name in rows] == [4, 0, None]
    assert [rows[name]["chance"] for name in rows] == [0.0, 0.75, 0.25]
    assert rows["self@0"]["points"] == 0.54, "of the last step"
    (row, other) = shown["matrix"]["rows"]
    assert shown["matrix"]["names"] == ["self@0", "self@4"]
    assert (other[0]["share"], other[0]["games"], row[1]["share"]) == (0.7, 10, pytest.approx(0.3))
    assert shown["missing"] == []


def test_a_table_of_payoffs_is_shown_in_place_of_results(tmp_path: Path) -> None:
    table = {"names": ["self@0", "self@4"], "table": [[0, -0.5], [0.25, 0]]}
    own = STANDING | {
        "payoffs": table,
        "strategy": {"solver": {"self@0": 1.0}, "critic": {"self@4": 1.0}},
    }
    shown = pool(opened(write_league_run(tmp_path / "run", own)))
    assert shown is not None
    assert [[cell["value"] for cell in row] for row in shown["matrix"]["rows"]] == [[0, -0.5], [0.25, 0]]
    assert [cell["shade"] for cell in shown["matrix"]["rows"][0]] == ["", "m6"]


def test_entries_of_removed_steps_do_not_count(tmp_path: Path) -> None:
    later = STANDING | {"step": 8, "member": "self@8", "ratings": {"self@4": [900, 800, 1000]}}
    run = write_league_run(tmp_path / "run", STANDING, later, steps=5)
    shown = pool(opened(run))
    assert shown is not None
    assert (shown["entrant"], shown["missing"]) == ("self@4", [])
    assert read_entries(run, 8)[0][-1].member == "self@8"


DAMAGE: dict[str, Any] = {
    "members": [7, {}, [{"name": 3, "kind": "past"}], [{"name": "x", "kind": "king"}], "x", None, [[[]]]],
    "ratings": [[], {"x": 1}, {"x": [1, 2]}, {"x": [3, 4, 5]}, {"x": [1e308, 0, 1e308]}, {"x": ["1", "0", "2"]}],
    "results": [{}, [1], [["a", "b", 1, 2]], [["a", "b", -1, 0, 0]], [["a", {}, 1, 0, 0]], [["a", "b", 10**30, 0, 0]]],
    "strategy": [[], {"a": 1}, {"a": {"x": 2}}, {"a": {"x": "1"}}, {"a": {"x": -1}}, {"a": {"x": True}}],
    "payoffs": [1, {}, {"names": ["a"], "table": []}, {"names": ["a"], "table": [["1"]]}, {"names": ["a"], "table": [[0, 0]]}, {"names": "ab", "table": [[0]]}],
}  # fmt: skip


@pytest.mark.parametrize("part", DAMAGE)
def test_a_damaged_entry_is_listed_and_others_are_shown(part: str, tmp_path: Path) -> None:
    run = write_league_run(tmp_path / "run", STANDING)
    for number, value in enumerate(DAMAGE[part]):
        put_standing(run, f"{number}", json.dumps(STANDING | {part: value}).encode())
    entries, damaged = read_entries(run, 8)
    assert [entry.member for entry in entries] == ["self@4"]
    assert sorted(damaged) == [str(number) for number in range(len(DAMAGE[part]))]


@pytest.fixture
def web(tmp_path: Path) -> Iterator[httpx.Client]:
    with client_of(tmp_path) as made:
        yield made


def test_the_page_opens_for_any_entry_files(tmp_path: Path, web: httpx.Client) -> None:
    markup = "<script>alert(1)</script>\u202e"
    many = [{"name": f"m{k}", "kind": "past", "step": k} for k in range(3000)]
    odd = {
        "members": [*many, {"name": markup, "kind": "past", "step": 7}],
        "ratings": {markup: [1, 0, 2]} | {f"m{k}": [k, k, k] for k in range(3000)},
        "payoffs": {"names": [markup, "x"], "table": [[1e308, -1e308], [0, 1]]},
        "strategy": {markup: {markup: 1.0}, **{f"a{k}": {f"m{k}": 1.0} for k in range(300)}},
    }
    run = write_league_run(tmp_path / "run", STANDING | odd | {"member": "odd"})
    put_standing(run, "broken", b"{")
    put_standing(run, "large", b" " * 3_000_000)
    (run / "league" / "pipe").mkdir()
    os.mkfifo(run / "league" / "pipe" / "standing.json")
    (run / "league" / "device").mkdir()
    (run / "league" / "device" / "standing.json").symlink_to("/dev/zero")
    (run / "league" / "folder" / "standing.json").mkdir(parents=True)
    (run / "league" / "file").write_bytes(b"")
    page = web.get("/run/run/league")
    assert page.status_code == 200
    assert "<script>alert" not in page.text
    assert len(page.text) < 300_000
    assert "Payoffs between members" in page.text
    assert "5 standing.json cannot be read or are damaged: broken, device, folder, large, pipe." in page.text
    assert web.get("/run/run/league.json").status_code == 200


def test_the_page_of_a_run_with_a_league(tmp_path: Path, web: httpx.Client) -> None:
    write_league_run(tmp_path / "run", STANDING)
    assert "/run/run/league" in web.get("/run/run").text
    page = web.get("/run/run/league").text
    assert "+120" in page
    assert "league:0:player" not in page
    assert "replaced by self@0" in web.get("/run/run/episode/train/1/0").text
    drawn = web.get("/run/run/league.json").json()
    panels = {panel["name"]: panel for section in drawn["sections"] for panel in section["panels"]}
    (rating,) = panels["league/rating"]["series"]
    assert (rating["y"], rating["low"], rating["high"]) == ([120.4], [60.0], [181.0])
    assert {each["who"]: each["y"] for each in panels["league/nash_conv"]["series"]} == {
        "newest member": [0.5],
        "mixture of the pool": [0.25],
    }
    assert panels["league/points"]["series"][0]["y"] == [0.51, 0.52, 0.53, 0.54]


def test_a_replaced_role_is_played_by_the_member() -> None:
    def turn(agent: str, version: int, *, trained: bool) -> dict[str, Any]:
        return {"agent": agent, "policy": f"league:0:{agent}", "version": version, "trained": trained}

    def row(policy: str, player: Any) -> dict[str, Any]:
        return {"task": {"cast": {"b": {"policy": policy, "player": player}}}, "turns": [], "rewards": {}}

    turns, paid = [turn("a", 4, trained=True), turn("b", 2, trained=False)], {"a": 1.0, "b": -1.0}

    def second(made: dict[str, Any], turns: list[dict[str, Any]] = turns) -> SkimmedPlayer:
        return players_of(made, turns, paid)[1]

    assert second(row("league:0:player", "self@20")) == SkimmedPlayer("self@20", FIXED, -1.0)
    assert second(row("", "nash")) == SkimmedPlayer("opponent nash", FIXED, -1.0)
    learning = [turns[0], turn("b", 2, trained=True)]
    assert second(row("exploiter:player", "exploiter"), learning) == SkimmedPlayer("exploiter", 2, -1.0)
    odds: list[Any] = [None, 7, ["self"], {}, ""]
    for odd in odds:
        assert second(row("x", odd)) == SkimmedPlayer("league:0:b", 2, -1.0)
    assert second({"task": {"cast": [1]}}) == second({"task": 7}) == SkimmedPlayer("league:0:b", 2, -1.0)


@pytest.mark.parametrize(
    ("opponents", "agents", "said"),
    [
        ({}, ["a", "b"], True),
        ({}, ["a"], True),
        ({"2": "random"}, ["a"], False),
        ({"3": "random"}, ["a", "b"], True),
    ],
)
def test_returns_that_show_no_progress(opponents: dict[str, str], agents: list[str], said: bool) -> None:
    """Two seats of the team, or one agent in every seat; one that plays strangers is paid for its strength."""
    settings = {"environment": {"name": "openspiel", "opponents": opponents}}
    names = [*(f"return/{agent}" for agent in agents), "info/draw"]
    assert opposed(settings, {}, names) == said
    assert not opposed({"environment": {"name": "arithmetic"}}, {}, names[:-1])


@pytest.mark.parametrize(
    ("settings", "last", "shown"),
    [
        ({"league": {"population": "pfsp"}}, {}, True),
        ({"league": None}, {"success": 1.0}, False),
        # Penalties for invalid moves are in returns.
        ({}, {"return/a": -4.0, "return/b": -3.0, "reward/a": 0.5, "reward/b": -0.5}, True),
        ({}, {"return/a": -4.0, "return/b": -3.0, "reward/a": 0.0, "reward/b": 0.0, "info/won/a": 0.5}, True),
        ({}, {"return/a": 1.0, "return/b": 1.0, "reward/a": 1.0, "reward/b": 1.0}, False),
    ],
)
def test_agents_that_play_against_others(settings: Any, last: Any, shown: bool) -> None:
    assert plays_against(settings, last) == shown
