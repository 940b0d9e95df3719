"""What people get wrong in settings, and what they are told."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kapelle.errors import LONGEST_LIST, ConfigError, did_you_mean
from kapelle.settings.overlays import parse_yaml
from kapelle.setup.recipe import load_recipe

REST = "environment: {name: arithmetic}\nworkflow: {name: solo}\nalgorithm: {name: grpo}\n"


def said(text: str, folder: Path) -> str:
    """Return what is said of a recipe with this text, without its path."""
    path = folder / "r.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(path))
    return str(caught.value).replace(str(path), "r.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("enviroment: {name: arithmetic}\nworkflow: {name: solo}\nalgorithm: {name: grpo}\n", "Unknown key 'enviroment' (set in r.yaml). Did you mean 'environment'?"),
        ("environment: arithmetic\n", "`environment` is a section, and 'arithmetic' its `name`. Write `environment: {name: arithmetic}` in a recipe, environment.name=arithmetic on a command line."),
        (f"{REST}model: a/b\n", "'model' cannot be 'a/b' (set in r.yaml): write `model.path=a/b`."),
        (f"{REST}trackers: wandb\n", "'trackers' cannot be 'wandb' (set in r.yaml): write a list with a `name` in each entry, `trackers: [{name: wandb, …}]`."),
        (f"{REST}trackers: [wandb]\n", "'trackers.0' cannot be 'wandb': write it as a mapping, `{name: wandb}`."),
        (f"{REST}team: {{agents: {{a: {{}}, b: {{}}}}}}\n", "'team.agents' cannot be {'a': {}, 'b': {}} (set in r.yaml): write a list with a `name` in each entry, `team.agents: [{name: a, …}]`, or an integer."),
        (f"{REST}team: {{agents: [{{name: a, prompt: {{question}}}}]}}\n", "'team.agents.0.prompt' cannot be {'question': None} (set in r.yaml): write a text, in quotes where YAML would read something else."),
        (f"{REST}name: yes\n", "'name' cannot be True (set in r.yaml): YAML reads yes, no, on and off as true and false. Put the text in quotes."),
        (f"{REST}training: 5\n", "'training' cannot be 5 (set in r.yaml): it is a section. Write its keys, such as `training.steps=…`."),
        (f"{REST}training: {{steps: 5 steps}}\n", "'training.steps' cannot be '5 steps' (set in r.yaml): write a whole number (an integer)."),
        (f"{REST}team: {{agents: [{{name: my agent}}]}}\n", "'team.agents.0.name' cannot be 'my agent' (set in r.yaml): use letters, digits and _, and begin with a letter."),
        (f"{REST}steps: 5\n", "Unknown key 'steps' (set in r.yaml). Did you mean 'training.steps' or 'warmup.steps'?"),
        (f"{REST}lr: 5\n", "Unknown key 'lr' (set in r.yaml). Did you mean 'optimizer.lr' or 'warmup.lr'?"),
        (f"{REST}prompt: hello\n", "Unknown key 'prompt' (set in r.yaml). Did you mean 'team.agents.0.prompt'?"),
        ("", "Recipe r.yaml is empty. Copy one to start from: `kapelle recipes cp demo mine.yaml`."),
        ("# nothing\n", "Recipe r.yaml is empty. Copy one to start from: `kapelle recipes cp demo mine.yaml`."),
        ("hello\n", "Recipe r.yaml is not a mapping of sections (`training: {steps: 9}`) but the plain value 'hello'."),
        ("team:\n\tagents: 2\n", "Recipe r.yaml is not YAML: line 2 (`agents: 2`): found character '\\t' that cannot start any token"),
        (REST.replace("solo", "null"), "The recipe has no `workflow.name`. Add `workflow: {name: …}`."),
        ("algorithm: {name: grpo}\nseed: 1\nalgorithm: {name: rloo}\n", "Recipe r.yaml is not YAML: `algorithm` stands twice in one mapping, in line 1 and in line 3; keep one"),
        ("environment: {name: 'nomodule:Env'}\n", "The environment 'nomodule:Env' cannot be imported: No module named 'nomodule'. Is its package installed?"),
    ],
)  # fmt: skip
def test_one_sentence_says_what_where_and_how_to_mend_it(text: str, message: str, tmp_path: Path) -> None:
    assert said(text, tmp_path) == message


def test_a_class_that_lacks_methods_is_told_which(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import kapelle\n\nclass Env(kapelle.Settings):\n    def task(self, split, index): ...\n"
    )
    message = said(f"environment: {{name: '{tmp_path}/mine.py:Env'}}\n", tmp_path)
    assert "has no `reward_range`, no `sources`, no `check`, no `size`, no `start`" in message


def test_a_class_without_its_module_is_an_unknown_name(tmp_path: Path) -> None:
    assert said("environment: {name: ':Env'}\n", tmp_path).startswith("Unknown environment ':Env'.")


def test_a_module_where_kapelle_runs_is_found_unless_python_was_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "stands_nearby.py").write_text(
        "import sys\nfrom beside_that import Inv\nsys.path.append('/own/library')\n"
    )
    (tmp_path / "beside_that.py").write_text("Inv = 1\n")
    with monkeypatch.context() as safe:
        flags = {name: getattr(sys.flags, name) for name in dir(sys.flags) if not name.startswith("_")}
        safe.setattr(sys, "flags", SimpleNamespace(**{**flags, "safe_path": True}))
        message = said("environment: {name: 'stands_nearby:Env'}\n", tmp_path)
        assert message.endswith("There is a file of that name here: write 'stands_nearby.py:Env'.")
    message = said("environment: {name: 'stands_nearby:Env'}\n", tmp_path)
    assert message == "Module 'stands_nearby' has no 'Env', named as environment. Did you mean 'Inv'?"
    assert str(tmp_path) not in sys.path, "folders there, such as `wandb`, would pass for packages"
    assert sys.path[-1] == "/own/library"


def test_an_installed_module_goes_before_one_of_its_name_where_kapelle_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "colorsys.py").write_text("1 / 0\n")
    message = said("environment: {name: 'colorsys:Env'}\n", tmp_path)
    assert message.startswith("Module 'colorsys' has no 'Env'")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("my_word:Env", "No module named 'my_word'. Is its package installed?"),
        ("my_world:Env", "No module named 'absent_library'. Is its package installed?"),
        ("inner/part.py:Env", "write `package.module`, from the folder above the package."),
    ],
)
def test_of_a_module_that_is_not_found_the_file_that_was_meant_is_named(
    name: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "colorsys.py").write_text("class Env: ...\n")
    (tmp_path / "my_world.py").write_text("import absent_library\n")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "part.py").write_text("from .other import Env\n")
    assert said(f"environment: {{name: '{name}'}}\n", tmp_path).endswith(hint)


def test_a_module_that_fails_is_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fails_at_once.py").write_text("1 / 0\n")
    message = said("environment: {name: 'fails_at_once:Env'}\n", tmp_path)
    assert message.endswith(
        "cannot be imported: ZeroDivisionError: division by zero (fails_at_once.py, line 1)."
    )


@pytest.mark.parametrize("text", ["{a: 1, b: {c: 1, c: 2}}", "- {a: 1, a: 1}"])
def test_a_key_that_stands_twice_is_refused_at_any_depth(text: str) -> None:
    with pytest.raises(ValueError, match="stands twice"):
        parse_yaml(text)


def test_of_many_names_the_nearest_three_are_named() -> None:
    names = [f"name_{k:03}" for k in range(200)]
    hint = did_you_mean("nameless", names)
    assert len(hint) <= LONGEST_LIST
    assert hint.count("name_") == 3
    assert did_you_mean("xyz", names) == "", "of many, names that are nothing like it mislead"
    assert "of 200 known" in hint
    assert did_you_mean("xyz", ["a", "b"]) == " Known: a, b."
    assert did_you_mean("NAME_007", names) == " Did you mean 'name_007'?"
