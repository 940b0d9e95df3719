from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.conftest import Kapelle, Said


def test_what_cannot_be_exported_is_one_line(
    kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    for words, told in (
        ([], "Name one run directory"),
        (["nowhere"], "nowhere"),
        (["nowhere", "--merge", "--format", "peft"], "Leave one of them out"),
        (["nowhere", "--public"], "Add --push OWNER/NAME"),
        (["nowhere@first"], "names no checkpoint"),
        (["nowhere", "--push", "../x/y"], "--push takes a repository"),
        (["nowhere", "--push", "../x/y", "--dry-run"], "--push takes a repository"),
        (["nowhere", "--push", "me/team"], "there is no token. Set HF_TOKEN"),
    ):
        said = kapelle("export", *words)
        assert said.code == 2, words
        assert told in said.err


@pytest.mark.slow
def test_a_run_is_exported_and_listed(
    kapelle: Kapelle, finished: tuple[Path, Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = finished
    said = kapelle("export", str(run), "--out", "there", "--push", "me/team", "--dry-run")
    assert said.code == 0, said.err
    assert "README.md" in said.out
    assert "would be written to there, and sent to me/team" in said.out
    assert not Path("there").exists()
    said = kapelle("export", str(run), "--out", "there", "--merge", "--agent", "actor", "--json")
    assert said.code == 0, said.err
    row = json.loads(said.out)
    assert (row["policies"], row["sent"], row["written"]) == (["actor"], None, True)
    assert set(row["files"]) == {
        p.relative_to("there").as_posix() for p in Path("there").rglob("*") if p.is_file()
    }
    assert {"README.md", "config.json", "model.safetensors"} <= set(row["files"])
    assert "there exists already" in kapelle("export", str(run), "--out", "there").err
    assert not list(Path().glob(".export-*"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "no-token")
    refused = kapelle("export", str(run), "--out", "more", "--push", "me/team")
    assert (refused.code, Path("more").exists()) == (2, False)
    assert "there is no token" in refused.err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in kapelle("export", str(run), "--out", "more", "--push", "me/team").err
