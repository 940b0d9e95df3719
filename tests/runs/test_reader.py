import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kapelle.errors import DataError, RunDirectoryError
from kapelle.runs.reader import (
    episode_steps,
    is_run,
    read_config,
    read_episodes,
    read_groups,
    read_latest,
    read_metrics,
    read_status,
)


def test_half_of_a_last_row_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 0.5}]


def test_a_damaged_row_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"st\x00p": 2\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2 is damaged"):
        read_metrics(tmp_path)


def test_a_folder_without_a_run_raises(tmp_path: Path) -> None:
    assert not is_run(tmp_path)
    with pytest.raises(RunDirectoryError, match="no kapelle run"):
        read_config(tmp_path)
    with pytest.raises(RunDirectoryError, match="Cannot read"):
        read_metrics(tmp_path)
    with pytest.raises(RunDirectoryError, match="has no train episodes of step 3"):
        read_groups(tmp_path, 3)
    assert episode_steps(tmp_path) == []
    assert list(read_episodes(tmp_path)) == []
    assert read_latest(tmp_path) is None


@pytest.mark.parametrize(
    ("host", "state", "read"),
    [
        (socket.gethostname(), "running", "killed"),
        (socket.gethostname(), "finished", "finished"),
        ("another-host", "running", "running"),
    ],
)
def test_a_run_whose_process_has_ended_without_recording_how_was_killed(
    tmp_path: Path, host: str, state: str, read: str
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write_status(tmp_path, host=host, state=state, pid=ended.pid)
    assert read_status(tmp_path).state == read


def test_a_process_whose_end_its_parent_has_not_noted_has_ended(tmp_path: Path) -> None:
    """As in a container whose first process never waits for its children."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    write_status(tmp_path, host=socket.gethostname(), state="running", pid=ended.pid)
    assert read_status(tmp_path).state == "killed"
    ended.wait()


def write_status(run: Path, *, host: str, state: str, pid: int) -> None:
    row = {
        "state": state,
        "phase": "rollout",
        "step": 3,
        "pid": pid,
        "host": host,
        "started": "",
        "updated": "",
    }
    (run / "status.json").write_text(json.dumps(row))
