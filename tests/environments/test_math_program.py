"""Answers by program: only the last line of output counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.environments.test_math import folder

from kapelle.environments.math import Math
from kapelle.environments.sandbox.bubblewrap import Bubblewrap


def block(program: str) -> str:
    return f"Let me see.\n```python\n{program}\n```\n"


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("text", "score", "why"),
    [
        (block("print(1000)\nprint(1200 + 34)"), 1.0, ""),
        (block("print('1,234')"), 1.0, ""),
        ("print(2 * 617)", 1.0, ""),
        (block("print(1234)\nprint()"), 1.0, ""),
        (block("print(1234 / 2)"), 0.0, ""),
        (block("1234"), 0.0, "printed nothing"),
        (block("print(1234)\nraise SystemExit(3)"), 0.0, "failed"),
        (block("print(1234)\nwhile True: pass"), 0.0, "limit of"),
        ("#### 1234", 0.0, "printed nothing"),  # a comment is no answer
        ("", 0.0, "no program"),
    ],
)
async def test_the_last_line_is_the_answer(
    sandbox: Bubblewrap, tmp_path: Path, text: str, score: float, why: str
) -> None:
    environment = Math(path=folder(tmp_path), answer_by="program")
    environment.check(["solver"])
    world = environment.start(environment.task("train", 1), ["solver"], 0)
    await world.step({"solver": text})
    outcome = world.outcome()
    assert outcome.rewards == {"solver": score}
    assert why in outcome.info["explanations"]["solver"]
    await world.close()


async def test_the_script_answers_by_program_too(sandbox: Bubblewrap, tmp_path: Path) -> None:
    environment = Math(path=folder(tmp_path), answer_by="program")
    for index in range(2):
        task = environment.task("train", index)
        world = environment.start(task, ["solver"], 0)
        assert await world.score("solver", environment.script("solver", task, [], 0)) == 1.0


async def test_the_program_cannot_reach_the_gold_answer(sandbox: Bubblewrap, tmp_path: Path) -> None:
    environment = Math(path=folder(tmp_path), answer_by="program")
    world = environment.start(environment.task("train", 1), ["solver"], 0)
    snoop = "import os\nfor root, _, names in os.walk('.'):\n    for n in names:\n        print(open(f'{root}/{n}').read())\nprint(os.environ)"
    assert await world.score("solver", block(snoop)) == 0.0
