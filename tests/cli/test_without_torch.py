"""Commands that only look at settings import no torch: they answer in under a second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.tiny import tiny_model

from kapelle.models.weights import save_model

HEAVY = {"torch", "transformers", "peft", "pandas"}

WITH_DATA = (
    "cory_gsm8k",
    "gsm8k",
    "gsm8k_steps",
    "gsm8k_tools",
    "maporl_anli_debate",
    "maporl_gsm8k_debate",
    "marft_math_duo",
    "mbpp",
    "mrlm_multi",
    "verifier_file",
)
"""Recipes that read files which are not here."""

PROGRAM = """
import contextlib, io, json, sys
from kapelle.cli import main
from kapelle.setup.recipe import load_recipe, load_stages
from kapelle.setup.team_builder import build_algorithm, build_team

codes = {}
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        codes[" ".join(words)] = main(words)
for name in json.loads(sys.argv[2]):
    for recipe in [recipe for _, recipe in load_stages(name)] or [load_recipe(name)]:
        build_team(recipe.config, build_algorithm(recipe.config))
print(json.dumps([codes, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def done(commands: list[list[str]], recipes: Sequence[str], folder: Path) -> tuple[dict[str, int], set[str]]:
    """Return the exit codes of commands and the libraries that a new interpreter then holds.

    Of `recipes` only the team and the algorithm are built: their data lie elsewhere.
    """
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands), json.dumps(recipes)],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    )
    codes, modules = json.loads(ended.stdout)
    return codes, set(modules)


def test_looking_at_recipes_and_runs_imports_no_torch(tmp_path: Path) -> None:
    pytest.importorskip("pyspiel")
    (tmp_path / "runs").mkdir()
    folder = tmp_path / "model"
    save_model(folder, tiny_model())
    commands = [["train", name, "--dry-run"] for name in ("demo", "kuhn", "maporl_turns", "self_play_games")]
    commands += [
        ["plan", "demo", "--gpu-memory", "80"],
        ["plan", "kuhn", "--json"],
        ["plan", "demo", f"model.path={folder}", "--gpu-memory", "80"],
        ["train", "demo", f"model.path={folder}", "--dry-run"],
        ["validate", "demo"],
        ["recipes", "ls"],
        ["recipes", "show", "demo"],
        ["runs", "ls"],
        ["info"],
    ]
    codes, libraries = done(commands, WITH_DATA, tmp_path)
    assert codes == dict.fromkeys(codes, 0)
    assert libraries & HEAVY == set()


def test_what_is_imported_by_its_first_use_is_torch_itself() -> None:
    import torch

    from kapelle.runtime import on_demand

    assert on_demand.torch.Tensor is torch.Tensor
    assert on_demand.torch.nn.functional.elu is torch.nn.functional.elu


@pytest.mark.parametrize(("own", "read"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_idle_threads_of_torch_sleep_in_scripts_too(own: dict[str, str], read: str) -> None:
    """On a busy machine, threads that spin take many times the time of the work."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    program = (
        "import kapelle, os, sys; assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**environment, **own},
    )
    assert ended.stdout == f"{read}\n"
