"""Models of ModelScope by name: found in its cache, downloaded by its package, or a one-line error."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from tests.support.tiny import sections, tiny_model

from kapelle.cli import main
from kapelle.models.pretrained import located
from kapelle.models.weights import save_model
from kapelle.runtime import hub

NAME = "Own/Tiny.1"
LAYOUTS = (
    "models/Own--Tiny.1/snapshots/master",
    "models/Own--Tiny.1/snapshots/v1.0",
    "models/Own/Tiny___1",
    "hub/models/Own/Tiny___1",
    "Own/Tiny.1",
    "hub/Own/Tiny___1",
)
"""Where `modelscope` keeps a model, newest version first (`snapshot_download` of 1.40 finds each)."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "find_spec", lambda _: None)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder, tiny_model(3))
    return folder


def recipe(folder: Path, name: str = NAME) -> str:
    given = sections(model={"path": f"modelscope:{name}", "device": "cpu"})
    (folder / "own.yaml").write_text(yaml.safe_dump({"name": "own", **given}))
    return str(folder / "own.yaml")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_is_found_in_every_cache_layout(layout: str, cache: Path, saved: Path) -> None:
    shutil.copytree(saved, cache / layout)
    assert located(f"modelscope:{NAME}", weights=True) == str(cache / layout)


def test_a_missing_model_is_a_one_line_error_with_a_fix(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe(tmp_path)]) != 0
    answer = " ".join(capsys.readouterr().err.split())
    assert f"Model 'modelscope:{NAME}' was not downloaded to {cache} (MODELSCOPE_CACHE)" in answer
    assert "pip install 'kapelle[modelscope]'" in answer
    assert f"modelscope download --model {NAME} --local_dir FOLDER" in answer
    assert "Traceback" not in answer
