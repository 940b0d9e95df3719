"""Run directories that a viewer is tested on: small, written by the writer of real ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tests.support.episode_lines import change_rows

from kapelle.runs.writer import RunDirectory
from kapelle.services.binding import Binding
from kapelle.services.http import HttpServer
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
        turn("solver", 0, first, new_messages=(Message("user", task.question),)),
        turn("critic", 1, second, new_messages=(Message("user", first, "solver"),)),
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
        "completed_before": index,
        "prompt_ids": (3, 4, 5),
        "completion_ids": ids,
        "logprobs": tuple(-0.1 * (k % 7) for k in range(len(ids))),
        "finish_reason": "stop",
        "text": text,
    }
    return Turn(**{**values, **fields})


STANDING: dict[str, Any] = {
    "step": 4,
    "member": "self@4",
    "members": [
        {"name": "solver", "kind": "player", "step": 0},
        {"name": "self@0", "kind": "past", "step": 0},
        {"name": "self@4", "kind": "past", "step": 4},
    ],
    "ratings": {"self@0": [0, -50.5, 50], "self@4": [120.4, 60, 181]},
    "payoffs": None,
    "results": [["self@4", "self@0", 6, 2, 2], ["self@4", "self@now", 0, 0, 0]],
    "strategy": {"solver": {"solver": 0.25, "self@0": 0.75}, "critic": {"solver": 0.25, "self@0": 0.75}},
}
"""What a run with a league writes when its second member enters."""


def write_league_run(path: Path, *entries: Mapping[str, Any], steps: int = 4) -> Path:
    """Write a run whose critic is played by `self@0` in one of two tasks, with a league's numbers and these entries."""
    run = write_run(path, steps=steps)
    with (run / "config.yaml").open("a") as file:
        file.write("league: {population: pfsp, members: {solver: nash}}\n")
    _change(run / "metrics.jsonl", _with_league)
    change_rows(run / "episodes" / "train", lambda _, row: _against_the_first(row))
    for entry in entries:
        put_standing(run, entry["member"], json.dumps(entry).encode())
    return run


def put_standing(run: Path, name: str, content: bytes) -> None:
    """Write the file of an entry."""
    folder = run / "league" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "standing.json").write_bytes(content)


def _change(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    rows = [json.loads(line) for line in file.read_bytes().splitlines()]
    for row in rows:
        change(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _with_league(row: dict[str, Any]) -> None:
    row |= {"league/points/self@0": 0.5 + row["step"] / 100, "league/members": 2.0}
    if row["step"] % 4 == 0:
        row |= {"league/rating": 120.4, "league/rating_low": 60.0, "league/rating_high": 181.0}
        row |= {"league/nash_conv": 0.5, "league/nash_conv_mixture": 0.25}


def _against_the_first(row: dict[str, Any]) -> None:
    row["rewards"] = {"solver": 1.0, "critic": -1.0}
    if row["group"] == 0:
        row["task"]["cast"] = {"critic": {"policy": "league:0:player", "player": "self@0"}}
        for turn in row["turns"]:
            turn["trained"] = turn["agent"] != "critic"


@contextmanager
def client_of(folder: Path) -> Iterator[httpx.Client]:
    """Yield a client of a viewer of the runs in a folder."""
    from kapelle.viewer.library import Library
    from kapelle.viewer.server import viewer

    with (
        HttpServer(Binding(), viewer(Library([folder]), Binding())) as server,
        httpx.Client(base_url=server.url, timeout=120.0) as client,
    ):
        yield client
