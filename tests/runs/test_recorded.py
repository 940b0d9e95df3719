"""Whatever happens to a run's files by step, its readers and a resume say which steps are no longer what was recorded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.episode_lines import lay_plain
from tests.support.run_folders import CONFIG, group, open_run

from kapelle.errors import DataError, RunDirectoryError
from kapelle.functional.distributions import Histogram
from kapelle.runs.episode_json import Trace, TracedTurn
from kapelle.runs.reader import is_run, read_config, read_episodes, read_groups, read_provenance
from kapelle.runs.recorded import all_losses
from kapelle.runs.step_rows import lines_of, scan, stored_step
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
    """Resume from a checkpoint with these positions; return what it said."""
    said: list[str] = []
    with open_run(run, resume=True) as again:
        again.say = said.append
        again.rewind(saved)
    return said


def test_a_sound_run_has_lost_nothing(tmp_path: Path, saved: dict[str, int]) -> None:
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


def plain_of_another_step(run: Path, _other: Path) -> None:
    stored = stored_step(run / "episodes" / "train", 21)
    assert stored is not None
    lines = b"".join(line + b"\n" for line in lines_of(stored))
    (run / "episodes" / "train" / "00000020.jsonl").write_bytes(lines)


DAMAGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "a file removed": (lambda run, _: train(run, 17).unlink(), "steps 17 to 32 are missing"),
    "a file emptied": (lambda run, _: train(run, 17).write_bytes(b""), "steps 17 to 32 are missing"),
    "the last file removed": (lambda run, _: train(run, 33).unlink(), "steps 33 to 40 are missing"),
    "a step dropped": (without(20), "step 20 are missing"),
    "the last step of a file dropped": (without(32), "step 32 are missing"),
    "a step twice": (twice, "step 20 stand there twice"),
    "a bit flipped": (flipped, "step 20 are damaged"),
    "zeros": (zeroed, "steps 17 to 32 are missing"),
    "a file of another run": (
        lambda run, other: shutil.copy(train(other, 17), train(run, 17)),
        "steps 17 to 32 are not those that the run recorded",
    ),
    "a step of another run": (one_frame_of_another_run, "step 20 are not those that the run recorded"),
    "a file over another": (
        lambda run, _: shutil.copy(train(run, 1), train(run, 17)),
        "steps 17 to 32 are missing",
    ),
    "a plain file of another step": (plain_of_another_step, "step 20 are not those that the run recorded"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_is_told_with_its_steps_by_readers_and_refused_by_a_resume(
    tmp_path: Path, saved: dict[str, int], how: str
) -> None:
    run, (damage, words) = tmp_path / "run", DAMAGES[how]
    made(tmp_path / "other", seed=7)
    damage(run, tmp_path / "other")
    assert any(words in line for line in all_losses(run, contents=True)), all_losses(run, contents=True)
    before = {path: path.read_bytes() for path in run.rglob("*.jsonl*")}
    with pytest.raises(RunDirectoryError, match=f"{words}.*Restore the files from a copy"):
        resumed(run, saved)
    assert {path: path.read_bytes() for path in run.rglob("*.jsonl*")} == before, "nothing was cut"
    with pytest.raises(DataError):
        list(read_episodes(run))
    if how != "a step twice":
        step = {"the last file removed": 40, "the last step of a file dropped": 32}.get(how, 20)
        for read in (lambda: read_groups(run, step), lambda: list(read_episodes(run, step))):
            with pytest.raises(DataError, match=r"missing|not those that the run recorded|damaged"):
                read()
    assert read_groups(run, 10) == [group("a", 10, 1010)], "the other steps are read as before"


@pytest.mark.long
@pytest.mark.slow
def test_a_file_cut_at_any_byte_has_its_missing_steps_named(tmp_path: Path, saved: dict[str, int]) -> None:
    run = tmp_path / "run"
    path = train(run, 33)
    data, packed = path.read_bytes(), scan(path)
    for size in range(0, len(data), 7):
        path.write_bytes(data[:size])
        lost = [step for step, (frame,) in packed.steps.items() if frame.end > size]
        named = f"step 40 {'are'}" if lost == [40] else f"steps {lost[0]} to 40 are"
        assert any(named in line for line in all_losses(run)), size
        with pytest.raises(RunDirectoryError, match=named):
            resumed(run, saved)
    path.write_bytes(data)
    assert resumed(run, saved) == []


def test_traces_and_test_episodes_are_told_alike(tmp_path: Path, saved: dict[str, int]) -> None:
    run = tmp_path / "run"
    (run / "traces" / "00000017.jsonl.zst").unlink()
    assert all_losses(run) == ["the traces of steps 17 to 32 are missing (traces)"]
    with pytest.raises(RunDirectoryError, match="the traces of steps 17 to 32 are missing"):
        resumed(run, saved)


@pytest.mark.parametrize("whole", [True, False])
def test_a_deleted_folder_is_told_and_a_resume_goes_on_without_it(
    tmp_path: Path, saved: dict[str, int], whole: bool
) -> None:
    run = tmp_path / "run"
    shutil.rmtree(run / "episodes" if whole else run / "episodes" / "train")
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
def test_the_step_that_a_killed_run_was_writing_is_not_missed(
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


def test_a_record_that_was_cut_or_removed_is_refused_and_told(tmp_path: Path, saved: dict[str, int]) -> None:
    run = tmp_path / "run"
    table = run / "recorded.jsonl"
    rows = table.read_bytes().splitlines(keepends=True)
    table.write_bytes(b"".join(rows[: 2 * 30]))
    assert any("lost the rows of steps 31 to 39" in line for line in all_losses(run))
    with pytest.raises(RunDirectoryError, match=r"recorded\.jsonl has lost rows"):
        resumed(run, saved)
    table.write_bytes(b"".join([*rows[:3], b"{}\n", *rows[4:]]))
    assert any(
        "1 lines of recorded.jsonl are damaged, the first is line 4" in line for line in all_losses(run)
    )
    table.unlink()
    with pytest.raises(RunDirectoryError, match=r"recorded\.jsonl has lost rows"):
        resumed(run, saved)


def test_a_run_of_an_older_version_is_read_and_its_gaps_are_told(
    tmp_path: Path, saved: dict[str, int]
) -> None:
    run = tmp_path / "run"
    (run / "recorded.jsonl").unlink()
    older = {name: end for name, end in saved.items() if name != "recorded.jsonl"}
    for folder in ("episodes/train", "traces"):
        lay_plain(run / folder)
    assert all_losses(run, contents=True) == []
    assert resumed(run, older) == []
    assert sum(1 for _ in read_episodes(run)) == 2 * STEPS
    (run / "episodes" / "train" / "00000020.jsonl").unlink()
    assert all_losses(run) == ["the episodes of step 20 are missing (episodes/train)"]
    assert resumed(run, older) == []
    (run / "episodes" / "train" / "00000040.jsonl").unlink()
    with pytest.raises(RunDirectoryError, match="episodes of step 40, which the checkpoint counts"):
        resumed(run, older)


def test_what_the_run_itself_has_deleted_is_not_missed(tmp_path: Path, saved: dict[str, int]) -> None:
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
def test_half_a_row_about_the_machine_is_cut_and_resumed_steps_stand_there_once(
    tmp_path: Path, name: str
) -> None:
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


@pytest.mark.parametrize("name", ["config.yaml", "provenance.json"])
@pytest.mark.parametrize("how", ["removed", "replaced", "a folder"])
def test_a_file_that_makes_a_run_is_written_again_and_said(tmp_path: Path, name: str, how: str) -> None:
    said: list[str] = []
    with open_run(tmp_path / "run") as run:
        run.say = said.append
        write(run, 1)
        run.report("training", 1)
        assert said == []
        path = run.path / name
        path.unlink()
        if how == "replaced":
            path.write_text("mine\n")
        elif how == "a folder":
            path.mkdir()
        run.report("training", 2)
        (line,) = said
        assert str(path) in line
        run.report("done", 2, "finished")
    assert is_run(run.path)
    assert read_config(run.path) == CONFIG
    assert read_provenance(run.path) == {"steps": "default"}
    if how == "replaced":
        assert (run.path / f"{name}.replaced").read_text() == "mine\n"


@pytest.mark.parametrize("table", ["metrics.jsonl", "recorded.jsonl"])
@pytest.mark.parametrize("how", ["removed", "cut", "longer"])
def test_a_table_that_changes_while_the_run_goes_on_ends_it_with_what_to_do(
    tmp_path: Path, table: str, how: str
) -> None:
    with open_run(tmp_path / "run") as run:
        write(run, 1, 2)
        path = run.path / table
        data = path.read_bytes()
        path.write_bytes(data[:-9] if how == "cut" else data + b"{}\n")
        if how == "removed":
            path.unlink()
        with pytest.raises(RunDirectoryError, match=rf"{table} (has|was).*kapelle train --resume"):
            write(run, 3)


def test_a_folder_that_is_removed_while_the_run_goes_on_ends_it_with_what_to_do(tmp_path: Path) -> None:
    with open_run(tmp_path / "run") as run:
        write(run, 1)
        shutil.rmtree(run.path / "episodes")
        with pytest.raises(RunDirectoryError, match="episodes/train was removed while the run was trained"):
            write(run, 2)
