"""Every kind of run, on the CPU and on the twin of a GPU: the same episodes, and metrics up to rounding."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.faults.data import write_data
from tests.faults.recipes import SANDBOXED, write_recipes

from kapelle.cli import main
from kapelle.models.fast import fused
from kapelle.runs.reader import read_metrics
from kapelle.runs.step_rows import lines_of, stored_steps
from kapelle.runtime.randomness import capture_random, restore_random
from kapelle.setup.recipe import builtin_recipes

KINDS = sorted(set(builtin_recipes()) - SANDBOXED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_data(folder / "data")
    for kind in write_recipes(folder / "recipes", folder / "data", folder / "ended"):
        tree = yaml.safe_load(kind.recipe.read_text("utf-8"))
        for part in tree.get("stages", [tree]):
            # Adam divides a gradient of 1e-9 by itself, and so makes rounding a step of full length.
            part["optimizer"].update(lr=1e-3, eps=1e-2)
            algorithm = part["algorithm"]
            if "fit" in algorithm:
                algorithm["fit"]["lr"] = 1e-4
            if algorithm["name"] == "cory":  # it is paid a KL of rounding alone
                algorithm["base"]["gae"]["normalise"] = "none"
        kind.recipe.write_text(yaml.safe_dump(tree), "utf-8")
    return folder


def trained(folder: Path, kind: str, device: str) -> tuple[list[dict[str, Any]], list[Any]]:
    """Train, and return the rows of metrics and what was said in the episodes."""
    run = folder / f"{kind}-{device}"
    recipe = str(folder / "recipes" / f"{kind}.yaml")
    torch.manual_seed(0)
    assert main(["train", recipe, "--run-dir", str(run), "--no-rich", f"model.device={device}"]) == 0
    stages = sorted(path.parent for path in run.glob("*/config.yaml")) or [run]
    rows = [row for stage in stages for row in read_metrics(stage)]
    said = [
        [turn["completion_ids"] for turn in json.loads(line)["turns"]]
        for stage in stages
        for part in sorted(stage.glob("episodes/*"))
        for stored in stored_steps(part).values()
        for line in lines_of(stored)
    ]
    return rows, said


@pytest.mark.sample(8)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_on_a_gpu_is_that_on_a_cpu(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAPELLE_CACHE", str(folder / "cache"))
    (here, said_here), (there, said_there) = (trained(folder, kind, d) for d in ("cpu", "cuda"))
    assert said_here == said_there
    assert len(here) == len(there) > 0
    for one, other in zip(here, there, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {name for name in one if name.startswith(("time/", "memory/"))}:
            # Of returns that hardly vary, a critic explains a ratio of roundings.
            least = 1e-2 if name.startswith("explained_variance") else 1e-3
            assert other[name] == pytest.approx(one[name], rel=1e-2, abs=least), name


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["demo", "maverl_debate_qmix", "mrlm_ppo", "self_play_games"])
def test_half_precision_trains_and_keeps_parity(
    kind: str, dtype: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAPELLE_CACHE", str(folder / "cache"))
    monkeypatch.setattr(fused, "LARGEST", 0)  # the pass of real models
    recipe, run = folder / "recipes" / f"{kind}.yaml", folder / f"{kind}-{dtype}"
    words = ["model.device=cuda", f"model.dtype={dtype}", "--run-dir", str(run), "--no-rich"]
    assert main(["train", str(recipe), *words]) == 0
    rows = read_metrics(run)
    assert rows
    assert all(math.isfinite(value) for row in rows for name, value in row.items() if "loss" in name)


def test_generators_of_more_gpus_than_there_are_are_excluded() -> None:
    state = capture_random()
    found: Any = state["cuda"]
    restore_random({**state, "cuda": [*found, *found]})
    restore_random({**state, "cuda": []})
