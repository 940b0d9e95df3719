"""What the viewer answers to programs; browsers are in `test_browser`."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.support.viewed_runs import append_step, client_of, write_run

from kapelle.runs.findings import keep_evaluation
from kapelle.runs.writer import RunDirectory
from kapelle.services.binding import Binding
from kapelle.services.http import HttpServer
from kapelle.viewer import curves
from kapelle.viewer.library import Library
from kapelle.viewer.server import viewer

LONG = "a-token-that-is-long-enough"
PAGES = [
    "/",
    "/run/pair-0",
    "/run/other~pair-0",
    "/compare?run=pair-0&run=pair-1",
    "/curves.json?run=pair-0",
    "/run/pair-0/distributions.json",
    "/advice",
    "/run/pair-0/team",
    "/run/pair-0/settings?q=lr&all=1",
    "/run/pair-0/episodes",
    "/run/pair-0/episodes?q=%22&from=x&page=0&sort=none&agent=critic&split=no",
    "/run/pair-0/episode/train/3/0?as=critic",
    "/run/pair-0/episode/train/3/0/1",
    "/run/pair-0/together?e=train.1.0&e=train.2.0",
    "/static/viewer.css",
]


def test_every_page_has_the_content_security_policy(web: httpx.Client) -> None:
    for path in PAGES:
        answer = web.get(path)
        assert answer.status_code == 200, path
        parts = answer.headers["content-security-policy"].split(";")
        policy = dict(part.strip().split(" ", 1) for part in parts)
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in str(policy)
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_missing_pages_are_not_found(web: httpx.Client) -> None:
    for path in (
        "/run/none",
        "/run/..~..",
        "/static/..%2f..%2fserver.py",
        "/static/VENDORED.json",
        "/compare?run=none",
        "/run/%00",
        "/run/pair-0/episode/train/3/99",
        "/run/pair-0/episode/other/3/0",
        f"/run/pair-0/episode/train/{'9' * 400}/{'9' * 400}",
        "/run/pair-0/episode/train/3/0/9",
        "/run/pair-0/together?e=train.9.0",
    ):
        answer = web.get(path)
        assert answer.status_code == 404, path
        assert "content-security-policy" in answer.headers


def test_other_methods_are_not_allowed(web: httpx.Client) -> None:
    assert [web.request(method, "/").status_code for method in ("POST", "PUT", "DELETE")] == [405] * 3


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": "evil.example:80"}, 421),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),
    ],
)
def test_other_sites_may_link_but_not_load(headers: dict[str, str], status: int, web: httpx.Client) -> None:
    assert web.get("/", headers=headers).status_code == status


def test_a_set_token_is_required(runs: Path) -> None:
    binding = Binding(token=LONG)
    with (
        HttpServer(binding, viewer(Library([runs]), binding)) as server,
        httpx.Client(base_url=server.url) as web,
    ):
        assert web.get("/").status_code == 401
        assert web.get("/static/page.js").status_code == 401
        assert web.get("/", auth=("me", LONG)).status_code == 200


def test_a_run_shows_its_evaluation_at_equal_tokens(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    team = {"success": 0.5, "interval": [0.25, 0.75], "scored": 40, "tokens": 12.5}
    alone = {"agents": ["solver", "critic"], "answers": 1, **team, "success": 0.375}
    keep_evaluation(run, {"steps": 2, "team": team, "baselines": [alone, {**alone, "answers": 3}, 7]}, [])
    keep_evaluation(run, {"steps": 2, "team": {"success": None}, "baselines": None}, [])
    with client_of(tmp_path) as web:
        text = web.get("/run/run").text
    assert [text.count(each) for each in ("solver, critic alone", "majority of 3 answers", "37.5 %")] == [
        1,
        1,
        2,
    ]


def test_a_finished_run_with_a_fault_is_marked(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    rows = [
        {"step": k + 1, "success": 0.4 * (k < 1), "scored": 64.0, "dead_groups": float(k > 0), "entropy/<b>": min(5.0, 0.2 + k)}
        for k in range(12)
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with client_of(tmp_path) as web:
        listing, page, advice = (web.get(path).text for path in ("/", "/run/run", "/advice"))
    for text in (listing, page):
        assert 'class="health diverging"' in text
        assert "state finished amiss" in text
        assert 'class="state finished"' not in text
    assert "success fell from 40.0 % at step 1 to 0.0 %" in page
    assert "all groups are dead in 11 of 12 steps" in page
    assert "entropy of &lt;b&gt; rose" in page
    for link in (
        "#panel-success",
        "#panel-dead_groups",
        "/run/run/episodes?from=2&amp;to=2",
        "/advice#diverging",
    ):
        assert f'href="{link}"' in page
    assert "<code>optimizer.lr</code>" in page
    assert 'id="diverging"' in advice


def test_distributions_are_stretches_of_steps_in_common_bins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "STRETCHES", 2)
    run = write_run(tmp_path / "run", steps=1)
    rows = [
        '{"step": 1, "reward/solver": [-1, 0, [1, 3]], "reward/critic": 7, "odd/solver": [0, 0, [1]]}',
        "{nonsense",
        '{"step": 2, "reward/solver": [0, 1, [4]]}',
        '{"step": 3, "reward/solver": [0, 0, [0, 5]]}',
        '{"step": 3, "reward/solver": [0, 0, [5]]}',
    ]
    (run / "distributions.jsonl").write_text("".join(f"{row}\n" for row in rows))
    with client_of(tmp_path) as web:
        page = web.get("/run/run/distributions.json").json()
    assert page["steps"] == [2, 3]
    (drawn,) = page["maps"]
    assert (drawn["title"], drawn["who"], drawn["color"], drawn["unit"]) == ("reward", "solver", 1, "reward")
    assert (drawn["exponent"], drawn["first"], drawn["rows"]) == (0, 0, [[4, 4], [5, 0]]), (
        "of two rows of a step the last"
    )


def changes(lines: Iterator[str]) -> Iterator[str]:
    """Yield the key of each run that has changed, according to a stream of events."""
    return (json.loads(line[6:])["run"] for line in lines if line.startswith("data: "))


def test_a_written_step_is_sent_as_an_event(tmp_path: Path) -> None:
    write_run(tmp_path / "live", steps=2)
    binding = Binding()
    with (
        HttpServer(binding, viewer(Library([tmp_path]), binding)) as server,
        httpx.stream("GET", f"{server.url}/events?run=live&from=2", timeout=60.0) as answer,
    ):
        changed = changes(answer.iter_lines())

        def write() -> None:
            with RunDirectory.create(
                tmp_path / "live",
                config=(tmp_path / "live" / "config.yaml").read_text(),
                provenance={},
                resume=True,
            ) as run:
                run.rewind(
                    {
                        "metrics.jsonl": (tmp_path / "live" / "metrics.jsonl").stat().st_size,
                        "episodes/train": 2,
                    }
                )
                append_step(run, 3)
                run.report("done", 3, "finished")

        writer = threading.Thread(target=write)
        writer.start()
        assert next(changed) == "live"
        writer.join()
    with client_of(tmp_path) as web:
        (source,) = web.get("/curves.json?run=live").json()["sources"]
    assert source["axes"]["step"] == [1, 2, 3]


def test_a_run_shows_which_phase_takes_the_time(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    write_run(tmp_path / "short", steps=2)
    with client_of(tmp_path) as web:
        text = web.get("/run/run").text
        assert 'aria-label="Time by phase"' not in web.get("/run/short").text
    assert re.findall(r"(generate|update|idle) (\d+) %", text) == [("generate", "60"), ("update", "40")]
    assert "<code>generate</code> takes 60 % of a step (0.3 of 0.5 s)" in text
    assert "Raise <code>training.tasks_per_step</code>" in text
