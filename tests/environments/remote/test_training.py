"""A run on a server is bitwise identical to a local run: metrics, episodes and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("websockets")

from tests.support.resumed import trained
from tests.support.tiny import SIZE, sections

from kapelle.environment import environment_class
from kapelle.environments.sandbox.pool import backend, require
from kapelle.errors import SandboxError
from kapelle.runs.reader import read_evaluations, read_metrics
from kapelle.services.binding import Binding
from kapelle.services.environments.service import serve_environments

PROBLEM = {
    "task_id": 0,
    "text": "Write a function that doubles a number.",
    "code": "def double(n):\n    return 2 * n",
    "test_list": ["assert double(2) == 4", "assert double(0) == 0"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
RUNS: dict[str, tuple[dict[str, Any], str, int]] = {
    "simultaneous moves": ({"name": "matrix", "game": "prisoners_dilemma", "rounds": 2}, "play", 2),
    "a debate with private sides": ({"name": "debate_topics", "sides": ["A", "B"]}, "parallel", 2),
    "a game in turns": ({"name": "openspiel", "game": "kuhn_poker"}, "play", 2),
    "arithmetic": ({"name": "arithmetic", "digits": 1}, "chain", 2),
    "the sandbox": ({"name": "code"}, "parallel", 1),
}
"""Environment, workflow and number of agents."""


def results(run: Path) -> dict[str, Any]:
    """Return all files of a run without times and its configuration."""
    timeless = [
        [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]
        for rows in (read_metrics(run), read_evaluations(run))
    ]
    files = {
        str(path.relative_to(run)): path.read_bytes()
        for folder, ending in (("episodes", ".jsonl.zst"), ("checkpoints", "adapter_model.safetensors"))
        for path in sorted((run / folder).rglob(f"*{ending}"))
    }
    assert any("episodes" in name for name in files)
    assert any("checkpoints" in name for name in files)
    return {"rows": timeless, **files}


@pytest.mark.sample(5)
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_server_equals_a_local_run(name: str, tmp_path: Path) -> None:
    settings, workflow, agents = RUNS[name]
    if settings["name"] == "openspiel":
        pytest.importorskip("pyspiel")
    if settings["name"] == "code":
        try:
            require(backend("bubblewrap"))
        except SandboxError as error:
            pytest.skip(f"no sandbox here: {error}")
        data = tmp_path / "mbpp.jsonl"
        data.write_text("".join(f"{json.dumps({**PROBLEM, 'task_id': k})}\n" for k in range(20)))
        settings = {**settings, "path": str(data), "published_split": False, "max_attempts": 2}
    environment = environment_class(settings["name"])(**settings)
    team = {"agents": agents, "lora": {"rank": 2, "alpha": 4.0}, "sampling": {"max_tokens": 4}}
    common = {
        "workflow": {"name": workflow},
        "team": team,
        "algorithm": {"name": "grpo", "group_size": 3, "team_reward": "individual"},
        "training": {"steps": 2, "tasks_per_step": 2},
        "model": {"embedded": {**SIZE, "context": 1024}},
    }
    here = trained(sections(environment=settings, **common), tmp_path / "here")
    with serve_environments({"it": environment}, Binding()) as server:
        remote = {"name": "remote", "address": server.address, "serves": "it"}
        there = trained(sections(environment=remote, **common), tmp_path / "there")
        assert len(server.host.sessions) == 0
    assert results(there) == results(here)
