"""Any damage to a checkpoint is seen, and none costs a whole one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from kapelle.errors import CheckpointError
from kapelle.runs import checkpoint_folder
from kapelle.runs.checkpoint import list_checkpoints, load, newest_valid, prune, save
from kapelle.runtime.files import sha256


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
    "flip": r"content of model\.safetensors has changed",
    "short": r"model\.safetensors has \d+ bytes instead of \d+",
    "missing": r"model\.safetensors is missing",
    "state": r"content of state\.json has changed",
    "manifest": r"manifest\.json is missing or broken",
    "no manifest": r"manifest\.json is missing or broken",
    "empty manifest": r"manifest\.json is missing or broken",
    "format": "has format 3",
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_is_named_and_the_newest_whole_checkpoint_found(tmp_path: Path, how: str) -> None:
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


def test_without_a_whole_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "nowhere").folder is None
    folder = save(tmp_path, 1, {"loop": {}})
    (folder / "manifest.json").unlink()
    newest = newest_valid(tmp_path)
    assert newest.folder is None
    assert [rejected.folder for rejected in newest.rejected] == [folder]
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load(tmp_path / "00000009")


def test_a_step_saved_again_is_the_newer_one(tmp_path: Path) -> None:
    for value in range(11):
        save(tmp_path, 5, {"loop": {"value": value}})
    save(tmp_path, 4, {"loop": {"value": 99}})
    assert names(tmp_path)[0] == "00000004"
    assert names(tmp_path)[-1] == "00000005-11"
    newest = newest_valid(tmp_path)
    assert newest.folder is not None
    assert load(newest.folder)["loop"]["value"] == 10


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 3):
        save(tmp_path, step, {"loop": {}})
    assert names(tmp_path) == ["00000003", "99999999", "100000000"]


@pytest.mark.parametrize("how", DAMAGES)
def test_pruning_keeps_the_newest_that_are_whole(tmp_path: Path, how: str) -> None:
    for step in range(1, 6):
        save(tmp_path, step, {"model": {"w": torch.zeros(3)}, "loop": {"step": 1}})
    damage(tmp_path / "00000004", how)
    deleted = prune(tmp_path, keep=2)
    assert [folder.name for folder in deleted] == ["00000002", "00000001"]
    assert names(tmp_path) == ["00000003", "00000004", "00000005"]
    assert prune(tmp_path, keep=2) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == names(tmp_path)


@pytest.mark.parametrize("how", DAMAGES)
def test_pruning_never_deletes_the_last_whole_checkpoint(tmp_path: Path, how: str) -> None:
    for step in range(1, 5):
        save(tmp_path, step, {"model": {"w": torch.zeros(3)}, "loop": {"step": 1}})
    for step in range(2, 5):
        damage(tmp_path / f"{step:08d}", how)
    assert prune(tmp_path, keep=1) == []
    assert newest_valid(tmp_path).folder == tmp_path / "00000001"


@pytest.mark.slow
def test_a_flipped_bit_in_any_byte_of_a_manifest_is_met_by_the_checkpoint_before(tmp_path: Path) -> None:
    def adapters(folder: Path) -> None:
        for name in ("agent_0", "agent_1", "agent_2"):  # names that are one bit apart
            (folder / name).write_text("{}")

    older = save(tmp_path, 1, {"loop": {}}, adapters)
    newer = save(tmp_path, 2, {"loop": {}}, adapters)
    manifest = newer / "manifest.json"
    content = manifest.read_bytes()
    for bit in range(0, 8 * len(content), 5):  # 5 and 8 share no factor: all eight places have their turn
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        manifest.write_bytes(flipped)
        newest = newest_valid(tmp_path)
        assert newest.folder == older, f"bit {bit}: {bytes(flipped)!r}"
        (rejected,) = newest.rejected
        assert str(newer) in rejected.reason
    manifest.write_bytes(content)
    assert newest_valid(tmp_path).folder == newer


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"7",
        b"null",
        b'"format"',
        b"[" * 100_000,
        b'{"format": 1, "step": 2, "files": ["state.json"]}',
        b'{"format": 1, "step": 2, "files": {"state.json": 7}}',
        b'{"format": 1, "step": 2, "files": {"state.json": {"bytes": 11}}}',
        b'{"format": 1, "step": 2, "files": {"state.json": {"bytes": 11, "sha256": null}}}',
        b'{"format": 1, "step": 2, "files": {"state.json": {}, "a\\u0000b": {}}}',
        b'{"format": {}, "step": 2, "files": {}}',
    ],
)
def test_a_manifest_of_any_other_form_is_a_damaged_one(tmp_path: Path, content: bytes) -> None:
    older = save(tmp_path, 1, {"loop": {}})
    newer = save(tmp_path, 2, {"loop": {}})
    (newer / "manifest.json").write_bytes(content)
    newest = newest_valid(tmp_path)
    assert newest.folder == older
    assert "manifest.json is missing or broken" in newest.rejected[0].reason


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names the files whose content is read to compare it with a manifest."""
    found: list[str] = []

    def counted(path: Path) -> str:
        found.append(f"{path.parent.name}/{path.name}")
        return sha256(path)

    monkeypatch.setattr(checkpoint_folder, "sha256", counted)
    return found


def saved(checkpoints: Path, *steps: int) -> None:
    for step in steps:
        save(checkpoints, step, {"model": {"w": torch.full((3,), float(step))}, "loop": {"step": 1}})


def test_pruning_reads_no_checkpoint_that_this_process_has_saved_or_loaded(
    tmp_path: Path, hashed: list[str]
) -> None:
    saved(tmp_path, 1, 2, 3)
    assert names(tmp_path) == ["00000001", "00000002", "00000003"]
    assert [folder.name for folder in prune(tmp_path, keep=2)] == ["00000001"]
    assert hashed == []
    checkpoint_folder._hashed.clear()  # another process goes on
    assert newest_valid(tmp_path).folder == tmp_path / "00000003"
    hashed.clear()
    saved(tmp_path, 4, 5)
    assert [folder.name for folder in prune(tmp_path, keep=3)] == ["00000002"]
    assert hashed == []
    checkpoint_folder._hashed.clear()
    saved(tmp_path, 6)
    prune(tmp_path, keep=3)
    assert sorted(hashed) == [
        f"0000000{step}/{name}" for step in (4, 5) for name in ("model.safetensors", "state.json")
    ]
    hashed.clear()
    saved(tmp_path, 7)
    prune(tmp_path, keep=3)
    assert hashed == [], "what was read once is remembered"


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_to_a_checkpoint_that_pruning_knew_is_found_by_who_loads_it(tmp_path: Path, how: str) -> None:
    saved(tmp_path, 1, 2, 3)
    prune(tmp_path, keep=2)
    damage(tmp_path / "00000003", how)
    with pytest.raises(CheckpointError, match=DAMAGES[how]):
        load(tmp_path / "00000003")
    saved(tmp_path, 4)
    assert prune(tmp_path, keep=2) == []
    assert names(tmp_path) == ["00000002", "00000003", "00000004"]


def test_content_that_changes_under_the_same_size_and_time_is_found(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    weights = tmp_path / "00000003" / "model.safetensors"
    about = weights.stat()
    damage(tmp_path / "00000003", "flip")
    os.utime(weights, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert weights.stat().st_mtime_ns == about.st_mtime_ns
    assert [folder.name for folder in prune(tmp_path, keep=1)] == ["00000001"], "the newest whole one is 2"
    assert newest_valid(tmp_path).folder == tmp_path / "00000002"
