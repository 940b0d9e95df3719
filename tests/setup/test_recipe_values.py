"""The section `real` of every recipe works, with a small model and small files in place of those of the hub."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.conftest import call
from tests.support.tiny import SIZE

from kapelle.models.language_model import load_language_model
from kapelle.models.weights import save_model
from kapelle.settings.schema import EmbeddedConfig, ModelConfig
from kapelle.setup.recipe import builtin_recipes, load_recipe, load_stages

STEPS = [
    {"question": f"Twice {n}?", "answer": f"It is {n}*2=<<{n}*2={2 * n}>>{2 * n}.\n#### {2 * n}"}
    for n in range(1, 9)
]
PAIRS = [{"prompt": f"p{n}", "chosen": f"c{n}", "rejected": f"r{n}"} for n in range(8)]
CLAIMS = [
    {"premise": f"{n} cats.", "hypothesis": text, "label": label}
    for n in range(20)
    for text, label in (("Cats.", "e"), ("Dogs.", "n"), ("No cat.", "c"))
]
GRADED = [
    {"question": f"Twice {n}?", "solution": text, "is_correct": right}
    for n in range(60)
    for text, right in ((str(2 * n), True), (str(2 * n + 1), False))
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small data of every form that recipes need, and a model that reads images."""
    folder = tmp_path_factory.mktemp("data")
    for name, rows in (("gsm8k", STEPS), ("pairs", PAIRS)):
        write(folder / name / "train.jsonl", rows[:4])
        write(folder / name / "test.jsonl", rows[4:])
    write(folder / "nli.jsonl", CLAIMS)
    write(folder / "graded.jsonl", GRADED)
    save_model(
        folder / "seeing", load_language_model(ModelConfig(embedded=EmbeddedConfig(sees=True, **SIZE)))
    )
    return folder


def kind_of(name: str, *settings: str, real: bool) -> str:
    """Return what a recipe plays."""
    stages = [each for _, each in load_stages(name, (), settings, real=real)]
    recipe = (stages or [load_recipe(name, (), settings, real=real)])[0]
    return str(recipe.config.environment.model_dump()["name"])


def data_of(name: str, kind: str, files: Path, data_folder: Path) -> list[str]:
    """Return the settings that put small files in place of the hub's data, behind whatever the recipe names."""
    if name == "mrlm_multi":
        return [
            f"environment.parts.code.environment.path={data_folder / 'mbpp' / 'mbpp.jsonl.gz'}",
            f"environment.parts.math.environment.path={files / 'gsm8k'}",
        ]
    local = {
        "code": data_folder / "mbpp" / "mbpp.jsonl.gz",
        "math": files / "gsm8k",
        "gsm8k_steps": files / "gsm8k",
        "nli": files / "nli.jsonl",
        "labelled": files / "graded.jsonl",
    }
    if kind == "tools":
        return [f"environment.questions.path={files / 'gsm8k'}"]
    return [f"environment.path={local[kind]}"] if kind in local else []


def models_of(name: str, pretrained: str, files: Path) -> list[str]:
    """Return the settings that put a small model in place of every one that a recipe names."""
    if name == "squares":
        return [f"model.path={files / 'seeing'}"]
    own = {"maporl_two_models": (f"team.agents.1.weights.model={pretrained}",)}
    return [f"model.path={pretrained}", *own.get(name, ())]


REAL = {name: text.partition("\nreal:")[2] for name, text in builtin_recipes().items()}
HUB_DATA = ("mbpp", "mrlm_multi")
"""Recipes whose data are only tried where the real files are."""


@pytest.mark.parametrize("name", REAL)
def test_a_section_real_has_values_for_a_pretrained_model_and_their_sources(name: str) -> None:
    values = yaml.safe_load(builtin_recipes()[name])["real"]
    assert values["model"]["path"] not in {None, "embedded"}
    comments = " ".join(re.findall(r"# (.*)", REAL[name]))
    assert "Figures: " in comments
    assert re.search(r"\d{4}\.\d{5}|\b[\w-]+/[\w.-]+/[\w.-]+\.(sh|yaml|py)\b|configs?/|README", comments), (
        "no source"
    )
    for found in [each for _, each in load_stages(name, real=True)] or [load_recipe(name, real=True)]:
        config = found.config
        assert config.optimizer.lr < 1e-4
        assert config.team.sampling.max_tokens >= 256
        assert config.warmup is None
        assert config.environment.model_dump()["name"] not in {"arithmetic", "gsm8k_steps"}
        assert found.notes == ()
        if config.algorithm.model_dump()["name"] not in {"sft", "verifier", "dpo"}:
            assert config.optimizer.lr <= 3e-5


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in REAL if name not in HUB_DATA])
def test_it_passes_every_check_before_a_model_loads(name: str, pretrained: str, files: Path) -> None:
    settings = data_of(name, kind_of(name, real=True), files, files)
    said = call("train", name, "--real", *models_of(name, pretrained, files), *settings, "--dry-run")
    assert said.code == 0, said.err
    assert "--real" in said.out, "where each setting came from"
    assert "# warm-up" not in said.out


@pytest.mark.sample(30)
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in REAL if name not in HUB_DATA])
def test_a_step_is_taken_with_its_values(name: str, pretrained: str, files: Path, tmp_path: Path) -> None:
    small = (
        "team.sampling.max_tokens=8",
        "team.lora.rank=2",
        "training.steps=1",
        "training.tasks_per_step=2",
        "evaluation.before_and_after=false",
        "evaluation.every=0",
    )
    # A verifier trained for one step judges badly and could not set rewards; this test only needs the step.
    gate = ("stages.debate.algorithm.least_auc=null",) if "stage:judge" in REAL[name] else ()
    settings = (*data_of(name, kind_of(name, real=True), files, files), *small, *gate)
    said = call(
        "train",
        name,
        "--real",
        *models_of(name, pretrained, files),
        *settings,
        "--run-dir",
        str(tmp_path / "run"),
    )
    assert said.code == 0, said.err
