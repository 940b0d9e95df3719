from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import TINY, Said

from kapelle.cli import main
from kapelle.runs.checkpoint import newest_valid
from kapelle.runs.reader import episode_steps, read_evaluations, read_metrics, read_status


def test_json_is_one_object_on_stdout_and_progress_is_on_stderr(finished: tuple[Path, Said]) -> None:
    run, said = finished
    assert said.json == json.loads(said.out.splitlines()[0])
    row = said.json
    assert row["problems"] == 4
    assert row["run_dir"] == str(run)
    assert (row["steps"], row["stopped_by"]) == (2, 0)
    assert 0 <= row["accuracy_before"] <= 1
    assert row["interval"][0] <= row["accuracy_after"] <= row["interval"][1]
    assert row["seconds_training"] > 0
    assert row["seconds_total"] >= row["seconds_training"] + row["seconds_warmup"]
    assert "step 2/2" in said.err


def test_the_run_directory_is_whole(finished: tuple[Path, Said]) -> None:
    run, said = finished
    assert read_status(run).state == "finished"
    assert [row["step"] for row in read_metrics(run)] == [1, 2]
    assert episode_steps(run) == [1, 2]
    newest = newest_valid(run / "checkpoints")
    assert newest.folder is not None
    assert newest.folder.name == "00000002"
    rows = read_evaluations(run)
    assert [row["step"] for row in rows] == [0, 2]
    assert [row["success"] for row in rows] == [said.json["accuracy_before"], said.json["accuracy_after"]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.slow
def test_a_terminal_shows_the_panel_except_with_no_rich(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = {}
    for option in ([], ["--no-rich"]):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        assert main(["demo", *TINY, "--run-dir", str(tmp_path / f"run{len(option)}"), *option]) == 0
        shown[len(option)] = terminal.getvalue()
    assert "╭" in shown[0]
    assert "2/2 steps" in shown[0]
    assert "accuracy  " in shown[0]
    assert "\x1b" not in shown[1]
    assert "step 2/2" in shown[1]
