"""Readers and a resume report steps that differ from what was recorded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.run_folders import group, open_run

from kapelle.errors import DataError, RunDirectoryError
from kapelle.functional.distributions import Histogram
from kapelle.runs.episode_json import Trace, TracedTurn
from kapelle.runs.reader import read_episodes, read_groups
from kapelle.runs.recorded import all_losses
from kapelle.runs.step_rows import scan
from kapelle.runs.writer import RunDirectory

STEPS = 40


def write(run: RunDirectory, *steps: int, seed: int = 0) -> None:
    for step in steps:
        run.record_metrics(step, {"loss": 1 / step})
        run.record_episodes(step, [group("a", seed + step, seed + step + 1000)])
        run.record_traces(step, [Trace(0, [TracedTurn(0, ["x"], [1.0 + step], [0.5], [1.0])])])
        run.record_system(step, {"cpu": step})
        run.record_distributions(step, {"reward/a": Histogram(0, step, (1,))})


def made(path: Path, seed: int = 0) -> dict[str, int]:
    """A run of 40 steps in three files; returns the positions of a checkpoint after the last one."""
    with open_run(path) as run:
        write(run, *range(1, STEPS + 1), seed=seed)
        return run.positions()


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, int]:
    return made(tmp_path / "run")


def resumed(run: Path, saved: dict[str, int]) -> list[str]:
    """Resume from a checkpoint with these positions, and return the reported messages."""
    said: list[str] = []
    with open_run(run, resume=True) as again:
        again.say = said.append
        again.rewind(saved)
    return said


def test_an_intact_run_has_lost_nothing(tmp_path: Path, saved: dict[str, int]) -> None:
    assert all_losses(tmp_path / "run", contents=True) == []
    assert resumed(tmp_path / "run", saved) == []
    assert sum(1 for _ in read_episodes(tmp_path / "run")) == 2 * STEPS


def train(run: Path, first: int) -> Path:
    return run / "episodes" / "train" / f"{first:08d}.jsonl.zst"


def without(step: int) -> Callable[[Path, Path], None]:
    def drop(run: Path, _other: Path) -> None:
        path = train(run, 17)
        (frame,) = scan(path).steps[step]
        data = path.read_bytes()
        path.write_bytes(data[: frame.start] + data[frame.end :])

    return drop


def twice(run: Path, _other: Path) -> None:
    path = train(run, 17)
    (frame,) = scan(path).steps[20]
    data = path.read_bytes()
    path.write_bytes(data[: frame.end] + data[frame.start :])


def flipped(run: Path, _other: Path) -> None:
    path = train(run, 17)
    (frame,) = scan(path).steps[20]
    data = bytearray(path.read_bytes())
    data[frame.end - 1] ^= 1
    path.write_bytes(data)


def zeroed(run: Path, _other: Path) -> None:
    path = train(run, 17)
    path.write_bytes(bytes(path.stat().st_size))


def one_frame_of_another_run(run: Path, other: Path) -> None:
    ours, theirs = train(run, 17), train(other, 17)
    (old,), (new,) = scan(ours).steps[20], scan(theirs).steps[20]
    data = ours.read_bytes()
    ours.write_bytes(data[: old.start] + theirs.read_bytes()[new.start : new.end] + data[old.end :])


DAMAGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "a file removed": (lambda run, _: train(run, 17).unlink(), "steps 17 to 32 are missing"),
    "a step dropped": (without(20), "step 20 are missing"),
    "the last step of a file dropped": (without(32), "step 32 are missing"),
    "a step twice": (twice, "step 20 are recorded twice"),
    "a bit flipped": (flipped, "step 20 are damaged"),
    "zeros": (zeroed, "steps 17 to 32 are missing"),
    "a file of another run": (
        lambda run, other: shutil.copy(train(other, 17), train(run, 17)),
        "steps 17 to 32 differ from what the run recorded",
    ),
    "a step of another run": (one_frame_of_another_run, "step 20 differ from what the run recorded"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_readers_and_a_resume_raise_for_damage(tmp_path: Path, saved: dict[str, int], how: str) -> None:
    run, (damage, words) = tmp_path / "run", DAMAGES[how]
    made(tmp_path / "other", seed=7)
    damage(run, tmp_path / "other")
    assert any(words in line for line in all_losses(run, contents=True)), all_losses(run, contents=True)
    before = {path: path.read_bytes() for path in run.rglob("*.jsonl*")}
    with pytest.raises(RunDirectoryError, match=words):
        resumed(run, saved)
    assert {path: path.read_bytes() for path in run.rglob("*.jsonl*")} == before, "nothing was cut"
    with pytest.raises(DataError):
        list(read_episodes(run))
    if how != "a step twice":
        step = 32 if how == "the last step of a file dropped" else 20
        for read in (lambda: read_groups(run, step), lambda: list(read_episodes(run, step))):
            with pytest.raises(DataError, match=r"missing|differ from what|damaged"):
                read()
    assert read_groups(run, 10) == [group("a", 10, 1010)], "the other steps are read as before"


def test_a_deleted_folder_is_reported_and_a_resume_continues(tmp_path: Path, saved: dict[str, int]) -> None:
    run = tmp_path / "run"
    shutil.rmtree(run / "episodes" / "train")
    assert all_losses(run) == ["the episodes of steps 1 to 40 are missing (episodes/train)"]
    with pytest.raises(DataError, match="steps 1 to 40 are missing"):
        list(read_episodes(run))
    (said,) = resumed(run, saved)
    assert "episodes of steps 1 to 40 are missing" in said
    with open_run(run, resume=True) as again:
        again.rewind(saved)
        write(again, 41)
    assert read_groups(run, 41) == [group("a", 41, 1041)]
    assert all_losses(run) == ["the episodes of steps 1 to 40 are missing (episodes/train)"]


@pytest.mark.parametrize("left", ["nothing", "half a step", "a step without its record", "half a record"])
def test_the_step_that_a_killed_run_was_writing_is_not_missing(
    tmp_path: Path, saved: dict[str, int], left: str
) -> None:
    run = tmp_path / "run"
    with open_run(run, resume=True) as again:
        again.rewind(saved)
        again.record_metrics(41, {"loss": 0.1})
        if left != "nothing":
            again.record_episodes(41, [group("a", 41, 1041)])
    table = run / "recorded.jsonl"
    rows = table.read_bytes().splitlines(keepends=True)
    if left in ("half a step", "a step without its record"):
        table.write_bytes(b"".join(rows[:-1]))
    if left == "half a record":
        table.write_bytes(b"".join(rows)[:-20])
    if left == "half a step":
        train(run, 33).write_bytes(train(run, 33).read_bytes()[:-5])
    assert all_losses(run, contents=True) == []
    assert resumed(run, saved) == []
    with open_run(run, resume=True) as again:
        again.rewind(saved)
        write(again, 41)
    assert all_losses(run, contents=True) == []


def test_a_damaged_record_raises(tmp_path: Path, saved: dict[str, int]) -> None:
    run = tmp_path / "run"
    table = run / "recorded.jsonl"
    rows = table.read_bytes().splitlines(keepends=True)
    table.write_bytes(b"".join(rows[: 2 * 30]))
    assert any("lost the rows of steps 31 to 39" in line for line in all_losses(run))
    with pytest.raises(RunDirectoryError, match=r"recorded\.jsonl has lost rows"):
        resumed(run, saved)
    table.write_bytes(b"".join([*rows[:3], b"{}\n", *rows[4:]]))
    assert any("the first of them line 4" in line for line in all_losses(run))
    table.unlink()
    with pytest.raises(RunDirectoryError, match=r"recorded\.jsonl has lost rows"):
        resumed(run, saved)


def test_episodes_deleted_by_the_run_are_not_missing(tmp_path: Path, saved: dict[str, int]) -> None:
    run = tmp_path / "run"
    with open_run(run, resume=True) as again:
        again.rewind(saved)
        again.forget_episodes("train", 40, 10)
    assert not train(run, 1).exists()
    assert not (run / "traces" / "00000001.jsonl.zst").exists()
    assert all_losses(run, contents=True) == []
    assert resumed(run, saved) == []
    train(run, 17).unlink()
    assert all_losses(run) == ["the episodes of steps 17 to 32 are missing (episodes/train)"]


@pytest.mark.parametrize("name", ["system.jsonl", "distributions.jsonl"])
def test_uncounted_rows_are_cut_and_written_once(tmp_path: Path, name: str) -> None:
    with open_run(tmp_path / "run") as run:
        write(run, 1, 2)
        saved = run.positions()
        write(run, 3, 4)
    table = run.path / name
    table.write_bytes(table.read_bytes() + b'{"step": 5, "cp')
    for _ in range(2):
        with open_run(run.path, resume=True) as run:
            run.rewind(saved)
            write(run, 3, 4, 5)
    assert [json.loads(line)["step"] for line in table.read_bytes().splitlines()] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("table", "how"), [("metrics.jsonl", "removed"), ("metrics.jsonl", "longer"), ("recorded.jsonl", "cut")]
)
def test_a_table_that_another_program_changes_stops_the_run(tmp_path: Path, table: str, how: str) -> None:
    with open_run(tmp_path / "run") as run:
        write(run, 1, 2)
        path = run.path / table
        data = path.read_bytes()
        path.write_bytes(data[:-9] if how == "cut" else data + b"{}\n")
        if how == "removed":
            path.unlink()
        with pytest.raises(RunDirectoryError, match=rf"{table} (has|was).*kapelle train --resume"):
            write(run, 3)
