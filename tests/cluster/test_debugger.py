"""`breakpoint()` in each kind of process of a run on Ray, reached by `ray debug` as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kapelle.cluster.actors import ADDRESS, set_trace
from kapelle.errors import ConfigError

ROOT = Path(__file__).parents[2]
RECIPE = """
model: {embedded: {hidden: 16, layers: 1, heads: 2, kv_heads: 1, intermediate: 32}}
environment: {name: "tests.support.stops_here:StopsHere"}
workflow: {name: debate}
algorithm: {name: grpo, group_size: 2}
team: {agents: 2, lora: {rank: 2}, sampling: {max_tokens: 3}}
training: {steps: 1, tasks_per_step: 2}
evaluation: {before_and_after: false}
ray: {trainer: {cpus: 0.1}, rollout: {cpus: 0.1}, environment: {cpus: 0.1}, rollout_workers: 0}
"""
SESSION = "0\np found\n!found[0] += 1\nc\n"
"""Words at `ray debug`: the first breakpoint, then three commands of pdb."""


@pytest.mark.ranks
@pytest.mark.parametrize(
    "words",
    [[], ["ray.rollout_workers=1"], ["episode.environment_workers=1"]],
    ids=["rank", "rollout worker", "environment worker"],
)
def test_ray_debug_stops_where_the_code_says(words: list[str], tmp_path: Path) -> None:
    recipe, address = tmp_path / "recipe.yaml", tmp_path / "address"
    recipe.write_text(RECIPE)
    environ = {**os.environ, "RAY_DEBUG": "legacy", "KAPELLE_TEST_ADDRESS": str(address)}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    run = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "kapelle",
            "train",
            str(recipe),
            "--run-dir",
            str(tmp_path / "run"),
            "--launch",
            "ray",
            *words,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environ,
        text=True,
    )
    until = time.monotonic() + 200
    while not address.exists():
        assert run.poll() is None, run.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.2)
    out = ""
    while "[42]" not in out:  # the world writes the address just before it stops
        asked = subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", "debug"],
            input=SESSION,
            capture_output=True,
            env=environ | json.loads(address.read_text()),
            text=True,
            timeout=120,
            check=False,
        )
        out = asked.stdout
        assert time.monotonic() < until, out + asked.stderr
    assert "stops_here.py" in out
    _, said = run.communicate(timeout=200)
    assert run.returncode == 0, said


def test_without_debugpy_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_DEBUG", raising=False)
    monkeypatch.setenv(ADDRESS, "127.0.0.1:1")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install debugpy"):
        set_trace()
