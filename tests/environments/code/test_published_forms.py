"""Rows as APPS and CodeContests publish them, and how much a program may print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.environments.code.test_environment import SUM, fenced, folder
from tests.workflows.stage import expert, lines, play

from kapelle.environments.code import Code
from kapelle.sandbox.bubblewrap import Bubblewrap
from kapelle.workflows.parallel import Parallel
from kapelle.workflows.solo import Solo

APPS = {
    "question": "Return the two numbers in order, and their sum.",
    "input_output": json.dumps(
        {"fn_name": "order", "inputs": [[2, 1], [3, 4]], "outputs": [[[1, 2, 3]], [3, 4, 7]]}
    ),
    "starter_code": "class Solution:\n    def order(self, a, b):\n",
}
CONTEST = {
    "description": "Add.",
    "public_tests": {"input": ["1 2"], "output": ["3"]},
    "private_tests": {"input": ["3 4"], "output": ["7"]},
    "generated_tests": {"input": ["5 6"], "output": ["11"]},
    "solutions": {"language": [2, 3], "solution": ["int main() {}", SUM["solution"]]},
}


async def test_a_function_in_the_form_of_apps(sandbox: Bubblewrap, tmp_path: Path) -> None:
    path = folder(tmp_path, APPS, {**APPS, "question": "other"})
    environment = Code(path=path, format="stdio", partial_credit=True)
    task = environment.task("train", 0)
    assert task.question.endswith(
        "Define the function `order`. Begin with:\nclass Solution:\n    def order(self, a, b):"
    )
    scripts = {
        "method": lines(
            fenced("class Solution:\n    def order(self, a, b):\n        return min(a, b), max(a, b), a + b")
        ),
        "function": lines(fenced("def order(a, b): yield from (min(a, b), max(a, b), a + b)")),
        "half": lines(fenced("def order(a, b): return [a, b, a + b]")),
        "exit": lines(fenced("import os\nos._exit(0)")),
    }
    [episode] = await play(environment, Parallel(), list(scripts), scripts, task)
    assert episode.rewards == {"method": 1.0, "function": 1.0, "half": 0.5, "exit": 0.0}


async def test_a_row_of_code_contests_with_all_of_its_tests(sandbox: Bubblewrap, tmp_path: Path) -> None:
    path = folder(tmp_path, CONTEST, {**CONTEST, "description": "other"})
    environment = Code(path=path, format="stdio", question_field="description", partial_credit=True)
    scripts = {"a": expert(environment), "b": lines(fenced("print(3)"))}
    [episode] = await play(environment, Parallel(), ["a", "b"], scripts, environment.task("train", 0))
    assert episode.rewards == {"a": 1.0, "b": pytest.approx(1 / 3)}


async def test_a_program_may_print_what_is_expected_and_beyond_that_as_much_as_the_setting_says(
    sandbox: Bubblewrap, tmp_path: Path
) -> None:
    long = {"question": "Print.", "private_tests": [{"input": "", "output": "x" * 2_000_000}]}
    short = {"question": "other", "private_tests": [{"input": "", "output": "x"}]}
    path = folder(tmp_path, long, short)
    program = "import sys\nprint('y' * 3_000_000, file=sys.stderr)\nprint('x')"
    for output_mb, wanted in ((1, 0.0), (4, 1.0)):
        environment = Code(path=path, format="stdio", output_mb=output_mb)
        for says, split, reward in (
            ("print('x' * 2_000_000)", "train", 1.0),
            (program, "test", wanted),
        ):
            scripts = {"coder": lines(fenced(says))}
            task = environment.task("test" if split == "test" else "train", 0)
            [episode] = await play(environment, Solo(), ["coder"], scripts, task)
            assert episode.rewards == {"coder": reward}
