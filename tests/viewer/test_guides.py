"""A verdict leads to what the documentation says of its causes, without leaving the viewer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from tests.support.viewed_runs import write_run

from kapelle.runs.verdict import ADVICE, FLAT_PAGE, LEARN_PAGE
from kapelle.services.binding import Binding
from kapelle.services.http import HttpServer
from kapelle.viewer.guides import FOUND, PAGES
from kapelle.viewer.library import Library
from kapelle.viewer.server import viewer

ROOT = Path(__file__).parents[2]


def pages(folder: Path, *paths: str) -> list[str]:
    with (
        HttpServer(Binding(), viewer(Library([folder]), Binding())) as server,
        httpx.Client(base_url=server.url, timeout=60.0) as web,
    ):
        answers = [web.get(path) for path in paths]
    assert all(each.headers["content-security-policy"].startswith("default-src 'none'") for each in answers)
    return [each.text for each in answers]


@pytest.mark.parametrize("page", [FLAT_PAGE, LEARN_PAGE])
def test_the_viewer_has_the_rows_of_the_documentations_table(page: str) -> None:
    text = (ROOT / page).read_text()
    table = text[text.index("| what you see |") :].partition("\n\n")[0].splitlines()[2:]
    said = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line).replace("*", "") for line in table]
    rows = [
        " | ".join(part for part in (row.seen, row.cause, row.remedy) if part) for row in FOUND[PAGES[page]]
    ]
    assert [line.strip("| ") for line in said] == rows


def test_every_verdict_leads_to_the_advice_and_every_link_there_has_an_end(tmp_path: Path) -> None:
    write_run(tmp_path / "short", steps=4)
    run = write_run(tmp_path / "healthy", steps=1)
    rows = ({"step": k + 1, "success": 0.03 * k, "scored": 128.0} for k in range(30))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    short, healthy, advice = pages(tmp_path, "/run/short", "/run/healthy", "/advice")
    assert 'href="/advice#young"' in short
    assert 'href="/advice#healthy"' in healthy
    assert "What to do" in healthy
    links = set(re.findall(r'href="#([\w-]+)"', advice)) - {"main"}
    assert links == set(PAGES.values())
    assert all(f'id="{name}"' in advice for name in (*links, *ADVICE))
    assert "docs/" not in advice, "no path that a reader of the viewer cannot open"
    assert "the rate destroyed the weights" in advice


def test_a_finished_run_without_steps_is_sent_to_no_curve_and_not_told_to_wait(tmp_path: Path) -> None:
    write_run(tmp_path / "none", steps=0)
    write_run(tmp_path / "going", steps=0, ends=False)
    (tmp_path / "none" / "evaluations.jsonl").unlink()
    ended, going = pages(tmp_path, "/run/none/verdict", "/run/going/verdict")
    for page in (ended, going):
        assert "no step is recorded" in page
        assert "#panel-" not in page
    assert "Let it run on" not in ended
    assert "<code>kapelle train --resume RUN training.steps=N</code>" in ended


def test_a_curve_is_linked_only_where_the_page_has_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "paid", steps=1)
    rows = ({"step": k + 1, "return/solver": 0.5} for k in range(3))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (page,) = pages(tmp_path, "/run/paid/verdict")
    assert "3 of the 8 steps" in page
    assert "#panel-success" not in page
