"""A policy whose answers are costly to grade earns nothing and stops no run; a grader that is broken by itself does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.support.tiny import sections

from kapelle.environments import math as math_environment
from kapelle.environments.code import Code, CodeState
from kapelle.environments.grading.processes import AnswerLimits, KillableProcesses
from kapelle.environments.grading.verdict import Grade
from kapelle.environments.math import Math
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.runs.reader import read_episodes, read_metrics
from kapelle.training.trainer import Trainer
from kapelle.types import Json, Task

FORMULAS = (
    r"\tan(\tan(\tan(\tan(\tan 5))))",  # the one that gets as far as math-verify
    "9^{9^{9^{9^9}}}",
    "99999999999!",
    r"\binom{10^{9}}{5\cdot 10^{8}}",
    "(" * 190 + "1" + ")" * 190,
    r"\sqrt{" * 55 + "2" + "}" * 55,
    r"\{" + ",".join(map(str, range(100))) + r"\}",
    "(x+y+z+1)^{500}",
    r"\frac{1}{" * 35 + "3" + "}" * 35,
    "9" * 3999,
    "7^{" * 90 + "7" + "}" * 90,
    "1" + "+1" * 190,
)
PROGRAMS = (
    "while True: pass",
    "print(9**9**9)",
    "import time\ntime.sleep(60)",
    "x = [0]\nwhile True: x = x + x",
    "while True: print('x' * 9999)",
    "(" * 5000 + "1" + ")" * 5000,
)

COSTLY_MATH: Literal["tests.training.test_costly_answers:CostlyMath"] = (
    "tests.training.test_costly_answers:CostlyMath"
)
COSTLY_CODE: Literal["tests.training.test_costly_answers:CostlyCode"] = (
    "tests.training.test_costly_answers:CostlyCode"
)


class Forced:
    """Says one thing after the other, whatever an untrained model said."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.said = texts, 0

    def __call__(self) -> str:
        self.said += 1
        return self.texts[self.said % len(self.texts)]


FORMULA, PROGRAM = Forced(*FORMULAS), Forced(*PROGRAMS)


class CostlyMath(Math):
    """Every answer is a costly formula."""

    name: Literal["tests.training.test_costly_answers:CostlyMath"] = COSTLY_MATH  # type: ignore[assignment]

    async def grade(self, text: str, answer: str) -> Grade:
        return await super().grade(rf"\boxed{{{FORMULA()}}}", answer)


class CostlyCode(Code):
    """Every answer is a costly program."""

    name: Literal["tests.training.test_costly_answers:CostlyCode"] = COSTLY_CODE  # type: ignore[assignment]

    def start(self, task: Task, agents: Sequence[str], seed: int) -> CodeState:
        world: Any = super().start(task, agents, seed)
        step = world.step
        world.step = lambda actions, final=None: step(dict.fromkeys(actions, f"```python\n{PROGRAM()}\n```"))
        return world  # type: ignore[no-any-return]


def run_of(folder: Path, environment: dict[str, Any], rows: list[dict[str, Any]], **training: int) -> Trainer:
    """A run on these rows, of one agent that answers once."""
    for name, row in zip(("train", "test"), rows, strict=True):
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    settings = sections(
        environment={"path": str(folder), "config": None, **environment},
        workflow={"name": "solo"},
        team={"agents": 1, "lora": {"rank": 2, "alpha": 4.0}, "sampling": {"max_tokens": 2}},
        training={"steps": 2, "tasks_per_step": 1, **training},
    )
    return Trainer(**settings, run_dir=folder / "run")


def questions(gold: str) -> list[dict[str, Any]]:
    return [{"question": text, "answer": gold} for text in ("How many?", "How much?")]


def earns_nothing(trainer: Trainer, run: Path, steps: int) -> None:
    """Train to the end, with a reward of 0 for every episode and none that failed."""
    with trainer:
        assert trainer.train().steps == steps
    episodes = [e for step in range(1, steps + 1) for e in read_episodes(run, step)]
    assert [(e.error, e.success, set(e.rewards.values())) for e in episodes] == [(None, 0.0, {0.0})] * len(
        episodes
    )
    assert [row["failed_episodes"] for row in read_metrics(run)] == [0.0] * steps


class Library:
    """In the place of math-verify, whose start takes seconds: never done with tangents of tangents. Really killed."""

    def __init__(self, processes: KillableProcesses) -> None:
        self.processes, self.killed = processes, 0

    def ask(self, question: Json) -> Json:
        if r"\tan(" not in question["answer"]:
            return self.processes.ask({"do": "echo", "value": question["answer"] == question["gold"]})
        self.killed += 1
        return self.processes.ask({"do": "loop"})


def test_formulas_that_no_grader_can_afford_stop_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = FORMULA.said
    with KillableProcesses(
        "tests.environments.grading.misbehaving_worker", 1, AnswerLimits(cpu_s=0.05)
    ) as processes:
        library = Library(processes)
        monkeypatch.setattr(math_environment, "shared_math_processes", lambda: library)
        made = run_of(tmp_path, {"name": COSTLY_MATH}, questions(r"\tan 5"), steps=4)
        earns_nothing(made, tmp_path / "run", 4)
    assert FORMULA.said - before >= len(FORMULAS)
    assert library.killed


@pytest.mark.slow
def test_programs_that_no_grader_can_afford_stop_no_run(sandbox: Bubblewrap, tmp_path: Path) -> None:
    rows = [
        {"question": text, "private_tests": {"input": [""], "output": ["5"]}} for text in ("Print 5.", "5?")
    ]
    settings = {
        "name": COSTLY_CODE,
        "format": "stdio",
        "cpu_s": 0.1,
        "wall_s": 0.3,
    }
    before = PROGRAM.said
    earns_nothing(run_of(tmp_path, settings, rows), tmp_path / "run", 2)
    assert PROGRAM.said - before >= len(PROGRAMS)
