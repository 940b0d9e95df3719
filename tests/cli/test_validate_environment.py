"""`kapelle validate ENV` holds an environment to what training needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Kapelle


def test_a_sound_environment_is_fit_for_training(kapelle: Kapelle) -> None:
    said = kapelle("validate", "multi_step", "environment.difficulty=[2,3]")
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert lines[-1] == "multi_step is fit for training."
    assert len(lines) == 14
    assert all(line.startswith("ok  ") for line in lines[:-1])


@pytest.mark.slow
def test_a_recipe_of_the_same_name_goes_first_and_a_flag_says_otherwise(
    kapelle: Kapelle, gsm8k_folder: Path
) -> None:
    said = kapelle("validate", "--environment", "gsm8k_steps", f"environment.path={gsm8k_folder}")
    assert said.code == 0, said.err
    assert said.out.endswith("gsm8k_steps is fit for training.\n")


OWN = """
from typing import Literal
from kapelle.environments.procedural import MultiStep

class Generous(MultiStep):
    name: Literal["generous_environment:Generous"] = "generous_environment:Generous"
    extraction: tuple[str, ...] = ("last_number",)

    @property
    def reward_range(self):
        return (0.0, 0.5)
"""


def test_a_faulty_environment_of_ones_own_is_named_with_its_fault(
    kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("generous_environment.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    said = kapelle("validate", "generous_environment:Generous")
    assert said.code == 2
    assert "NO  rewards       task train-0 pays 1.0, outside [0.0, 0.5]" in said.out
    assert said.err == (
        "kapelle: `generous_environment:Generous` is not fit for training yet: rewards, gold. See above.\n"
    )


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("multistep", "recipe or environment 'multistep'. Did you mean 'multi_step'?"),
        ("arithmetik", "recipe or environment 'arithmetik'. Did you mean 'arithmetic'?"),
        ("dmeo", "recipe or environment 'dmeo'. Did you mean 'demo'?"),
        ("zzz", "recipe or environment 'zzz'. `kapelle recipes ls` lists recipes; a recipe of your own is a YAML file."),
    ],
)  # fmt: skip
def test_an_unknown_name_is_answered_with_the_recipe_or_environment_that_was_meant(
    kapelle: Kapelle, word: str, answer: str
) -> None:
    said = kapelle("validate", word)
    assert said.code == 2
    assert said.err == f"kapelle: Unknown {answer}\n"


@pytest.mark.parametrize("word", ["nli", "my_env.py:Env"])
def test_an_environment_in_a_recipes_place_is_answered_with_a_recipe(kapelle: Kapelle, word: str) -> None:
    said = kapelle("train", word)
    assert said.code == 2
    assert said.err == (
        f"kapelle: '{word}' is a piece of a run. Name it in a recipe, `environment: {{name: '{word}'}}`; `kapelle validate {word}` checks an environment alone.\n"
    )


def test_an_environment_is_checked_with_the_agents_that_it_knows(kapelle: Kapelle) -> None:
    words = ("validate", "arithmetic", "environment.flaws={reasoner: 0.5}")
    alone = kapelle(*words)
    assert alone.code == 2
    assert alone.err.endswith("If it needs certain agents, name them: --agents A,B.\n")
    assert kapelle(*words, "--agents", "reasoner, actor").code == 0
    refused = kapelle("validate", "demo", "--agents", "a")
    assert "a recipe names its agents in `team.agents`" in refused.err
