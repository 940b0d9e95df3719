"""Errors of wrong settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from kapelle.errors import ConfigError
from kapelle.setup.recipe import load_recipe

REST = "environment: {name: arithmetic}\nworkflow: {name: solo}\nalgorithm: {name: grpo}\n"


def error_of(text: str, folder: Path) -> str:
    """Return the error of a recipe with this text, without its path."""
    path = folder / "r.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(path))
    return str(caught.value).replace(str(path), "r.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("enviroment: {name: arithmetic}\nworkflow: {name: solo}\nalgorithm: {name: grpo}\n", "(set in r.yaml). Did you mean 'environment'?"),
        ("environment: arithmetic\n", "`environment: {name: arithmetic}`"),
        (f"{REST}model: a/b\n", "`model.path=a/b`"),
        (f"{REST}trackers: wandb\n", "`trackers: [{name: wandb, …}]`"),
        (f"{REST}team: {{agents: [{{name: a, prompt: {{question}}}}]}}\n", "'team.agents.0.prompt'"),
        (f"{REST}name: yes\n", "quotes"),
        (f"{REST}training: {{steps: 5 steps}}\n", "write an integer"),
        (f"{REST}team: {{agents: [{{name: my agent}}]}}\n", "letters, digits and _"),
        (f"{REST}steps: 5\n", "Did you mean 'training.steps' or 'warmup.steps'?"),
        ("# nothing\n", "is empty"),
        ("hello\n", "'hello'"),
        ("team:\n\tagents: 2\n", "line 2 (`agents: 2`)"),
        (REST.replace("solo", "null"), "`workflow: {name: …}`"),
        ("algorithm: {name: grpo}\nseed: 1\nalgorithm: {name: rloo}\n", "in line 1 and in line 3"),
        ("environment: {name: 'nomodule:Env'}\n", "No module named 'nomodule'"),
    ],
)  # fmt: skip
def test_an_error_names_the_setting_its_source_and_a_fix(text: str, words: str, tmp_path: Path) -> None:
    assert words in error_of(text, tmp_path)


def test_an_error_names_the_methods_that_a_class_lacks(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import kapelle\n\nclass Env(kapelle.Settings):\n    def task(self, split, index): ...\n"
    )
    message = error_of(f"environment: {{name: '{tmp_path}/mine.py:Env'}}\n", tmp_path)
    assert "has no `reward_range`, no `sources`, no `check`, no `size`, no `start`" in message


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("my_word:Env", "No module named 'my_word'. Is its package installed?"),
        ("my_world:Env", "No module named 'absent_library'. Is its package installed?"),
        ("inner/part.py:Env", "write `package.module`, from the folder above the package."),
    ],
)
def test_a_missing_module_suggests_a_fix(
    name: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "colorsys.py").write_text("class Env: ...\n")
    (tmp_path / "my_world.py").write_text("import absent_library\n")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "part.py").write_text("from .other import Env\n")
    assert error_of(f"environment: {{name: '{name}'}}\n", tmp_path).endswith(hint)
