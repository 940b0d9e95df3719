"""`kapelle doctor`: one table of all ranks, what is wrong first, and an exit code for scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.ranks import environment, free_port

from kapelle.cli import main


def test_faults_are_printed_first_and_the_exit_code_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--run-dir", "/proc/runs"]) == 2
    assert capsys.readouterr().out.startswith("wrong     /proc/runs: rank 0 cannot write there")


def doctors(folder: Path, size: int, started: int, *own: dict[str, str]) -> list[tuple[int, str, str]]:
    """Start the ranks by hand, as a launcher on several machines would, with variables of their own; return code and output."""
    port = free_port()
    words = [sys.executable, "-m", "kapelle", "doctor", "--run-dir", str(folder), "--timeout", "20"]
    ranks = [
        subprocess.Popen(
            words,
            env={**os.environ, **environment(rank, size, port), **own[rank]},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(started)
    ]
    return [(rank.returncode, *said) for rank in ranks for said in [rank.communicate(timeout=300)]]


@pytest.mark.ranks
def test_ranks_with_other_caches_and_variables(tmp_path: Path) -> None:
    here = [
        {"KAPELLE_CACHE": str(tmp_path / name), "NCCL_ALGO": algorithm}
        for name, algorithm in (("a", "Ring"), ("b", "Tree"))
    ]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (code, out, _), (other, silent, _) = doctors(tmp_path, 2, 2, *here)
    assert (code, other, silent) == (2, 2, "")
    assert out.startswith(f"wrong     {tmp_path / 'a'} is not shared with rank 1")
    assert "doubtful  NCCL_ALGO differs: Ring on rank 0" in out
    assert out.count("seen after") == 2


@pytest.mark.ranks
def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    [(code, _, err)] = doctors(tmp_path, 2, 1, {})
    assert code == 2
    assert "1 of 2 processes have not joined: rank 1" in err


@pytest.mark.ranks
def test_the_launchers_start_it(tmp_path: Path) -> None:
    for launcher in ("torchrun", "ray"):
        words = ["doctor", "--launch", launcher, "--processes", "2", "--run-dir", str(tmp_path), "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "kapelle", *words],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert len(json.loads(done.stdout)["ranks"]) == 2
