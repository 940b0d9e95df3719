"""Rollback to a checkpoint: nothing is lost, and the continued run equals one that never passed it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.runs.test_poisoned import POISONS, spoil
from tests.support.episode_lines import lines_in
from tests.support.five_steps import STEPS, content, files, run, stop_after, train, trained
from tests.support.killed_runs import spawn
from tests.support.tiny import same_bits

from kapelle.errors import CheckpointError, RunDirectoryError
from kapelle.runs import checkpoint, rollback
from kapelle.runs.lock import RunLock
from kapelle.runs.reader import read_status
from kapelle.runs.rollback import ASIDE, roll_back

__all__ = ["run", "trained"]


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("to", [2, 0, 3])
def test_the_continued_run_equals_one_that_never_passed_the_step(
    to: int, run: Path, trained: Path, tmp_path: Path
) -> None:
    plan = roll_back(run, to)
    assert [folder.name for folder in plan.checkpoints] == [f"{k:08d}" for k in range(to + 1, STEPS + 1)]
    assert (read_status(run).state, read_status(run).step) == ("interrupted", to)
    if to:
        stopped = tmp_path / "stopped"
        stop_after(stopped, to)
        assert same_bits(content(run), content(stopped))
    train(run, resume=True)
    assert same_bits(content(run), content(trained))


TRAINED = [f"train/{step}" for step in range(1, STEPS + 1)]


def test_later_files_are_moved_unchanged(run: Path) -> None:
    before, lines = files(run), {k: v for k, v in lines_in(run).items() if k not in ("test/0", "test/2")}
    plan = roll_back(run, 2)
    after, aside = files(run), files(plan.aside)
    gone = before.keys() - after.keys()
    assert {name for name in gone if not name.startswith(("checkpoints/", "episodes/", "traces/"))} == set()
    assert gone <= aside.keys()
    assert all(aside[name] == before[name] for name in gone)
    assert {step: lines_in(run)[step] for step in TRAINED[:2]} | lines_in(plan.aside) == lines
    for table in ("metrics.jsonl", "evaluations.jsonl"):
        assert after[table] + aside[table] == before[table]
    told = json.loads(aside["rollback.json"])
    assert told["checkpoints"] == ["00000003", "00000004", "00000005"]
    assert told["rows"] == {"metrics.jsonl": 3, "evaluations.jsonl": 2, "recorded.jsonl": 8}


@pytest.fixture(scope="module")
def stopped_at_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped at step 2; tests only read it."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    stop_after(run, 2)
    return run


PLACES = {
    "nothing yet": (rollback, "_copy_aside", "before", 1),
    "all copied": (rollback, "_copy_aside", "after", 1),
    "the newest moved": (rollback, "_move", "after", 1),
    "all moved": (rollback, "_move", "after", 3),
    "one table cut": ("run_dir", "cut_table", "after", 1),
    "all cut": ("RunDirectory", "rewind", "after", 1),
    "latest written": ("RunDirectory", "point_latest", "after", 1),
    "status written": ("RunDirectory", "report", "after", 1),
}


def _killed(run: str, place: str) -> None:
    from kapelle.runs import writer as run_dir

    owner, name, side, times = PLACES[place]
    where: Any = {"run_dir": run_dir, "RunDirectory": run_dir.RunDirectory}.get(str(owner), owner)
    call, counted = getattr(where, name), 0

    def watched(*arguments: Any, **keywords: Any) -> Any:
        nonlocal counted
        counted += 1
        if counted == times and side == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*arguments, **keywords)
        if counted == times:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(where, name, watched)
    roll_back(Path(run), 2)


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_killed_rollback_can_be_finished_and_loses_nothing(
    place: str, run: Path, trained: Path, stopped_at_two: Path, tmp_path: Path
) -> None:
    before = files(run)
    process = spawn(_killed, str(run), place)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    # A copy of the run can be resumed to the same end, wherever the rollback was killed.
    other = tmp_path / "other"
    shutil.copytree(run, other)
    train(other, resume=True)
    assert same_bits(content(other)["m"], content(trained)["m"])
    assert same_bits(content(other)["c"]["00000005"], content(trained)["c"]["00000005"])
    # The same command completes the rollback, and moves everything later into one folder.
    roll_back(run, 2)
    [aside] = (run / ASIDE).iterdir()
    kept, left = files(aside), files(run)
    for name in before.keys() - left.keys():
        assert kept[name] == before[name]
    assert left["metrics.jsonl"] + kept["metrics.jsonl"] == before["metrics.jsonl"]
    assert left["evaluations.jsonl"] + kept["evaluations.jsonl"] == before["evaluations.jsonl"]
    assert same_bits(content(run), content(stopped_at_two))


class TestErrors:
    def test_while_a_trainer_holds_the_run(self, run: Path) -> None:
        before = files(run)
        lock = RunLock(run / "lock")
        with pytest.raises(RunDirectoryError, match=f"in use by process {os.getpid()}"):
            roll_back(run, 2)
        lock.release()
        assert {k: v for k, v in files(run).items() if k != "lock"} == {
            k: v for k, v in before.items() if k != "lock"
        }

    def test_a_step_without_a_checkpoint_names_those_that_are_whole(self, run: Path) -> None:
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 9.*the nearest: 3, 4, 5\."):
            roll_back(run, 9)

    def test_a_damaged_checkpoint_names_those_that_are_whole(self, run: Path) -> None:
        (run / "checkpoints" / "00000002" / "state.json").write_bytes(b"{}")
        (run / "checkpoints" / "00000004" / "manifest.json").unlink()
        with pytest.raises(CheckpointError, match=r"00000002 is damaged.*the nearest: 0, 1, 3\."):
            roll_back(run, 2)
        assert not (run / ASIDE).exists()

    def test_a_checkpoint_with_infinite_numbers(self, run: Path) -> None:
        poison = "nan weight"
        spoil(run, 2, poison)
        with pytest.raises(
            CheckpointError, match=rf"is damaged: .*{POISONS[poison][2]}.*the nearest: 0, 1, 3\."
        ):
            roll_back(run, 2)

    def test_rows_that_are_lost(self, run: Path) -> None:
        (run / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes()[:10])
        with pytest.raises(RunDirectoryError, match="has lost rows"):
            roll_back(run, 2)
        assert not (run / ASIDE).exists()

    def test_a_folder_without_a_run(self, tmp_path: Path) -> None:
        with pytest.raises(RunDirectoryError, match="no kapelle run"):
            roll_back(tmp_path / "nothing", 2)
        assert not (tmp_path / "nothing").exists()


def test_the_newest_of_two_checkpoints_of_a_step_is_taken(run: Path) -> None:
    state = checkpoint.load(run / "checkpoints" / "00000003")
    again = checkpoint.save(run / "checkpoints", 3, state)
    plan = roll_back(run, 3)
    assert plan.to == again
    (again / "state.json").write_bytes(b"{}")
    plan = roll_back(run, 3)
    assert plan.to.name == "00000003"
    assert plan.checkpoints == (again,)
