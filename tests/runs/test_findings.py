from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, try_to_load_from_cache

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
from kapelle.runs.model_card import Exported, model_card


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


def test_the_hub_finds_data_base_and_licence_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The licence is the base's own, from its card in the cache; nothing is asked of a hub."""
    base = tmp_path / "hub" / "models--Qwen--Qwen3-0.6B"
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text("a1")
    (base / "snapshots" / "a1").mkdir(parents=True)
    (base / "snapshots" / "a1" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache",
        partial(try_to_load_from_cache, cache_dir=tmp_path / "hub"),
    )
    config = {"name": "two", "algorithm": {"name": "grpo"}}
    for path, datasets in (("openai/gsm8k", ["openai/gsm8k"]), (str(tmp_path), None)):
        environment = {"name": "math", "path": path}
        (tmp_path / "config.yaml").write_text(json.dumps({**config, "environment": environment}))
        (tmp_path / "provenance.json").write_text("{}")
        for name in ("metrics.jsonl", "evaluations.jsonl"):
            (tmp_path / name).touch()
        card = model_card(tmp_path, 1, [Exported("ann", ["ann"], ".", "Qwen/Qwen3-0.6B", "peft", "bfloat16")])
        data = ModelCard(card).data.to_dict()
        assert (data["base_model"], data["license"], data.get("datasets")) == (
            "Qwen/Qwen3-0.6B",
            "apache-2.0",
            datasets,
        )


def test_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "evaluated.jsonl").symlink_to(tmp_path / "elsewhere")
    keep_evaluation(tmp_path, {}, [])
    assert not (tmp_path / "elsewhere").exists()
