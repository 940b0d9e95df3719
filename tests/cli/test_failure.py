"""A run that ends before it is finished keeps its reason, and every command that shows the run tells it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.conftest import Kapelle
from tests.support.killed_runs import Death, start
from tests.support.tiny import sections

from kapelle.runs.failure import read_failure
from kapelle.runs.reader import read_status

REWARDS = """
from pathlib import Path

def length(completion: str) -> float:
    if Path("broken").exists():
        raise ImportError("No module named 'grader'")
    return float(len(completion) % 3)
"""


ENDS = """
import sys
from pathlib import Path
from kapelle.runs.writer import RunDirectory
from kapelle.runtime.watchdog import end_process
run = RunDirectory.create(Path(sys.argv[1]), config="a: 1", provenance={}, resume=False)
end_process("The environment has not returned for 60 s.", 2)
"""


def recipe(**over: Any) -> None:
    rows = [json.dumps({"question": f"{k}?", "answer": str(k)}) for k in range(400)]
    Path("data.jsonl").write_text("\n".join(rows))
    Path("mine.py").write_text(REWARDS)
    environment = {"name": "rewarded", "path": "data.jsonl", "rewards": [{"function": "mine.py:length"}]}
    settings = sections(environment=environment, workflow={"name": "parallel"}, **over)
    Path("mine.yaml").write_text(yaml.safe_dump(settings))


def test_a_failed_run_keeps_its_reason_and_a_resume_that_goes_on_removes_it(kapelle: Kapelle) -> None:
    recipe()
    Path("broken").touch()
    said = kapelle("train", "mine.yaml", "--run-dir", "run")
    assert said.code == 2
    assert "No module named 'grader'" in said.err
    assert "kapelle runs show run" in said.out.splitlines()[-1]

    failure = read_failure(Path("run"))
    assert failure is not None
    assert "max_failed_share" in failure.reason
    assert "TrainingHalted" in failure.traceback
    (first,) = failure.episodes
    assert (first.step, first.count) == (1, 6)
    assert "No module named 'grader'" in first.error
    for words in (["show", "run"], ["ls", "."], ["show", "run", "--json"]):
        assert "No module named 'grader'" in kapelle("runs", *words).out
    whole = Path("run/failure.json").read_bytes()
    Path("run/failure.json").write_bytes(whole[:99])
    assert "failure.json cannot be read" in kapelle("runs", "show", "run").out
    Path("run/failure.json").write_bytes(whole)
    log = Path("run/run.log").read_text()
    assert "weights: trained: " in log
    assert "No module named 'grader'" in log

    again = kapelle("train", "--resume", "run")
    assert again.code == 2
    Path("broken").unlink()
    good = kapelle("train", "--resume", "run")
    assert good.code == 0, good.err
    assert read_failure(Path("run")) is None
    assert "grader" not in kapelle("runs", "show", "run").out
    assert Path("run/run.log").read_text().count("kapelle starts the run") == 3


def test_the_first_evaluation_ends_when_all_episodes_fail_with_the_same_error(kapelle: Kapelle) -> None:
    recipe(evaluation={"problems": 40})
    Path("broken").touch()
    said = kapelle("train", "mine.yaml", "--run-dir", "run")
    assert said.code == 2
    assert "No module named 'grader'" in said.err
    failure = read_failure(Path("run"))
    assert failure is not None
    assert failure.phase == "evaluation"
    assert failure.episodes[0].count < 40


@pytest.mark.slow
def test_a_program_that_cannot_run_is_started_a_few_times_only(kapelle: Kapelle) -> None:
    Path("program.py").write_text(
        "import sys; print(sys.executable, file=open('starts', 'a')); import grader_that_is_missing"
    )
    environment = {"name": "external", "port": 0, "command": ["python", "program.py"], "programs": 2}
    settings = sections(environment=environment, workflow={"name": "external"}, evaluation={"problems": 50})
    Path("mine.yaml").write_text(yaml.safe_dump(settings))
    for words in (["validate", "mine.yaml"], ["train", "mine.yaml", "--run-dir", "run"]):
        said = kapelle(*words)
        assert said.code == 2
        assert "No module named 'grader_that_is_missing'" in said.err
    assert len(Path("starts").read_text().splitlines()) < 12
    assert set(Path("starts").read_text().splitlines()) == {sys.executable}


@pytest.mark.slow
def test_a_killed_run_says_that_it_was_killed(kapelle: Kapelle) -> None:
    run = Path("run")
    assert start("grpo", run.absolute(), death=Death("between updates", 2, signal.SIGKILL)) == -signal.SIGKILL
    assert read_status(run).state == "killed"
    assert "killed" in kapelle("runs", "show", run).out
    assert "without a message" in kapelle("runs", "ls", ".").out


def test_a_process_that_ends_itself_leaves_its_last_message(tmp_path: Path) -> None:
    run = tmp_path / "run"
    subprocess.run([sys.executable, "-c", ENDS, str(run)], check=False)
    failure = read_failure(run)
    assert failure is not None
    assert failure.reason == "The environment has not returned for 60 s."
