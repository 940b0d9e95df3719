"""A run that has failed or was killed says why, on top of its page and in the list."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.support.viewed_runs import CONFIG, append_step, client_of, episode, write_run

from kapelle.errors import TrainingHalted
from kapelle.runs.writer import RunDirectory
from kapelle.types import Episode, Group, Task

MARKUP = "<script>alert(1)</script>"


def write_failed_run(path: Path, *, recorded: bool) -> None:
    """Write a run whose second step fails, with or without the episodes of that step."""
    config = CONFIG.format(name="pair", seed=0, algorithm="grpo", lr=0.001)
    task = Task("t9", "9?", {})
    first = episode(task, 2, right=False)
    broken = Episode(task, 7, first.agents, first.turns[:1], {}, None, error=f"ValueError: {MARKUP}")
    groups = [Group(task, (broken, broken))]
    with RunDirectory.create(path, config=config, provenance={}, resume=False) as run:
        run.rewind({})
        append_step(run, 1)
        if recorded:
            run.record_metrics(2, {"samples": 2.0, "failed_episodes": 1.0})
            run.record_episodes(2, groups)
        run.log(f"a line of the log {MARKUP}")
        raise TrainingHalted(f"2 of 2 episodes of this step failed {MARKUP}", groups)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_failed_run_shows_its_reason_and_its_log(tmp_path: Path, recorded: bool) -> None:
    with pytest.raises(TrainingHalted):
        write_failed_run(tmp_path / "run", recorded=recorded)
    with client_of(tmp_path) as web:
        page, listed = web.get("/run/run").text, web.get("/").text
        link = "/run/run/episodes?split=train&amp;outcome=errors&amp;from=2&amp;to=2"
        assert (link in page) == recorded, "episodes that were not recorded cannot be opened"
        if recorded:
            assert web.get(link.replace("&amp;", "&")).text.count("<tr data-item>") == 2
    assert page.index("2 of 2 episodes of this step failed") < page.index('class="figures"')
    assert "after a turn of solver: ValueError: &lt;script&gt;" in page
    assert "Traceback" in page
    assert "a line of the log &lt;script&gt;" in page
    assert "young" not in page, "what a run may do that goes on is no advice here"
    assert "ValueError: &lt;script&gt;" in listed
    assert MARKUP not in page + listed


def test_a_killed_run_is_killed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2, ends=False)
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"pid": 2**22 + 1, "state": "running"}))
    with client_of(tmp_path) as web:
        page, listed = web.get("/run/run").text, web.get("/").text
        assert '<span class="state killed' in page
        assert "ended without a message" in page
        (run / "run.log").write_text(
            "2026-01-01T00:00:00.000+00:00 stopping: finishing step 3, then saving\n"
        )
        assert "stopped by a second Ctrl-C" in web.get("/run/run").text
        assert '<span class="state killed' in listed
        (run / "status.json").write_text(
            json.dumps(
                status | {"state": "running", "host": "elsewhere", "updated": "2026-01-01T00:00:00.000+00:00"}
            )
        )
        assert "nothing has been written since" not in web.get("/run/run").text, "its metrics are new"
        for file in run.iterdir():
            os.utime(file, (0, 0))
        assert "nothing has been written since 2026-01-01" in web.get("/run/run").text
