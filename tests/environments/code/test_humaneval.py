"""All of HumanEval through the environment; `pytest -m sandbox_full` with `humaneval/HumanEval.jsonl.gz` under $KAPELLE_DATA."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.workflows.stage import team_of

from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environments.code import Code
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.types import Split
from kapelle.workflows.solo import Solo

pytestmark = [pytest.mark.data, pytest.mark.sandbox_full]
SPLITS: tuple[Split, ...] = ("train", "test")


@pytest.fixture(scope="module")
def file(data_folder: Path) -> Path:
    """HumanEval as published; skips where it is missing."""
    file = data_folder / "humaneval" / "HumanEval.jsonl.gz"
    if not file.is_file():
        pytest.skip(f"the folder {file.parent} holds no HumanEval.jsonl.gz")
    return file


@pytest.fixture(scope="module")
def rows(file: Path) -> list[dict[str, Any]]:
    """Its rows."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


async def scores_of(file: Path, answers: Mapping[str, str]) -> dict[str, float | None]:
    """Return the success of each answer by prompt; None for a failed episode."""
    environment = Code(
        format="humaneval", path=str(file), config=None, wall_s=60.0, parallel=2, untrusted_tests="allow"
    )
    tasks = [environment.task(split, k) for split in SPLITS for k in range(environment.size(split) or 0)]
    engine = ScriptedEngine({"coder": lambda request: f"```python\n{answers[request.task.question]}\n```"})
    stage = RolloutSetup(team_of("coder"), environment, Solo(), engine)
    return {
        group.task.question: group.episodes[0].success for group in await rollout(stage, tasks, 1, seed=0)
    }


async def test_all_164_solutions_pass(sandbox: Bubblewrap, file: Path, rows: list[dict[str, Any]]) -> None:
    scores = await scores_of(file, {row["prompt"]: row["canonical_solution"] for row in rows})
    assert len(scores) == len(rows) == 164
    assert [prompt for prompt, score in scores.items() if score != 1.0] == []


def test_four_of_164_problems_have_tests_that_a_program_could_fool(file: Path) -> None:
    environment = Code(format="humaneval", path=str(file), config=None)
    assert sum(environment.size(split) or 0 for split in SPLITS) == 160
    assert sum(map(environment.untrusted_count, SPLITS)) == 4


def wrong(row: Mapping[str, Any], other: Mapping[str, Any], what: str) -> str:
    """Return an incorrect program: empty, constant, or the solution of another row."""
    arguments = f"def {row['entry_point']}(*args, **kwargs):\n    return"
    programs: dict[str, str] = {
        "empty": "",
        "pass": "    pass",
        "none": "    return None",
        "zero": f"{arguments} 0",
        "true": f"{arguments} True",
        "text": f"{arguments} ''",
        "list": f"{arguments} []",
        "first argument": f"{arguments} args[0]",
        "another's body": other["canonical_solution"],
        "another's function": f"{other['prompt']}{other['canonical_solution']}\n{row['entry_point']} = {other['entry_point']}",
    }
    return programs[what]


def passes(row: Mapping[str, Any], program: str) -> bool:
    """Return whether the published tests pass beside the program, in one interpreter."""
    text = f"{row['prompt']}{program}\n{row['test']}\ncheck({row['entry_point']})\n"
    command = [sys.executable, "-I", "-c", text]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    "what",
    [
        "empty", "pass", "none", "zero", "true", "text", "list", "first argument", "another's body", "another's function",
    ],
)  # fmt: skip
async def test_incorrect_programs_pass_exactly_where_the_published_tests_pass(
    sandbox: Bubblewrap, file: Path, rows: list[dict[str, Any]], what: str
) -> None:
    others = [*rows[1:], rows[0]]
    answers = {row["prompt"]: wrong(row, other, what) for row, other in zip(rows, others, strict=True)}
    with ThreadPoolExecutor(2) as threads:
        published = list(threads.map(lambda row: passes(row, answers[row["prompt"]]), rows))
    scores = await scores_of(file, answers)
    assert {row["prompt"]: float(passed) for row, passed in zip(rows, published, strict=True)} == scores
