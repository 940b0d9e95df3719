"""The commands that only look: recipes, validate, info."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from tests.cli.conftest import TINY, Kapelle

from kapelle.cli.info import NEEDS, extras
from kapelle.setup.recipe import builtin_recipes


def test_recipes_are_listed_with_what_they_are(kapelle: Kapelle) -> None:
    for words in (["recipes"], ["recipes", "ls"]):
        said = kapelle(*words)
        assert [line.split()[0] for line in said.out.splitlines()] == sorted(builtin_recipes())
        assert all(line.count(". ") == 0 for line in said.out.splitlines()), "one sentence each"
    described = kapelle("recipes", "ls", "--json").json
    assert set(described) == set(builtin_recipes())
    assert all(described.values())


@pytest.mark.parametrize(
    ("words", "place"), [([], "demo.yaml"), (["mine.yaml"], "mine.yaml"), (["sub"], "sub/demo.yaml")]
)
def test_a_copied_recipe_is_the_recipe(kapelle: Kapelle, words: list[str], place: str) -> None:
    Path("sub").mkdir()
    assert kapelle("recipes", "cp", "demo", *words).code == 0
    assert Path(place).read_text("utf-8") == builtin_recipes()["demo"]
    again = kapelle("recipes", "cp", "demo", *words)
    assert (again.code, again.err) == (2, f"kapelle: {place} exists already. Choose another destination.\n")


def test_validation_prints_its_checks(kapelle: Kapelle) -> None:
    said = kapelle("validate", "demo", *TINY)
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == [
        "settings",
        "team",
        "algorithm",
        "workflow",
        "data",
        "prompts",
        "models",
    ]
    assert all(line.startswith("ok  ") for line in lines[:-1])
    assert lines[-1] == "demo is ready to train."


def test_info_knows_versions_machine_and_extras(kapelle: Kapelle) -> None:
    found = kapelle("info", "--json").json
    assert found["versions"]["torch"] == version("torch")
    assert found["machine"]["threads"] >= 1
    known = {"peft", "data", "embed", "games", "plot", "tensorboard", "wandb", "bench"}
    assert known <= set(found["extras"])  # an installation of before lacks later ones
    text = kapelle("info").out
    assert f"  torch         {version('torch')}" in text.splitlines()


def test_info_lists_what_recipes_may_name_and_what_is_missing(
    kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NEEDS, "openspiel", "no_such_module")
    found = kapelle("info", "--json").json
    assert {"grpo", "sft"} <= {*found["names"]["algorithms"]}
    assert {"arithmetic", "openspiel"} <= {*found["names"]["environments"]}
    assert {"solo", "chain"} <= {*found["names"]["workflows"]}
    assert {"local", "vllm"} <= {*found["names"]["engines"]}
    assert "torch" in found["names"]["train_engines"]
    assert found["missing"]["openspiel"] == "needs no_such_module, which is not installed"
    assert not any(set("<>=[") & set(package) for packages in extras().values() for package in packages)
