"""Rows in the forms of APPS, CodeContests and LiveCodeBench, and the limit on output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.environments.code.test_environment import SUM, fenced, folder
from tests.workflows.stage import expert, lines, play

from kapelle.environments.code import Code
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.errors import DataError
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


HEADED = """class Solution:
    def order(self, words: List[str]) -> Dict[int, List[str]]:
        @cache
        def size(word: str) -> Optional[int]:
            return len(word)
        found = defaultdict(list)
        heap = [(size(word), word) for word in words]
        heapify(heap)
        while heap:
            length, word = heapq.heappop(heap)
            found[length].append(word)
        assert bisect.bisect_left([1, 2], 2) == bisect_left([1, 2], 2) == 1
        assert pow(2, 5, 7) == 4 and gcd(4, 6) == 2 and inf == math.inf and abs(-1) == 1
        return found
"""


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n\n"])
async def test_a_class_solution_has_the_usual_imports(
    sandbox: Bubblewrap, tmp_path: Path, future: str
) -> None:
    asked = {
        "fn_name": "order",
        "inputs": [[["bb", "a", "cc"]]],
        "outputs": [{"1": ["a"], "2": ["bb", "cc"]}],
    }
    row = {
        "question": "Sort.",
        "input_output": json.dumps(asked),
        "starter_code": HEADED.split("        @", maxsplit=1)[0],
    }
    environment = Code(path=folder(tmp_path, row, {**row, "question": "other"}), format="stdio")
    scripts = {"coder": lines(fenced(future + HEADED))}
    [episode] = await play(environment, Solo(), ["coder"], scripts, environment.task("train", 0))
    assert episode.rewards == {"coder": 1.0}


LIVE: dict[str, Any] = {
    "question_content": "Count the pairs below a limit.",
    "starter_code": "class Solution:\n    def pairs(self, nums: List[int], limit: int) -> int:\n        ",
    "public_test_cases": json.dumps([{"input": "[1, 2, 3]\n4", "output": "1", "testtype": "functional"}]),
    "private_test_cases": json.dumps(
        [
            {"input": "[1, 1, 1]\n9", "output": "3", "testtype": "functional"},
            {"input": "[]\n9\n", "output": "0", "testtype": "functional"},
        ]
    ),
    "metadata": json.dumps({"func_name": "pairs"}),
}
PAIRS = "class Solution:\n    def pairs(self, nums: List[int], limit: int) -> int:\n        return sum(a + b < limit for a, b in combinations(nums, 2))"


async def test_functional_rows_of_live_code_bench_are_calls(sandbox: Bubblewrap, tmp_path: Path) -> None:
    path = folder(tmp_path, LIVE, {**LIVE, "question_content": "other"})
    environment = Code(path=path, format="stdio", question_field="question_content", partial_credit=True)
    task = environment.task("train", 0)
    assert "Input:\n[1, 2, 3]\n4\nOutput:\n1" in task.question
    assert "Define the function `pairs`. Begin with:\nclass Solution:" in task.question
    assert "[1, 1, 1]" not in task.question
    scripts = {
        "right": lines(fenced(PAIRS)),
        "function": lines(
            fenced(
                PAIRS.replace("class Solution:\n    ", "").replace("self, ", "").replace("        ", "    ")
            )
        ),
        "one": lines(fenced(PAIRS.replace("sum(", "1 or sum("))),
        "prints": lines(fenced("print(1)")),
    }
    [episode] = await play(environment, Parallel(), list(scripts), scripts, task)
    assert episode.rewards == {"right": 1.0, "function": 1.0, "one": pytest.approx(1 / 3), "prints": 0.0}


async def test_other_rows_of_live_code_bench_read_and_print(sandbox: Bubblewrap, tmp_path: Path) -> None:
    tests = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
    row = {
        "question_content": "Add.",
        "public_test_cases": json.dumps(tests),
        "private_test_cases": tests,
        "metadata": "{}",
    }
    path = folder(tmp_path, row, {**row, "question_content": "other"})
    environment = Code(path=path, format="stdio", question_field="question_content")
    scripts = {"coder": lines(fenced(SUM["solution"]))}
    [episode] = await play(environment, Solo(), ["coder"], scripts, environment.task("train", 0))
    assert episode.rewards == {"coder": 1.0}
    assert episode.info["tests"] == {"coder": ["passed", "passed"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"private_test_cases": "eJxrYJ"}, "pickle"),
        ({"metadata": "{}"}, "func_name"),
        ({"public_test_cases": [{"input": "[1", "output": "1", "testtype": "functional"}]}, "JSON arguments"),
        (
            {"public_test_cases": [{"input": "1", "output": "1", "testtype": "stdin"}]},
            "tests of a whole program",
        ),
    ],
)
def test_an_unusable_row_of_live_code_bench_is_an_error(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = folder(tmp_path, {**LIVE, **change}, {**LIVE, "question_content": "other"})
    environment = Code(path=path, format="stdio", question_field="question_content")
    with pytest.raises(DataError, match=f"train.jsonl, line 1.*{message}"):
        environment.check(["coder"])


async def test_a_row_of_code_contests_with_all_of_its_tests(sandbox: Bubblewrap, tmp_path: Path) -> None:
    path = folder(tmp_path, CONTEST, {**CONTEST, "description": "other"})
    environment = Code(path=path, format="stdio", question_field="description", partial_credit=True)
    scripts = {"a": expert(environment), "b": lines(fenced("print(3)"))}
    [episode] = await play(environment, Parallel(), ["a", "b"], scripts, environment.task("train", 0))
    assert episode.rewards == {"a": 1.0, "b": pytest.approx(1 / 3)}


async def test_the_limit_on_output_excludes_what_is_expected(sandbox: Bubblewrap, tmp_path: Path) -> None:
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
