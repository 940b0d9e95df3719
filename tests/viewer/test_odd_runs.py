"""Runs that are named, filled or taken away as no run should be: every page still answers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import httpx
import pytest
from tests.support.viewed_runs import client_of, write_run

from kapelle.runs.step_rows import scan
from kapelle.viewer import server

VIEWS = ("", "/episodes", "/episodes?sort=longest&q=carry", "/team", "/league", "/league.json", "/settings?all=1", "/episode/train/1/0", "/episode/train/1/0/0", "/together?e=train.1.0")  # fmt: skip
MARKUP = "<img src=x onerror=alert(1)>\"'&"
NAMES = [
    "a~b",
    "a~~b~",
    "%2e%2e",
    "a b#c?d",
    "new\nline",
    "\u202eltr",
    "x" * 250,
    "é\u0301",
    "..a",
    "a'\"<b>",
    "run\udcff",
]


class Site:
    """A viewer of a folder and a client."""

    def __init__(self, web: httpx.Client) -> None:
        self.web = web

    def paths(self) -> list[str]:
        """Return the addresses of the runs that are listed."""
        text = self.web.get("/").text
        return [unescape(part.split('"')[0]) for part in text.split('class="name"><a href="')[1:]]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with client_of(tmp_path) as web:
        yield Site(web)


def test_folders_of_any_name_have_an_address_each(tmp_path: Path, site: Site) -> None:
    first = write_run(tmp_path / "first", steps=1)
    for name in NAMES:
        shutil.copytree(first, tmp_path / name)
    paths = site.paths()
    assert len(set(paths)) == len(NAMES) + 1
    for path in paths:
        answer = site.web.get(path)
        assert answer.status_code == 200, path
        assert "<b>" not in answer.text.split("<title>")[1].split("</title>")[0]


def test_names_in_settings_are_text(tmp_path: Path, site: Site) -> None:
    run = write_run(tmp_path / "run", steps=1)
    config = json.dumps(
        {"name": MARKUP, "seed": MARKUP, "description": [MARKUP], "algorithm": {"name": MARKUP}, "environment": {"name": "../../x\n" * 50, "parts": {MARKUP: 3}},
         "workflow": {"name": {MARKUP: 1}}, "training": {"steps": MARKUP}, "team": {"sharing": None, "agents": [{"name": MARKUP}, {"name": "a" * 10_000}, {"name": 7}, "x", {}]}}
    )  # fmt: skip
    (run / "config.yaml").write_text(config)
    (run / "status.json").write_text(
        json.dumps(
            {
                "state": "running",
                "phase": MARKUP,
                "step": 1,
                "pid": 1,
                "host": MARKUP,
                "started": MARKUP,
                "updated": MARKUP,
            }
        )
    )
    for view in ("/", *(f"/run/run{each}" for each in VIEWS), "/compare?run=run", "/curves.json?run=run"):
        answer = site.web.get(view)
        assert answer.status_code == 200, view
        if "json" not in answer.headers["content-type"]:
            assert "<img src=x" not in answer.text, view
            assert len(answer.text) < 300_000, view


@pytest.mark.parametrize("value", ["NaN", "-1e308", '"text"', "[1, {}]", "9" * 400])
def test_any_number_in_a_run_gives_valid_pages(value: str, tmp_path: Path, site: Site) -> None:
    run = write_run(tmp_path / "run", steps=1)
    with (run / "metrics.jsonl").open("a") as file:
        for step in (2, 3, 4):
            names = (
                "success",
                "reward/solver",
                "time/step",
                "time/update",
                "tokens/solver",
                "return/solver",
                "return/critic",
                "lr",
            )
            file.write(f'{{"step": {step}, ' + ", ".join(f'"{name}": {value}' for name in names) + "}\n")
        file.write(f'{{"step": {value}, "success": 1}}\n')
    (run / "evaluations.jsonl").write_text(
        f'{{"step": 1, "success": {value}, "interval": [{value}, {value}]}}\n{{"step": {value}, "success": 1}}\n'
    )
    (run / "evaluated.jsonl").write_text(
        f'{{"steps": {value}, "team": {{"success": {value}, "tokens": {value}, "scored": {value}}}, "baselines": {value}}}\n'
    )
    (run / "exact.json").write_text(
        f'{{"rows": [{{"step": {value}, "nash_conv": {value}}}, {{"step": 1, "nash_conv": {value}}}]}}'
    )
    for view in (
        "/",
        *(f"/run/run{each}" for each in VIEWS),
        "/compare?run=run",
        "/curves.json?run=run&by=seed&spread=median",
    ):
        answer = site.web.get(view)
        assert answer.status_code == 200, view
        if "json" in answer.headers["content-type"]:
            json.loads(answer.text, parse_constant=pytest.fail)
    with site.web.stream("GET", "/events?run=run&from=0") as answer:
        line = next(line for line in answer.iter_lines() if line.startswith("data: "))
        json.loads(line[6:], parse_constant=pytest.fail)


def test_pages_of_a_deleted_run_still_answer(tmp_path: Path, site: Site) -> None:
    run = write_run(tmp_path / "run", steps=2)
    write_run(tmp_path / "other", steps=1)
    views = [f"/run/run{each}" for each in VIEWS]
    assert {site.web.get(view).status_code for view in views} == {200}
    (run / "metrics.jsonl").write_bytes(b"")
    for name in ("status.json", "config.yaml", "provenance.json"):
        (run / name).write_bytes(b"\xff{")
    assert {site.web.get(view).status_code for view in views} == {200}
    shutil.rmtree(run)
    assert {site.web.get(view).status_code for view in views} <= {200, 404}
    assert {
        site.web.get(view).status_code for view in ("/", "/compare?run=other", "/curves.json?run=other")
    } == {200}


def test_pipes_and_devices_do_not_block_pages(tmp_path: Path, site: Site) -> None:
    run = write_run(tmp_path / "run", steps=2)
    for name in ("metrics.jsonl", "provenance.json", "evaluations.jsonl"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    for name in ("exact.json", "evaluated.jsonl"):
        (run / name).symlink_to("/dev/zero")
    os.mkfifo(run / "episodes" / "train" / "00000004.jsonl.zst")
    for view in ("/", *(f"/run/run{each}" for each in VIEWS), "/run/run/episode/train/3/0"):
        assert site.web.get(view).status_code in (200, 404), view


def test_damage_is_reported_on_the_page(tmp_path: Path, site: Site) -> None:
    for name in ("whole", "twice", "endless", "folder", "settings", "state", "packed"):
        write_run(tmp_path / name, steps=3)
    row = '{"step": 3, "success": 0.5}\n'
    with (tmp_path / "twice" / "metrics.jsonl").open("a") as file:
        file.write(row + row.replace("3", "2"))
    with (tmp_path / "endless" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "success": NaN, "reward/solver": Infinity}\n')
    (tmp_path / "folder" / "metrics.jsonl").unlink()
    (tmp_path / "folder" / "metrics.jsonl").mkdir()
    (tmp_path / "settings" / "config.yaml").write_bytes(b"\xff\x00{")
    (tmp_path / "state" / "status.json").write_text("[1]")
    (packed,) = (tmp_path / "packed" / "episodes" / "train").glob("*.zst")
    content = bytearray(packed.read_bytes())
    content[scan(packed).frames[1].start + 9] ^= 255  # in what says where rows are
    packed.write_bytes(content)
    said = {
        "twice": "metrics.jsonl has 2 rows out of order or duplicated",
        "endless": "metrics.jsonl has 2 non-finite numbers",
        "folder": "metrics.jsonl cannot be read",
        "settings": "config.yaml cannot be read",
        "state": "status.json",
        "packed": f"the run has 1 damaged episode file, so some episodes are missing here: train/{packed.name}",
    }
    assert "warnings" not in site.web.get("/run/whole").text
    for name, words in said.items():
        assert words in site.web.get(f"/run/{name}").text, name
    assert f"missing here: train/{packed.name}" in site.web.get("/run/packed/episodes").text
    assert "missing here" not in site.web.get("/run/whole/episodes").text
    assert '<b data-figure="step">3</b>' in site.web.get("/run/state").text, "as its metrics have it"
    assert "of 0 steps" not in site.web.get("/run/settings").text


def test_the_number_of_event_streams_is_limited(
    tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run", steps=1)
    monkeypatch.setattr(server, "MOST_FOLLOWERS", 2)
    path = "/events?run=run"
    with site.web.stream("GET", path) as one, site.web.stream("GET", path) as two:
        lines = [one.iter_lines(), two.iter_lines()]  # kept: an iterator that is gone closes its answer
        assert [next(each) for each in lines] == ["retry: 1000"] * 2
        with site.web.stream("GET", path) as three:
            assert three.status_code == 503
        assert site.web.get("/run/run").status_code == 200
