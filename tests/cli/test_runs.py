"""`kapelle runs`: what is there, what it came to, and back to an earlier checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.cli.conftest import Kapelle
from tests.support.five_steps import files, run, trained
from tests.support.viewed_runs import write_run

__all__ = ["run", "trained"]


@pytest.mark.slow
def test_a_rollback_prints_what_it_moves(run: Path, kapelle: Kapelle) -> None:
    before = files(run)
    said = kapelle("runs", "rollback", run, "--to", "3", "--dry-run")
    assert said.code == 0, said.err
    assert files(run) == before
    assert "would move" in said.out
    said = kapelle("runs", "rollback", run, "--to", "3")
    assert said.code == 0, said.err
    for told in (
        "checkpoints 00000004, 00000005",
        "2 rows of metrics.jsonl",
        "is now at step 3",
        f"--resume {run}",
    ):
        assert told in said.out
    assert "nothing was moved" in kapelle("runs", "rollback", run, "--to", "3").out
    assert kapelle("runs", "rollback", run, "--to", "3", "--json").json["aside"] is None


def test_a_list_shows_the_state_of_every_run(run: Path, kapelle: Kapelle) -> None:
    other = shutil.copytree(run, run.parent / "deep" / "other")
    (other / "status.json").write_text("{")
    said = kapelle("runs", "ls", run.parent)
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert len(lines) == 3
    assert lines[1].split()[1:6] == ["damaged", "?", "?", "?", "0/0"]
    assert lines[2].split()[:6] == [str(run), "finished", "young", "run", "grpo", "5/5"]
    row = kapelle("runs", "ls", run.parent, "--json").json[1]
    assert row["size"] == sum(len(data) for data in files(run).values())
    assert "loss/agent_0" in row["metrics"]
    assert row["verdict"]["evidence"][0]["sentence"] == "5 of the 8 steps that a verdict needs"
    (run.parent / "empty").mkdir()
    assert "no run under" in kapelle("runs", "ls", run.parent / "empty").out


def test_one_run_is_shown_with_its_settings_checkpoints_metrics_and_failures(
    run: Path, kapelle: Kapelle
) -> None:
    (run / "checkpoints" / "00000002" / "state.json").write_bytes(b"{}")
    (run / "provenance.json").write_text("{}")
    assert f"not recorded; {run / 'config.yaml'} contains all settings" in kapelle("runs", "show", run).out
    (run / "provenance.json").write_text(
        '{"optimizer.lr": "command line", "optimizer.betas": "mine", "seed": "default"}'
    )
    kapelle("runs", "rollback", run, "--to", "4")
    said = kapelle("runs", "show", run)
    assert said.code == 0, said.err
    for told in (
        "interrupted  step 4 of 5",
        "optimizer.lr: 0.01  (command line)",
        "optimizer.betas: [0.9, 0.999]  (mine)",
        "00000002 is damaged",
        "metrics of step 4",
        "evaluation after step 4 on unseen problems: ",
        ", scored ",
        "interrupted in phase 'rolled back' at step 4",
        "rolled back:",
    ):
        assert told in said.out
    assert said.out.count("complete") == 4
    assert "seed" not in said.out
    shown = kapelle("runs", "show", run, "--json").json
    assert [each["step"] for each in shown["checkpoints"]] == [0, 1, 2, 3, 4]
    assert shown["last"]["step"] == 4


def test_show_says_which_phase_takes_the_time(kapelle: Kapelle, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    said = kapelle("runs", "show", run)
    assert "`generate` takes 60 % of a step (0.3 of 0.5 s)" in said.out
    assert "Raise `training.tasks_per_step`" in said.out
