"""What recipes say of pretrained models holds: the section `real` of each, and the settings that comments name.

Every one is tried as a user would, by a dry run, with a small model folder in place of one from the hub and small files
in place of the hub's data.
"""

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
from kapelle.models.weights import save_adapter, save_model
from kapelle.settings.schema import EmbeddedConfig, ModelConfig
from kapelle.setup.recipe import builtin_recipes, load_recipe, load_stages
from kapelle.team import Lora

STEPS = [
    {"question": f"Twice {n}?", "answer": f"It is {n}*2=<<{n}*2={2 * n}>>{2 * n}.\n#### {2 * n}"}
    for n in range(1, 9)
]
PAIRS = [{"prompt": f"p{n}", "chosen": f"c{n}", "rejected": f"r{n}"} for n in range(8)]
TALKS = [
    {"chosen": f"\n\nHuman: {n}?\n\nAssistant: yes", "rejected": f"\n\nHuman: {n}?\n\nAssistant: no"}
    for n in range(8)
]
PLAYED = [{"question": f"{n}?", "answer": f"It is {n}."} for n in range(8)]
CLAIMS = [
    {"premise": f"{n} cats.", "hypothesis": text, "label": label}
    for n in range(20)
    for text, label in (("Cats.", "e"), ("Dogs.", "n"), ("No cat.", "c"))
]
OPEN = [{"problem": f"Twice {n}?", "solution": f"It is {2 * n}.", "answer": str(2 * n)} for n in range(1, 60)]
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
def files(tmp_path_factory: pytest.TempPathFactory, pretrained: str) -> Path:
    """Small data of every form that recipes and their comments name, and a verifier."""
    folder = tmp_path_factory.mktemp("data")
    for name, rows in (("gsm8k", STEPS), ("pairs", PAIRS), ("talks", TALKS), ("played", PLAYED)):
        write(folder / name / "train.jsonl", rows[:4])
        write(folder / name / "test.jsonl", rows[4:])
    write(folder / "nli.jsonl", CLAIMS)
    write(folder / "open.jsonl", OPEN)
    write(folder / "graded.jsonl", GRADED)
    save_verifier(folder / "verifier", pretrained)
    save_model(
        folder / "seeing", load_language_model(ModelConfig(embedded=EmbeddedConfig(sees=True, **SIZE)))
    )
    return folder


def save_verifier(folder: Path, base: str) -> None:
    """Write what a dry run reads of a verifier: an adapter, and how well it judges."""
    model = load_language_model(ModelConfig(path=base))
    lora = Lora(rank=8, alpha=16.0, targets=("q_proj",))
    model.bank.add("verifier", lora, 0)
    save_adapter(folder, model.bank.parameters("verifier"), lora, base)
    judged = {"answers": 100, "questions": 50, "right": 0.5, "both": 50, "auc": 0.9, "auc_within": 0.9}
    held_out = {**judged, "interval_within": [0.8, 1.0]}
    (folder / "verifier.json").write_text(json.dumps({"held_out": held_out}))


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


@pytest.mark.sample(14)
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
    # A verifier of one step judges nothing, and none that cannot judge may pay: here the step alone is asked for.
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


SETTING = re.compile(r"(?<![\w.])([a-z_]+(?:\.\w+)*=(?:\{[^}]*\}|[^\s;,)]+))")


def alternatives(text: str) -> list[tuple[str, ...]]:
    """Return the settings that a recipe's comments name, those of neighbouring lines together."""
    found: list[list[str]] = []
    before = -2
    for number, line in enumerate(text.splitlines()):
        _, mark, comment = line.partition("#")
        settings = [each.rstrip(".") for each in SETTING.findall(comment)] if mark else []
        keys = {each.partition("=")[0] for each in found[-1]} if found else set()
        # One alternative may go over several lines; the next one says a key anew.
        if settings and before == number - 1 and settings[0].partition("=")[0] not in keys:
            found[-1] += settings
        elif settings:
            found.append(settings)
        before = number if settings else before
    return [tuple(group) for group in found]


COMMENTED = [(name, group) for name, text in builtin_recipes().items() for group in alternatives(text)]


def local(setting: str, group: tuple[str, ...], files: Path, pretrained: str) -> str:
    """Put small files in place of what a setting names and this machine need not have."""
    key, _, value = setting.partition("=")
    fixed = {"model.path": pretrained, "algorithm.verifier": str(files / "verifier")}
    if key in fixed:
        return f"{key}={fixed[key]}"
    if key.startswith("team.agents"):
        return setting.replace(value.split("model: ")[1].split(",")[0], pretrained)
    if not key.endswith("path"):
        return setting
    kind = next((each.partition("=")[2] for each in group if each.startswith("environment.name=")), None)
    place = {"preferences": "pairs", "trajectories": "played", "openai/gsm8k": "gsm8k"}
    if "environment.question_field=null" in group:
        return f"{key}={files / 'talks'}"
    if value == "FILE":
        return f"{key}={files / ('open.jsonl' if kind == 'math' else 'nli.jsonl')}"
    return f"{key}={files / place.get(kind or value, 'gsm8k')}"


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "group"), COMMENTED, ids=lambda each: str(each)[:60])
def test_what_a_comment_names_works_when_it_is_copied(
    name: str, group: tuple[str, ...], pretrained: str, files: Path
) -> None:
    for number, (_, found) in enumerate(load_stages(name, (), group) or [("", load_recipe(name, (), group))]):
        dumped = found.config.model_dump(mode="json")
        for key in (each.partition("=")[0].removeprefix(f"stages.{number}.") for each in group):
            if key.startswith("stages."):  # another stage's
                continue
            at = key.replace(".ben.", ".1.")
            assert found.origin.get(at, found.origin.get(f"{at}.model")) == "command line", key
            assert key.split(".")[0] in dumped
    if name in HUB_DATA:
        return
    here = [local(each, group, files, pretrained) for each in group]
    own = data_of(name, kind_of(name, *group, real=False), files, files)
    if any(each.startswith("environment.path=") for each in here):
        own = []
    said = call("validate", name, f"model.path={pretrained}", *own, *here)
    assert said.code == 0, said.err
