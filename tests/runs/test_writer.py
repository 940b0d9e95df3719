import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.run_folders import CONFIG, files, group, open_run

from kapelle.errors import NumericsError, RunDirectoryError
from kapelle.runs import checkpoint
from kapelle.runs.reader import (
    episode_steps,
    read_episodes,
    read_evaluations,
    read_groups,
    read_latest,
    read_metrics,
    read_status,
    saved_steps,
)
from kapelle.runs.writer import RunDirectory, new_folder
from kapelle.types import Json

# ------------------------------------------------------------------------------------------- a new run


MEASURED: dict[str, Json] = {
    "problems": 20,
    "success": 0.54,
    "interval": [0.49, 0.58],
    "reward": {"actor": 0.1 + 0.2},
}


def test_rows_are_read_back_exactly(tmp_path: Path) -> None:
    with open_run(tmp_path / "run") as run:
        run.record_metrics(1, {"loss/actor": 0.1 + 0.2, "samples": 256})
        run.record_metrics(2, {"loss/actor": -1e-300})
        run.record_evaluation(0, MEASURED)
        run.record_episodes(1, [group("a", 1, 2), group("b", 3)])
        run.record_episodes(2, [group("a", 4)])
        run.record_episodes(0, [group("t", 5)], "test")
    assert read_metrics(run.path) == [
        {"step": 1, "loss/actor": 0.30000000000000004, "samples": 256},
        {"step": 2, "loss/actor": -1e-300},
    ]
    assert read_evaluations(run.path) == [{"step": 0, **MEASURED}]
    assert episode_steps(run.path) == [1, 2]
    assert read_groups(run.path, 1) == [group("a", 1, 2), group("b", 3)]
    assert [episode.seed for episode in read_episodes(run.path)] == [1, 2, 3, 4]
    assert [episode.seed for episode in read_episodes(run.path, step=2)] == [4]
    assert [episode.seed for episode in read_episodes(run.path, split="test")] == [5]


def test_the_newest_complete_checkpoint_counts(tmp_path: Path) -> None:
    with open_run(tmp_path / "run") as run:
        first, second = (checkpoint.save(run.checkpoints, step, {"loop": {}}) for step in (1, 2))
        run.point_latest(first)
    moved = run.path.rename(tmp_path / "moved")
    assert read_latest(moved) == moved / "checkpoints" / second.name
    assert saved_steps(moved) == 2
    (moved / "latest").unlink()
    (moved / "checkpoints" / "00000002" / "state.json").unlink()
    assert read_latest(moved) == moved / "checkpoints" / first.name
    assert saved_steps(moved) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_raises(tmp_path: Path, value: float) -> None:
    with open_run(tmp_path / "run") as run:
        with pytest.raises(NumericsError, match="'loss/actor' of step 3"):
            run.record_metrics(3, {"kl": 0.0, "loss/actor": value})
        with pytest.raises(NumericsError, match="step 3"):
            run.record_evaluation(3, {"accuracy": [value]})
    assert read_metrics(run.path) == []
    assert read_evaluations(run.path) == []


# --------------------------------------------------------------------------------------------- errors


def test_new_folders_are_different_and_removed_if_empty(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    with new_folder("sums", root) as first, new_folder("sums", root) as second:
        assert first != second
        (first / "config.yaml").touch()
    assert first.is_dir()
    with pytest.raises(ZeroDivisionError), new_folder("sums", tmp_path / "others"):
        raise ZeroDivisionError
    assert not (tmp_path / "others").exists()


def test_an_existing_run_needs_resume(tmp_path: Path) -> None:
    open_run(tmp_path / "run").close()
    with pytest.raises(RunDirectoryError, match="--resume"):
        open_run(tmp_path / "run")


def test_a_folder_with_other_files_raises(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunDirectoryError, match=r"thesis\.tex"):
        open_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("make", [False, True])
def test_a_resume_needs_a_run(tmp_path: Path, make: bool) -> None:
    if make:
        (tmp_path / "run").mkdir()
    with pytest.raises(RunDirectoryError, match=r"no run at .* to resume"):
        open_run(tmp_path / "run", resume=True)


def test_another_config_raises(tmp_path: Path) -> None:
    open_run(tmp_path / "run").close()
    before = files(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="lr"):
        open_run(tmp_path / "run", resume=True, config=CONFIG.replace("0.001", "0.5"))
    assert files(tmp_path / "run") == before


def test_a_second_trainer_raises_and_the_first_continues(tmp_path: Path) -> None:
    with open_run(tmp_path / "run") as run:
        for resume in (False, True):
            with pytest.raises(RunDirectoryError, match=f"in use by process {os.getpid()}"):
                open_run(tmp_path / "run", resume=resume)
        run.record_metrics(1, {"loss": 0.0})
    assert len(read_metrics(run.path)) == 1


# ----------------------------------------------------------------------------------------------- resume


def test_a_resumed_run_loses_no_row_and_repeats_none(tmp_path: Path) -> None:
    def step(run: RunDirectory, number: int) -> None:
        run.record_episodes(number, [group("a", number)])
        run.record_metrics(number, {"loss": 1 / number})
        run.record_evaluation(number, {"accuracy": number / 10})
        run.record_episodes(number, [group("t", number)], "test")

    with open_run(tmp_path / "whole") as whole:
        for number in range(1, 6):
            step(whole, number)

    with open_run(tmp_path / "killed") as run:
        for number in range(1, 4):
            step(run, number)
        saved = json.loads(json.dumps(run.positions()))
        step(run, 4)
        run.record_episodes(5, [group("a", 5)])
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "lo')
    with open_run(run.path, resume=True) as run:
        assert run.resumed
        run.rewind(saved)
        assert [row["step"] for row in read_metrics(run.path)] == [1, 2, 3]
        assert run.positions() == saved
        step(run, 4)
        step(run, 5)
    assert files(run.path) == files(whole.path)


Write = Callable[[RunDirectory], None]


@pytest.mark.parametrize(
    "write",
    [
        lambda run: run.record_metrics(1, {"loss": 0.5}),
        lambda run: run.record_evaluation(0, {"accuracy": 0.5}),
        lambda run: run.record_episodes(1, [group("a", 1)]),
        lambda run: run.record_episodes(0, [group("t", 1)], "test"),
    ],
)
def test_a_resume_without_a_checkpoint_deletes_nothing(tmp_path: Path, write: Write) -> None:
    with open_run(tmp_path / "run") as run:
        write(run)
    before = files(run.path)
    with (
        open_run(run.path, resume=True) as run,
        pytest.raises(RunDirectoryError, match="no checkpoint"),
    ):
        run.start_over()
    assert files(run.path) == before


def test_a_run_without_a_complete_row_starts_again(tmp_path: Path) -> None:
    open_run(tmp_path / "run").close()
    (tmp_path / "run" / "evaluations.jsonl").write_bytes(b'{"step": 0, "accu')
    with open_run(tmp_path / "run", resume=True) as run:
        run.start_over()
        run.record_evaluation(0, MEASURED)
    assert read_evaluations(run.path) == [{"step": 0, **MEASURED}]


def test_a_resumed_run_must_rewind_first(tmp_path: Path) -> None:
    open_run(tmp_path / "run").close()
    with open_run(tmp_path / "run", resume=True) as run, pytest.raises(AssertionError, match="rewinds"):
        run.record_metrics(1, {"loss": 0.5})


def test_missing_rows_that_the_checkpoint_counts_raise(tmp_path: Path) -> None:
    with open_run(tmp_path / "run") as run:
        run.record_metrics(1, {"loss": 0.5})
        saved = run.positions()
    content = (run.path / "metrics.jsonl").read_bytes()
    for broken in (b"", content[:-1], content[:-1] + b" "):
        (run.path / "metrics.jsonl").write_bytes(broken)
        with open_run(run.path, resume=True) as run, pytest.raises(RunDirectoryError, match="has lost rows"):
            run.rewind(saved)


# ----------------------------------------------------------------------------------------------- status


@pytest.mark.parametrize(
    ("error", "state"), [(ValueError, "failed"), (KeyboardInterrupt, "interrupted"), (None, "interrupted")]
)
def test_the_state_follows_from_the_exception(
    tmp_path: Path, error: type[BaseException] | None, state: str
) -> None:
    def leave() -> None:
        with open_run(tmp_path / "run") as run:
            run.report("rollout", 7)
            if error is not None:
                raise error

    if error is None:
        leave()
    else:
        with pytest.raises(error):
            leave()
    status = read_status(tmp_path / "run")
    assert (status.state, status.phase, status.step) == (state, "rollout", 7)
