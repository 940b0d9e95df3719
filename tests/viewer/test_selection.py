"""Episodes that a query selects: the same on the page and for a data file, and no expression of a reader takes long."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from re import search as first_of
from typing import Any

import httpx
import pytest
from tests.support.episode_lines import change_rows
from tests.support.viewed_runs import client_of, write_run

from kapelle.cli import main
from kapelle.runs.step_rows import append_step
from kapelle.viewer.episode import credit_map, step_episodes
from kapelle.viewer.expression import Expression
from kapelle.viewer.selection import selected


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps of two groups of a right and a wrong episode; the last step's first episode is out of the ordinary."""
    run = write_run(tmp_path_factory.mktemp("runs") / "one", steps=4)

    def change(line: int, row: dict[str, Any]) -> None:
        if (row["step"], line) == (4, 0):
            row["info"]["solved early"], row["truncated"] = True, True
            row["turns"][1] |= {"finish_reason": "length", "text": "17 apples (cut"}
            row["rewards"] = {"solver": 0.25, "critic": 3.0}

    change_rows(run / "episodes" / "train", change)
    return run


@pytest.fixture(scope="module")
def web(run: Path) -> Iterator[httpx.Client]:
    with client_of(run.parent) as made:
        yield made


ODD = [("train", 4, 0)]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("finish=length", ODD),
        ("tag=solved+early", ODD),
        ("tag=cut+off", ODD),
        ("tag=solved", []),
        ("least=1.5", ODD),
        ("least=0.2&most=0.3&agent=solver", ODD),
        ("least=nan&outcome=right&from=4", [("train", 4, 0), ("train", 4, 2)]),
        ("re=%5Cd%7B2%7D+apples", ODD),
        ("re=apples&agent=critic", ODD),
        ("re=apples&agent=solver", []),
        (
            "re=I+carry+the+%5B12%5D%24&outcome=right",
            [("train", step, line) for step in (1, 2) for line in (0, 2)],
        ),
    ],
)
def test_episodes_are_selected(
    run: Path, web: httpx.Client, query: str, found: list[tuple[str, int, int]]
) -> None:
    assert selected(run, query) == (found, "")
    page = web.get(f"/run/one/episodes?sort=oldest&{query}").text
    shown = [f"/run/one/episode/{split}/{step}/{line}" for split, step, line in found]
    assert page.count("<tr data-item>") == len(found)
    assert all(f'<a href="{place}">' in page for place in shown)


@pytest.mark.parametrize(
    "expression", ["(a+)+$", "(a|aa)+$", "^(([a-z])+.)+[A-Z]([a-z])+$", "(?:a?){9000}a{9000}b"]
)
def test_no_expression_takes_long(expression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kapelle.viewer.expression.TEXT", 0.02)
    began, asked = time.monotonic(), Expression(expression)
    while not asked.trouble and asked.slow < 5:
        asked.finds(["a" * 30_000 + "!"])
    assert "takes too long" in asked.trouble or "copies" in asked.trouble
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("(a", "missing )"),
        ("((a{100}){100}){100}", "1,000,000 copies"),
        ("a" * 201, "201 characters"),
        ("a{9999999999999}", "copies"),
    ],
)
def test_an_expression_that_cannot_be_used_says_why(
    web: httpx.Client, run: Path, expression: str, why: str
) -> None:
    assert why in selected(run, f"re={expression}")[1]
    assert why in unescape(web.get("/run/one/episodes", params={"re": expression}).text)


def test_filters_are_escaped(web: httpx.Client) -> None:
    hostile = '"><script>x()</script>'
    page = web.get(
        "/run/one/episodes", params=dict.fromkeys(("re", "tag", "least", "finish", "short"), hostile)
    ).text
    assert "<script>x" not in page


def test_the_count_of_a_search_is_that_of_all_pages(tmp_path: Path) -> None:
    write_run(tmp_path / "long", steps=20)
    with client_of(tmp_path) as web:
        path, seen = "/run/long/episodes?re=carry&sort=oldest", 0
        for _ in range(2):
            page = web.get(path).text
            assert '<p class="quiet tight" id="count">80 episodes</p>' in page
            seen += page.count("<tr data-item>")
            link = first_of(r'rel="next" href="([^"]+)"', page)
            path = "/run/long/episodes" + unescape(link[1]) if link else ""
    assert (seen, path) == (80, "")


def test_the_shown_command_collects_the_same_episodes(
    web: httpx.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = web.get("/run/one/episodes?re=carry+the+[34]&sort=longest").text
    shown = first_of(r'<code id="collect">(.*?)</code>', page)
    assert shown is not None
    words = shlex.split(unescape(shown[1]))
    assert words[:2] == ["kapelle", "collect"]
    assert main(words[1:]) == 0
    rows = [json.loads(line) for line in Path("picked.jsonl").read_text().splitlines()]
    assert {row["task"] for row in rows} == {"t3-0", "t3-1", "t4-0", "t4-1"}
    assert len(rows) == 16, "two turns of eight episodes"
    assert main([*words[1:-3], "dpo", "--out", "pairs.jsonl"]) == 0
    pairs = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()]
    assert {row["reward"] for row in pairs} == {0.0, 1.0}, (
        "solvers that read the same question, paid differently"
    )
    assert (
        main(["collect", words[2], "--recorded", "outcome=right", "--for", "dpo", "--out", "none.jsonl"]) == 2
    )
    assert "different rewards" in capsys.readouterr().err
    assert main(["collect", words[2], "--recorded", "re=(", "--out", "none.jsonl"]) == 2
    assert "the regular expression `re` cannot be used" in capsys.readouterr().err
    for query, said in (
        ("outcom=right", "Did you mean 'outcome'?"),
        ("outcome=rigt", "Did you mean 'right'?"),
        ("agent=critik", "Did you mean 'critic'?"),
    ):
        assert main(["collect", words[2], "--recorded", query, "--out", "none.jsonl"]) == 2
        assert said in capsys.readouterr().err


def test_credit_is_mapped_over_agents_and_turns(run: Path, tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    turns = [{"index": 0, "advantage": [1.0, 2.0]}, {"index": 1, "advantage": [-0.5]}]
    trace = {"format": 1, "step": 4, "line": 1, "turns": turns}
    append_step(tmp_path / "traces", 4, json.dumps(trace).encode() + b"\n")
    group = [each for each in step_episodes(run, "train", 4) if each.group == 0]
    rows = credit_map(tmp_path, "train", 4, group)
    assert [(row["episode"].line, row["agent"]) for row in rows] == [
        (0, "solver"), (0, "critic"), (1, "solver"), (1, "critic"),
    ]  # fmt: skip
    assert rows[0]["cells"][0].value is None, "neither paid nor recorded"
    assert rows[0]["cells"][1] is None, "the critic's turn"
    assert (rows[2]["cells"][0].value, rows[2]["cells"][0].shade) == (1.5, "p4")
    assert (rows[3]["cells"][1].value, rows[3]["cells"][1].shade) == (-0.5, "m2")
