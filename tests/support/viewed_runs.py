"""Run directories that a viewer is tested on: small, written by the writer of real ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kapelle.runs.writer import RunDirectory
from kapelle.types import Episode, Group, Message, Task, Turn

AGENTS = ("solver", "critic")
CONFIG = """\
name: {name}
description: two agents
seed: {seed}
algorithm: {{name: {algorithm}}}
environment: {{name: arithmetic}}
workflow: {{name: chain}}
training: {{steps: 20}}
optimizer: {{lr: {lr}}}
team: {{sharing: lora, agents: [{{name: solver}}, {{name: critic}}]}}
"""


def write_run(path: Path, steps: int = 8, *, ends: bool = True, **settings: Any) -> Path:
    """Write a run of so many steps, with two groups of two episodes in each."""
    values = {"name": "pair", "seed": 0, "algorithm": "grpo", "lr": 0.001, **settings}
    origin = {"name": "pair", "seed": "default", "optimizer.lr": "command line"}
    with RunDirectory.create(path, config=CONFIG.format(**values), provenance=origin, resume=False) as run:
        run.rewind({})
        for step in range(1, steps + 1):
            append_step(run, step, int(values["seed"]))
        run.record_evaluation(
            steps, {"problems": 100, "success": 0.75, "interval": [0.65, 0.83], "reward": {"solver": 0.75}}
        )
        run.report("done" if ends else "training", steps, "finished" if ends else "running")
    return path


def append_step(run: RunDirectory, step: int, seed: int = 0) -> None:
    """Append the metrics and episodes of one step."""
    run.record_metrics(step, metrics(step, seed))
    run.record_episodes(step, [group(step, k) for k in range(2)])
    run.report("training", step)


def metrics(step: int, seed: int = 0) -> dict[str, float]:
    """Return a row that rises slowly."""
    row = {"success": 1 - math.exp(-step / 10) + 0.01 * seed, "samples": 4.0, "parity/max": 1e-6}
    for k, agent in enumerate(AGENTS):
        row |= {f"reward/{agent}": step / 20 - k, f"entropy/{agent}": 1 / step, f"tokens/{agent}": 50.0}
    return row | {"time/generate": 0.3, "time/update": 0.2, "time/idle": 0.0, "time/step": 0.5}


def group(step: int, number: int) -> Group:
    """Return a group of two episodes, one right and one wrong."""
    task = Task(f"t{step}-{number}", f"{step}+{number}", {"answer": step + number})
    return Group(task, (episode(task, step, right=True), episode(task, step, right=False)))


def episode(task: Task, step: int, *, right: bool, words: Sequence[str] = ()) -> Episode:
    """Return an episode of two turns; the critic reads what the solver wrote and not the question."""
    first = words[0] if words else f"I carry the {step}"
    second = words[1] if len(words) > 1 else str(task.data.get("answer", 0) if right else 99)
    turns = (
        turn("solver", 0, first, heard=(Message("user", task.question),)),
        turn("critic", 1, second, heard=(Message("user", first, "solver"),)),
    )
    reward = float(right)
    verdict = {"answers": {"critic": second}, "explanations": {"critic": f"{second} is {right}"}}
    return Episode(
        task,
        7 + right,
        AGENTS,
        turns,
        dict.fromkeys(AGENTS, reward),
        reward,
        info={**verdict, "final": second},
    )


def turn(agent: str, index: int, text: str, **fields: Any) -> Turn:
    """Return a turn of one token per character, three of prompt."""
    ids = tuple(ord(c) % 90 + 5 for c in text[:40])
    values: dict[str, Any] = {
        "agent": agent,
        "policy": agent,
        "version": index,
        "weights_hash": "9e595b959c4028c7",
        "index": index,
        "seen": index,
        "prompt_ids": (3, 4, 5),
        "completion_ids": ids,
        "logprobs": tuple(-0.1 * (k % 7) for k in range(len(ids))),
        "finish_reason": "stop",
        "text": text,
    }
    return Turn(**{**values, **fields})
