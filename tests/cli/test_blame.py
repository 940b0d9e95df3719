"""`kapelle blame`: who lost what, kept beside the run and never in the way of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Kapelle

from kapelle.rollout import episodes as playing
from kapelle.rollout.evaluation import blame as measuring
from kapelle.runs.blamed import blame_files, read_blamed
from kapelle.runs.reader import read_groups

FEW = ("--episodes", "2", "--samples", "3")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "blame" not in path.parts
    }


def test_the_episodes_of_the_evaluation_are_blamed_and_nothing_else_of_the_run_changes(
    kapelle: Kapelle, run: Path
) -> None:
    before = contents(run)
    said = kapelle("blame", str(run), *FEW, "--json")
    assert said.code == 0, said.err
    assert contents(run) == before
    found = said.json
    assert (found["step"], found["split"], found["samples"], found["failed_episodes"]) == (2, "eval", 3, 2)
    recorded = {e.task.id: e for group in read_groups(run, 2, "test") for e in group.episodes}
    for each in found["episodes"]:
        assert [turn["text"] for turn in each["turns"]] == [t.text for t in recorded[each["task"]].turns]
        assert each["success"] == recorded[each["task"]].success
        assert [turn["drop"] for turn in each["turns"]] == [
            pytest.approx(each["values"][k] - each["values"][k + 1]) for k in range(2)
        ]
    assert found["continuations"] == 3 * 2 * len(found["episodes"])
    assert f"2 failed and {found['solved_episodes']} solved episodes: " in said.err, (
        "what it costs is said first"
    )
    assert "about" in said.err
    (file,) = blame_files(run)
    assert len(read_blamed(file)[1]) == len(found["episodes"])


def test_what_is_measured_is_not_measured_again(kapelle: Kapelle, run: Path) -> None:
    first = kapelle("blame", str(run), *FEW, "--json")
    (file,) = blame_files(run)
    bytes_before = file.read_bytes()
    again = kapelle("blame", str(run), *FEW, "--json", "again.json")
    assert again.code == 0, again.err
    assert again.out.startswith("run after 2 steps: 2 failed and")
    assert json.loads(Path("again.json").read_text()) == first.json
    assert file.read_bytes() == bytes_before
    assert "0 continuations, about 0 tokens; 2 episodes have already been measured" in again.err
    file.write_bytes(bytes_before[:-20])
    assert kapelle("blame", str(run), *FEW).code == 0
    assert file.read_bytes() == bytes_before, "the broken line is measured again"


def test_a_stopped_measurement_is_kept_and_can_be_continued(
    kapelle: Kapelle, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = kapelle("blame", str(run), *FEW, "--json")
    (file,) = blame_files(run)
    complete = file.read_bytes()
    file.unlink()
    monkeypatch.setattr(measuring, "AT_ONCE", 1)
    calls = iter(range(9))
    roll_out_continuations = playing.roll_out_continuations

    async def stopped(*of: Any, **how: Any) -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return await roll_out_continuations(*of, **how)

    monkeypatch.setattr(measuring, "roll_out_continuations", stopped)
    said = kapelle("blame", str(run), *FEW, "--json", "out.json")
    assert said.code == 130
    assert not Path("out.json").exists()
    assert len(read_blamed(file)[1]) == 1
    assert kapelle("blame", str(run), *FEW, "--json", "out.json").code == 0
    assert file.read_bytes() == complete
    assert json.loads(Path("out.json").read_text()) == whole.json
