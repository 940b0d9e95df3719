from __future__ import annotations

from pathlib import Path

import pytest

from kapelle.errors import ConfigError, RunDirectoryError
from kapelle.runs.findings import (
    RunNotes,
    keep_evaluation,
    keep_exact,
    keep_notes,
    read_evaluated,
    read_exact,
    read_notes,
)


def test_results_are_read_in_order(tmp_path: Path) -> None:
    for steps in (1, 2):
        keep_evaluation(tmp_path, {"steps": steps}, ["evaluation.problems=3"])
        keep_exact(tmp_path, [{"step": steps, "exploitability": 0.25}])
    assert [(row["format"], row["steps"], row["settings"]) for row in read_evaluated(tmp_path)] == [
        (1, 1, ["evaluation.problems=3"]),
        (1, 2, ["evaluation.problems=3"]),
    ]
    assert read_exact(tmp_path) == [{"step": 2, "exploitability": 0.25}], "the newest alone"


def test_damage_and_failed_writes_are_ignored(tmp_path: Path) -> None:
    assert read_exact(tmp_path) == read_evaluated(tmp_path) == []
    (tmp_path / "exact.json").write_bytes(b'{"rows": 7}')
    (tmp_path / "evaluated.jsonl").write_bytes(
        b'{"steps": 1}\n[\n' + b"[" * 50_000 + b'\n3\n{"steps": 2}\n{"steps"'
    )
    assert read_exact(tmp_path) == []
    assert [row["steps"] for row in read_evaluated(tmp_path)] == [1, 2]
    keep_evaluation(tmp_path / "nowhere", {}, [])
    keep_exact(tmp_path / "nowhere", [])


def test_notes_are_changed_and_read(tmp_path: Path) -> None:
    assert keep_notes(tmp_path, add=["paper", "best"]) == RunNotes(("paper", "best"))
    assert keep_notes(tmp_path, text="a <b> note", add=["best"], remove=["paper", "none"]) == RunNotes(
        ("best",), "a <b> note"
    )
    assert read_notes(tmp_path) == RunNotes(("best",), "a <b> note")
    for wrong in (["two words"], [""], ["x" * 41]):
        with pytest.raises(ConfigError, match="not a valid tag"):
            keep_notes(tmp_path, add=wrong)
    with pytest.raises(ConfigError, match="32 tags"):
        keep_notes(tmp_path, add=[f"t{k}" for k in range(32)])
    assert read_notes(tmp_path) == RunNotes(("best",), "a <b> note"), "what was refused has changed nothing"
    for odd in (b"", b"[1]", b'{"tags": 7, "note": 3}', b'{"tags": [1, "two words"]}', b"[" * 50_000):
        (tmp_path / "notes.json").write_bytes(odd)
        assert read_notes(tmp_path) == RunNotes()
    with pytest.raises(RunDirectoryError):
        keep_notes(tmp_path / "nowhere", text="x")


def test_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "evaluated.jsonl").symlink_to(tmp_path / "elsewhere")
    keep_evaluation(tmp_path, {}, [])
    assert not (tmp_path / "elsewhere").exists()
