"""Any damage to a checkpoint is detected, and complete ones are kept."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from kapelle.errors import CheckpointError
from kapelle.runs.checkpoint import list_checkpoints, load, newest_valid, prune, save


def names(checkpoints: Path) -> list[str]:
    return [folder.name for folder in list_checkpoints(checkpoints)]


def damage(folder: Path, how: str) -> None:
    tensors = folder / "model.safetensors"
    content = bytearray(tensors.read_bytes())
    if how == "flip":
        content[-1] ^= 1
        tensors.write_bytes(content)
    elif how == "short":
        tensors.write_bytes(content[:-1])
    elif how == "missing":
        tensors.unlink()
    elif how == "state":
        (folder / "state.json").write_text((folder / "state.json").read_text().replace("1", "2", 1))
    elif how == "manifest":
        (folder / "manifest.json").write_text('{"format": 1, "st')
    elif how == "no manifest":
        (folder / "manifest.json").unlink()
    elif how == "empty manifest":
        (folder / "manifest.json").write_text('{"format": 1, "step": 2, "files": {}}')
    elif how == "format":
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 3}))
    else:
        raise AssertionError(how)


DAMAGES = {
    "flip": r"model\.safetensors",
    "short": r"model\.safetensors has \d+ bytes",
    "missing": r"model\.safetensors is missing",
    "state": r"state\.json",
    "manifest": r"manifest\.json",
    "no manifest": r"manifest\.json",
    "empty manifest": r"manifest\.json",
    "format": "has format 3",
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_is_named_and_the_newest_complete_checkpoint_found(tmp_path: Path, how: str) -> None:
    for step in (1, 2):
        save(tmp_path, step, {"model": {"w": torch.full((3,), float(step))}, "loop": {"step": 1}})
    damage(tmp_path / "00000002", how)
    with pytest.raises(CheckpointError, match=DAMAGES[how]):
        load(tmp_path / "00000002")
    newest = newest_valid(tmp_path)
    assert newest.folder == tmp_path / "00000001"
    (rejected,) = newest.rejected
    assert rejected.folder == tmp_path / "00000002"
    assert load(newest.folder)["model"]["w"].tolist() == [1.0, 1.0, 1.0]


def test_a_step_saved_again_is_the_newer_one(tmp_path: Path) -> None:
    for value in range(11):
        save(tmp_path, 5, {"loop": {"value": value}})
    save(tmp_path, 4, {"loop": {"value": 99}})
    assert names(tmp_path)[0] == "00000004"
    assert names(tmp_path)[-1] == "00000005-11"
    newest = newest_valid(tmp_path)
    assert newest.folder is not None
    assert load(newest.folder)["loop"]["value"] == 10


@pytest.mark.parametrize("how", ["flip", "missing", "manifest"])
def test_pruning_keeps_the_newest_complete_checkpoints(tmp_path: Path, how: str) -> None:
    for step in range(1, 6):
        save(tmp_path, step, {"model": {"w": torch.zeros(3)}, "loop": {"step": 1}})
    damage(tmp_path / "00000004", how)
    deleted = prune(tmp_path, keep=2)
    assert [folder.name for folder in deleted] == ["00000002", "00000001"]
    assert names(tmp_path) == ["00000003", "00000004", "00000005"]
    assert prune(tmp_path, keep=2) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == names(tmp_path)


def test_pruning_never_deletes_the_last_complete_checkpoint(tmp_path: Path) -> None:
    for step in range(1, 5):
        save(tmp_path, step, {"model": {"w": torch.zeros(3)}, "loop": {"step": 1}})
    for step in range(2, 5):
        damage(tmp_path / f"{step:08d}", "flip")
    assert prune(tmp_path, keep=1) == []
    assert newest_valid(tmp_path).folder == tmp_path / "00000001"


def saved(checkpoints: Path, *steps: int) -> None:
    for step in steps:
        save(checkpoints, step, {"model": {"w": torch.full((3,), float(step))}, "loop": {"step": 1}})


def test_content_that_changes_under_the_same_size_and_time_is_found(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    weights = tmp_path / "00000003" / "model.safetensors"
    about = weights.stat()
    damage(tmp_path / "00000003", "flip")
    os.utime(weights, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert weights.stat().st_mtime_ns == about.st_mtime_ns
    assert [folder.name for folder in prune(tmp_path, keep=1)] == ["00000001"], "the newest whole one is 2"
    assert newest_valid(tmp_path).folder == tmp_path / "00000002"
