"""Runs in episode states that never return: given up in time, stopped in time, and resumed as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.conftest import Kapelle, call
from tests.support.episode_lines import lines_in
from tests.support.killed_runs import spawn
from tests.support.tiny import sections

from kapelle.cli import main
from kapelle.runs.reader import read_evaluations, read_metrics


def recipe(**over: Any) -> None:
    settings = sections(
        environment={"name": "tests.support.stuck:Stuck", "tasks": 5, "tell": "tell"},
        workflow={"name": "parallel"},
        evaluation={"problems": 2, "problems_while_training": 2, "every": 1},
        training={"steps": 2, "tasks_per_step": 2},
        checkpoint={"every": 10},
        **over,
    )
    Path("stuck.yaml").write_text(yaml.safe_dump(settings))


def command(words: Sequence[str], output: str) -> None:
    """Be the command line with these words, in a process of its own that writes to a file."""
    with Path(output).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["kapelle", *words]
    sys.exit(main())


def left(run: Path) -> dict[str, Any]:
    """Return the files of a run without clocks and without generators that no episode draws from."""
    files = json.loads((run / "checkpoints" / "00000002" / "manifest.json").read_text())["files"]
    return {
        "weights and moments": files["train.safetensors"],
        "metrics": [
            {key: value for key, value in row.items() if not key.startswith("time/")}
            for row in read_metrics(run)
        ],
        "evaluations": read_evaluations(run),
        "episodes": lines_in(run),
    }


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run leaves behind in which nothing gets stuck."""
    with chdir(tmp_path_factory.mktemp("calm")):
        recipe()
        Path("tell").write_text("nothing gets stuck")
        assert call("train", "stuck.yaml", "--run-dir", "run").code == 0
        return left(Path("run"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "place", "blocking", "signals", "code"),
    [
        pytest.param("swallow", "observe", "false", [signal.SIGTERM], 143, marks=pytest.mark.long),
        ("lock", "start", "true", [signal.SIGINT, signal.SIGINT], 130),
    ],
)
def test_a_signal_ends_a_stuck_run_which_can_be_resumed(
    kapelle: Kapelle,
    calm: dict[str, Any],
    way: str,
    place: str,
    blocking: str,
    signals: list[int],
    code: int,
) -> None:
    recipe()
    stuck = (f"environment.way={way}", f"environment.place={place}", f"environment.blocking={blocking}")
    process = spawn(command, ("train", "stuck.yaml", *stuck, "--run-dir", "run"), "said")
    try:
        while not Path("tell").exists():
            assert process.is_alive(), Path("said").read_text()
            time.sleep(0.05)
        for number in signals:
            with suppress(ProcessLookupError):  # a second one may find that the first was enough
                os.kill(process.pid, number)
            time.sleep(0.3)
        process.join(60)  # it would be stuck for an hour
    finally:
        process.kill()
    said = Path("said").read_text()
    assert process.exitcode == code, said
    assert "Traceback" not in said
    assert ("`observe` of environment" in said) == (way == "swallow")
    Path("tell").write_text("nothing gets stuck")
    resumed = kapelle("train", "--resume", "run")
    assert resumed.code == 0, resumed.err
    assert left(Path("run")) == calm


def test_a_given_up_episode_is_counted_and_too_many_stop_the_run(kapelle: Kapelle) -> None:
    recipe()
    stuck = (
        "environment.way=sleep",
        "environment.one_in=2",
        "environment.tell=null",
        "environment.timeout=0.2",
        "evaluation.every=0",
    )
    said = kapelle("train", "stuck.yaml", *stuck, "training.max_failed_share=1.0", "--run-dir", "run")
    assert said.code == 0, said.err
    for row in read_metrics(Path("run")):
        episodes = [json.loads(line) for line in lines_in(Path("run"))[f"train/{row['step']}"].splitlines()]
        late = [each for each in episodes if each["error"]]
        assert 0 < len(late) < len(episodes)
        assert all("took more than 0.2 s (`environment.timeout`)" in each["error"] for each in late)
        assert row["failed_episodes"] == len(late) / len(episodes)
    said = kapelle("train", "stuck.yaml", *stuck, "training.max_failed_share=0.0", "--run-dir", "halted")
    assert said.code == 2
    assert (
        "`step` of environment 'tests.support.stuck:Stuck' took more than 0.2 s (`environment.timeout`)"
        in said.err
    )
