"""The log of each of several ranks: what it did, what went wrong in it, and where it hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runtime.test_guard import until

from kapelle.runs.rank_log import log_path, rank_log
from kapelle.runtime.process_tree import doing
from kapelle.runtime.ranks import ALONE, Ranks


class Third(Ranks):
    """Rank 2 of 4."""

    rank, size = 2, 4


def lines(run: Path) -> list[str]:
    """The lines of that rank's log, without their times."""
    return [line[24:] for line in log_path(run, 2).read_text().splitlines()]


def test_a_log_names_the_rank_and_its_activities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    with rank_log(tmp_path, Third()):
        doing("step 3, rollout")
    doing("after the run")
    found = lines(tmp_path)
    assert log_path(tmp_path, 2) == tmp_path / "ranks" / "0002.log"
    assert found[0].startswith("rank 2 of 4 on ")
    assert f"process {os.getpid()}: " in found[0]
    assert "NCCL_SOCKET_IFNAME=eth7" in found
    assert found[-1] == "step 3, rollout"


def test_a_single_process_writes_none(tmp_path: Path) -> None:
    with rank_log(tmp_path, ALONE):
        doing("anything")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_to_write_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "ranks").write_text("a file where the folder would be")
    with rank_log(tmp_path, Third()):
        doing("step 1, rollout")
    with rank_log(tmp_path / "missing", Third()):
        doing("step 1, rollout")
    assert not (tmp_path / "missing").exists()


HANGING = """
import pathlib, sys, time
from kapelle.runs.rank_log import rank_log
from kapelle.runtime.ranks import Ranks
class Third(Ranks):
    rank, size = 2, 4
def stuck_here():
    print("stuck", flush=True)
    time.sleep(60)
with rank_log(pathlib.Path(sys.argv[1]), Third()):
    stuck_here()
"""


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="the system has no SIGUSR1")
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGSEGV])
def test_the_stacks_of_a_rank_that_hangs_or_crashes(tmp_path: Path, number: signal.Signals) -> None:
    words = [sys.executable, "-c", HANGING, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "stuck\n"
        rank.send_signal(number)
        until(lambda: "in stuck_here" in log_path(tmp_path, 2).read_text())
        if number == signal.SIGUSR1:
            assert rank.poll() is None
        rank.kill()
