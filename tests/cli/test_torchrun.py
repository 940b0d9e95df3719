"""One command starts all processes of a run, stops them all, and ends as they do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from tests.runtime.test_guard import gone, until

from kapelle.cli import main, train_launch
from kapelle.cli.train_launch import Rank, _Launcher
from kapelle.runs.rank_log import log_path
from kapelle.runs.reader import read_metrics
from kapelle.runtime.process_tree import LifeSigns, SharedStatus, _state

RECIPE = """
model: {embedded: {hidden: 16, layers: 1, heads: 2, kv_heads: 1, intermediate: 32}}
environment: {name: "tests.support.plugins:Digest"}
workflow: {name: debate}
algorithm: {name: grpo, group_size: 2}
team: {agents: 2, lora: {rank: 2}, sampling: {max_tokens: 3}}
training: {steps: 4, tasks_per_step: 3}
optimizer: {lr: 0.01, eps: 0.0001}
checkpoint: {every: 1}
evaluation: {before_and_after: false}
"""
KAPELLE = [sys.executable, "-m", "kapelle"]


def launched(*programs: str, begun: bool = True) -> list[Rank]:
    """Start programs of Python as the ranks of a launcher, which hears of them that they have begun."""
    ranks = []
    for number, program in enumerate(programs):
        words = [sys.executable, "-c", f"import os, signal, sys, time\n{program}"]
        process = subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE)
        ranks.append(Rank(number, process, SharedStatus(), LifeSigns(process.pid)))
        if begun:
            ranks[-1].pulse.beat()
    return ranks


def ended(ranks: Sequence[Rank]) -> int:
    """Follow ranks to their end and return the code."""
    try:
        return _Launcher(ranks).follow()
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.wait()
            assert rank.process.stdout is not None
            rank.process.stdout.close()


def interrupt(number: int) -> None:
    """Send a signal to this process once the launcher listens for it; before, it would end the tests."""
    until(lambda: signal.getsignal(number) not in {signal.SIG_DFL, signal.default_int_handler})
    os.kill(os.getpid(), number)


WAIT = "time.sleep(600)"
DEAF = f"[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; print('deaf', flush=True); {WAIT}"


@pytest.mark.parametrize(
    ("programs", "code"),
    [
        (["", ""], 0),
        (["sys.exit(2)", "sys.exit(3)"], 2),  # 3 is one that another has left behind
        (["sys.exit(3)", "sys.exit(1)"], 1),
        (["sys.exit(143)", "sys.exit(143)"], 143),
    ],
)
def test_the_exit_code_is_that_of_the_first_rank_that_failed(
    programs: list[str], code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ended(launched(*programs)) == code
    assert capfd.readouterr().err == ""


def test_a_rank_that_is_killed_is_named_and_the_others_end(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_launch, "GRACE", 0.2)
    ranks = launched(WAIT, "os.kill(os.getpid(), 9)", DEAF)
    ranks[1].pulse.say("step 3, update")
    assert ended(ranks) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    pid = ranks[1].process.pid
    assert f"kapelle: Rank 1 (process {pid}) was killed by signal 9 (SIGKILL), at: step 3, update." in said
    assert "memory ran out" in said


def test_a_rank_that_is_stopped_is_named_and_all_end(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_launch, "GRACE", 0.2)
    monkeypatch.setenv("KAPELLE_STALLED_AFTER", "0.5")
    assert ended(ranks := launched(WAIT, "os.kill(os.getpid(), signal.SIGSTOP)")) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert f"Rank 1 (process {ranks[1].process.pid}) has stalled: it has been stopped" in said


def when_deaf(rank: Rank, work: Callable[[], None]) -> None:
    """Do something in another thread once a rank hears no signals any more."""

    def wait() -> None:
        assert rank.process.stdout is not None
        rank.process.stdout.readline()
        work()

    threading.Thread(target=wait).start()


def test_a_second_ctrl_c_ends_what_hears_none(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_launch, "AT_ONCE", 0.1)

    def twice() -> None:
        interrupt(signal.SIGINT)
        time.sleep(0.3)  # two that arrive at once are one
        interrupt(signal.SIGINT)

    ranks = launched(DEAF)
    when_deaf(ranks[0], twice)
    assert ended(ranks) == 130
    assert capfd.readouterr().err == ""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return file


def started(words: list[str], **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*KAPELLE, "train", *words],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.ranks
def test_two_processes_write_one_run(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    one = started([str(recipe), "--run-dir", str(run), "--launch", "torchrun", "--processes", "2", "--json"])
    out, said = one.communicate(timeout=300)
    assert (one.returncode, json.loads(out)["steps"]) == (0, 4), said
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4]
    for rank in range(2):
        text = log_path(run, rank).read_text()
        assert f"rank {rank} of 2 on " in text
        assert [f"step {n} took" in text for n in range(1, 6)] == [True] * 4 + [False]
        assert "for other ranks: " in text
    assert main(["train", "--resume", str(run), "training.steps=5", "--json"]) == 0
    assert "step 5" not in log_path(run, 0).read_text()  # a single process keeps none


STAGES = """
stages:
  - {name: first, training: {steps: 1}}
  - {name: second, training: {steps: 2}}
"""


@pytest.mark.ranks
def test_two_processes_train_stage_after_stage(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(RECIPE + STAGES)
    run = tmp_path / "run"
    words = ["--launch", "torchrun", "--processes", "2", "--json"]
    out, said = (one := started([str(recipe), "--run-dir", str(run), *words])).communicate(timeout=300)
    assert one.returncode == 0, said
    assert [json.loads(line)["steps"] for line in out.splitlines() if line[:1] == "{"] == [1, 2]
    out, said = (one := started(["--resume", str(run), *words])).communicate(timeout=300)
    assert (one.returncode, out.count("already done")) == (0, 2), said


ENDLESS = ["training.steps=100000", "checkpoint.every=1", "--launch", "torchrun", "--processes", "2"]


def family_of(launcher: int) -> dict[int, int]:
    """The process of each rank that a launcher has started, by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = (folder / "environ").read_bytes().decode().split("\0")
            rank = next((word[5:] for word in variables if word.startswith("RANK=")), None)
            if rank is not None and _parent(int(folder.name)) == launcher:
                found[int(rank)] = int(folder.name)
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def ranks_at(one: subprocess.Popen[str], moment: str) -> dict[int, int]:
    """Wait until a run prints a text; return the processes of its ranks."""
    assert one.stdout is not None
    for line in one.stdout:
        if moment in line:
            return family_of(one.pid)
    raise AssertionError(f"it never printed {moment!r}")


def resumed(run: Path) -> int:
    """Resume a run for as many steps as it has and one, in this process, and return the code."""
    return main(["train", "--resume", str(run), f"training.steps={len(read_metrics(run)) + 1}", "--json"])


linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel says there who is stopped")


@linux
@pytest.mark.ranks
@pytest.mark.parametrize("stopped", [[], [1]])
def test_ranks_end_with_a_launcher_that_is_killed(recipe: Path, tmp_path: Path, stopped: list[int]) -> None:
    run = tmp_path / "run"
    one = started([str(recipe), "--run-dir", str(run), *ENDLESS])
    ranks = ranks_at(one, "step 3/")
    for rank in stopped:
        os.kill(ranks[rank], signal.SIGSTOP)
        until(lambda rank=rank: _state(ranks[rank])[0] == "T")
    one.kill()
    _, said = one.communicate(timeout=300)  # both ranks hold the other ends of the pipes
    until(lambda: all(gone(rank) for rank in ranks.values()))
    assert said.count("\n") == 1
    assert f"The launcher (process {one.pid}) is gone" in said
    assert resumed(run) == 0


@linux
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("number", "victim", "moment"),
    [
        (signal.SIGKILL, 1, "loading"),
        (signal.SIGKILL, 0, "step 3/"),
        (signal.SIGKILL, 1, "step 3/"),
        (signal.SIGSTOP, 0, "loading"),
        (signal.SIGSTOP, 1, "step 3/"),
    ],
)
def test_a_rank_that_is_lost_is_named_and_ends_the_run(
    recipe: Path, tmp_path: Path, number: signal.Signals, victim: int, moment: str
) -> None:
    how = {
        signal.SIGKILL: "was killed by signal 9 (SIGKILL)",
        signal.SIGSTOP: "has stalled: it has been stopped",
    }[number]
    run = tmp_path / "run"
    one = started([str(recipe), "--run-dir", str(run), *ENDLESS], KAPELLE_STALLED_AFTER="2")
    ranks = ranks_at(one, moment)
    os.kill(ranks[victim], number)
    _, said = one.communicate(timeout=300)
    assert one.returncode == 2
    assert said.count("\n") == 1
    assert f"kapelle: Rank {victim} (process {ranks[victim]}) {how}" in said
    assert all(gone(rank) for rank in ranks.values())
    if moment != "loading":
        assert resumed(run) == 0
