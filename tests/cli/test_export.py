from __future__ import annotations

import io
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
        ([], "Give one run directory"),
        (["nowhere"], "nowhere"),
        (["nowhere", "--merge", "--format", "peft"], "cannot be combined"),
        (["nowhere", "--public"], "Add --push OWNER/NAME"),
        (["nowhere@first"], "is not a checkpoint"),
        (["nowhere", "--push", "../x/y"], "--push must be a repository"),
        (["nowhere", "--push", "../x/y", "--dry-run"], "--push must be a repository"),
        (["nowhere", "--push", "me/team"], "there is no token. Set HF_TOKEN"),
    ):
        said = kapelle("export", *words)
        assert said.code == 2, words
        assert told in said.err


@pytest.mark.slow
def test_an_exported_team_is_evaluated_chatted_with_and_handed_to_vllm(
    kapelle: Kapelle, finished: tuple[Path, Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has a warm-up, so that its base exists nowhere else; the folder is moved before it is used."""
    run, _ = finished
    assert kapelle("export", str(run), "--out", "there").code == 0
    Path("there").rename("team")
    before = sorted(Path("team").rglob("*"))
    measured = [kapelle("eval", place, "--no-baselines", "--json") for place in (str(run), "team")]
    assert [said.code for said in measured] == [0, 0], measured[1].err
    assert measured[0].json["team"] == measured[1].json["team"]
    assert sorted(Path("team").rglob("*")) == before, "nothing is written into what was sent"
    monkeypatch.setattr("sys.stdin", io.StringIO("12+34\n"))
    said = kapelle("chat", "team")
    assert said.out.startswith("reasoner: "), said.err
    assert "actor: " in said.out
    said = kapelle("serve", "policy", "team", "--print", "vllm", "--port", "9000")
    assert said.out == (
        "vllm serve team/base --port 9000 --dtype float32 --enable-lora --max-lora-rank 8 --max-loras 2 "
        "--lora-modules reasoner=team/reasoner actor=team/actor\n"
    )
    assert "kapelle export RUN --out run" in kapelle("serve", "policy", "run", "--print", "vllm").err
    kapelle("export", str(run), "--out", "one", "--agent", "actor")
    assert not Path("one/team.yaml").exists(), "one of two agents is not a team"
