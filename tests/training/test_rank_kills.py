"""Ranks that are killed at any instant, and a run that continues to the end of one that no one killed; `make test-faults` has more."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults.judging import differing, remains
from tests.faults.rank_kills import apart
from tests.support.killed_ranks import Kill, Way, said, train
from tests.support.killed_runs import Death

from kapelle.runs.checkpoint_folder import list_checkpoints


@pytest.mark.long
@pytest.mark.slow
def test_a_run_whose_ranks_were_killed_in_a_save_ends_as_if_they_had_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAPELLE_CACHE", str(tmp_path / "cache"))
    way, run, whole = Way(background=True, steps=2), tmp_path / "run", tmp_path / "whole"
    assert train(way, whole, 2) == [0, 0], said(whole)
    assert train(way, run, 2, Kill(Death("share written", 2))) == [-9, -9]
    assert [folder.name for folder in list_checkpoints(run / "checkpoints")] == ["00000000"]
    assert train(way, run, 2) == [0, 0], said(run)
    assert differing(remains(run), remains(whole)) == []


@pytest.mark.ranks
def test_a_rank_that_was_killed_is_named_and_a_resume_may_be_killed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAPELLE_CACHE", str(tmp_path / "cache"))
    way, run, whole = Way(background=True), tmp_path / "run", tmp_path / "whole"
    assert train(way, whole, 2) == [0, 0], said(whole)
    assert train(way, run, 2, Kill(Death("share written", 3), rank=1)) == [2, -9]
    assert "kapelle: Rank 1 is gone" in said(run)
    assert train(way, run, 2, Kill(Death("sealed, not renamed"))) == [-9, -9]
    assert train(way, run, 2) == [0, 0], said(run)
    assert differing(remains(run), remains(whole)) == []


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_another_number_of_ranks_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, ranks: int
) -> None:
    monkeypatch.setenv("KAPELLE_CACHE", str(tmp_path / "cache"))
    way, run, whole = Way(engine), tmp_path / "run", tmp_path / "whole"
    assert train(way, whole, 2) == [0, 0], said(whole)
    assert train(way, run, 2, Kill(Death("in an update", 8))) == [-9, -9]
    assert train(way, run, ranks) == [0] * ranks, said(run)
    assert apart(run, whole) == []
