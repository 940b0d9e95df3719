"""Models of ModelScope by name: found where its package keeps them, fetched by it, or refused in one line."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from tests.support.tiny import sections, tiny_model

from kapelle import Trainer
from kapelle.cli import main
from kapelle.errors import ModelError
from kapelle.models.paths import located
from kapelle.models.weights import save_model
from kapelle.runtime import hub
from kapelle.setup.recipe import resolve

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
def test_a_model_is_found_wherever_its_package_has_put_it(layout: str, cache: Path, saved: Path) -> None:
    shutil.copytree(saved, cache / layout)
    assert located(f"modelscope:{NAME}", weights=True) == str(cache / layout)


def test_a_recipe_that_names_one_is_checked_planned_and_trained(
    cache: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(saved, cache / LAYOUTS[0])
    file = recipe(tmp_path)
    assert main(["validate", file]) == 0
    assert "files whole, weights fit" in capsys.readouterr().out
    assert main(["plan", file]) == 0
    assert main(["train", file, "training.steps=1", "--run-dir", str(tmp_path / "run"), "--no-rich"]) == 0
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert kept["model"]["path"] == f"modelscope:{NAME}", (
        "the run's settings name the model, not this machine's folder"
    )


def test_one_that_is_not_there_is_refused_in_one_line_that_says_how_to_get_it(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe(tmp_path)]) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"Model 'modelscope:{NAME}' was not downloaded to {cache} (MODELSCOPE_CACHE)" in said
    assert "pip install 'kapelle[modelscope]'" in said
    assert f"modelscope download --model {NAME} --local_dir FOLDER" in said
    assert "Traceback" not in said


def test_a_name_without_an_owner_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "find_spec", lambda _: object())
    with pytest.raises(ModelError, match="its names are OWNER/NAME"):
        located("modelscope:tiny")


def test_settings_are_fetched_to_be_checked_and_weights_when_they_are_loaded(
    cache: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def snapshot_download(name: str, allow_patterns: list[str] | None = None) -> str:
        asked.append((name, allow_patterns))
        folder = cache / LAYOUTS[0]
        folder.mkdir(parents=True, exist_ok=True)
        for file in saved.iterdir():
            if allow_patterns is None or any(file.match(pattern) for pattern in allow_patterns):
                shutil.copy(file, folder)
        return str(folder)

    package = ModuleType("modelscope")
    package.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "modelscope", package)
    monkeypatch.setattr(hub, "find_spec", lambda _: object())
    with Trainer(resolve(sections(model={"path": f"modelscope:{NAME}", "device": "cpu"}))) as trainer:
        list(trainer.steps(1))
        assert trainer.models["base"].name == str(cache / LAYOUTS[0])
    assert asked == [(NAME, list(hub.SETTINGS)), (NAME, None)], "each once"


def test_what_the_package_raises_is_one_sentence(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, **_: Any) -> str:
        raise OSError("no route to www.modelscope.cn")

    package = ModuleType("modelscope")
    package.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "modelscope", package)
    monkeypatch.setattr(hub, "find_spec", lambda _: object())
    with pytest.raises(
        ModelError, match=r"cannot be fetched from ModelScope: OSError: no route.* --local_dir FOLDER"
    ):
        located(f"modelscope:{NAME}")


def test_a_name_of_the_other_hub_that_modelscope_has_is_told_its_prefix(
    cache: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kapelle.models.paths import local_only

    shutil.copytree(saved, cache / LAYOUTS[0])
    monkeypatch.setattr("kapelle.models.paths.hub_fault", lambda *_, **__: "there is no network")
    with pytest.raises(ModelError, match=r"write `modelscope:Own/Tiny\.1`"):
        local_only(NAME)
