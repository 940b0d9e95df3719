"""Programming problems in the forms that data sets publish them in: MBPP, HumanEval, standard input and output.

A problem says what a solver may read, which of its tests that shows, and how a program is graded. What is not
shown stays in this process or in the tests' own sandbox.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kapelle.environments.data.source import Row, field_of, question_in
from kapelle.errors import DataError
from kapelle.grading.code.grade import (
    CallTest,
    CodeGrade,
    OutputTest,
    grade_calls,
    grade_output,
    grade_program,
)
from kapelle.grading.code.programs import tree_of
from kapelle.grading.code.tasks import humaneval_task, mbpp_task
from kapelle.sandbox.contract import Backend, Limits
from kapelle.types import Json, Split

Format = Literal["mbpp", "humaneval", "stdio"]
"""`mbpp`: rows of MBPP (2108.07732), sanitized or not. `humaneval`: rows of HumanEval (2107.03374). `stdio`:
programs that read and print, and functions in the form of APPS, see `stdio_problem`."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem."""

    prompt: str
    """What a solver reads."""
    shown: tuple[str, ...]
    """The first tests of a grade, as the prompt shows them; the others are never shown."""
    grade: Callable[[str, Backend, Limits], CodeGrade]
    """Runs a program against all tests and blocks meanwhile; SandboxError when there is no sandbox."""
    solution: str | None
    """A program that is right, where the data have one."""


def mbpp_problem(row: Row) -> Problem:
    """Return the problem of a row of MBPP: its first assert is shown."""
    task = mbpp_task(row.fields)
    return Problem(
        task.prompt,
        (task.tests.programs[0].strip(),),
        lambda program, sandbox, limits: grade_program(program, task.tests, sandbox, limits),
        task.solution,
    )


def humaneval_problem(row: Row) -> Problem:
    """Return the problem of a row of HumanEval: nothing is shown but the docstring's own examples.

    A program may define the function or go on where the prompt ends; the prompt's imports and helpers are
    its own either way. The `check` function is one test: there is no partial credit.
    """
    task = humaneval_task(row.fields)
    begun = task.prompt.rstrip("\n") + "\n"

    def grade(program: str, sandbox: Backend, limits: Limits) -> CodeGrade:
        first, rest = _futures_first(program)
        return grade_program(first + begun + rest, task.tests, sandbox, limits)

    return Problem(task.prompt, (), grade, task.solution.removeprefix(task.prompt))


def _futures_first(program: str) -> tuple[str, str]:
    """Return the `from __future__ import …` lines of a whole program and the program without them: they must stand before the prompt."""
    try:
        body = tree_of(program).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "", program  # a body that goes on where the prompt ends
    lines = program.split("\n")
    futures = [node for node in body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    for node in futures:
        for place in range(node.lineno - 1, node.end_lineno or node.lineno):
            lines[place] = ""
    return "".join(f"{ast.unparse(node)}\n" for node in futures), "\n".join(lines)


def stdio_problem(row: Row, question: str, tests: str = "input_output") -> Problem:
    """Return a problem whose program reads standard input and prints; its text stands in the field `question`.

    Tests stand in `public_tests`, `private_tests` and `generated_tests` (CodeContests:
    `{"input": […], "output": […]}`, or a list of `{"input": …, "output": …}`) or as `input_output` (APPS:
    `{"inputs": […], "outputs": […]}`, also as JSON text) in the field `tests`, which are private. `solution`, or the first of
    `solutions` (CodeContests: in Python 3), is a program that is right. Public tests are shown. `tolerance` is that of
    printed reals. With `fn_name` beside the inputs (APPS) each is a list of arguments of that function.
    """
    called = _function(row, tests)
    if called is not None:
        return _function_problem(row, question, *called)
    tolerance = float(row.text("tolerance", "path")) if "tolerance" in row.fields else 1e-6
    public = _tests(row, "public_tests", tolerance)
    hidden = ("private_tests", "generated_tests", tests)
    private = tuple(test for field in hidden for test in _tests(row, field, tolerance))
    every = public + private
    if not every:
        raise DataError(f"{row.place} has no test. Give it `public_tests`, `private_tests` or `{tests}`.")
    shown = tuple(f"Input:\n{test.stdin.rstrip()}\nOutput:\n{test.stdout.rstrip()}" for test in public)
    return Problem(
        "\n\n".join([question_in(row, question, "question_field").strip(), *shown]),
        shown,
        lambda program, sandbox, limits: grade_output(program, every, sandbox, limits),
        _solution(row),
    )


def _tests(row: Row, field: str, tolerance: float) -> tuple[OutputTest, ...]:
    value = _parsed(row, field)
    if value is None:
        return ()
    if isinstance(value, Mapping):
        inputs, outputs = (value.get(name, value.get(f"{name}s")) for name in ("input", "output"))
    elif isinstance(value, Sequence) and all(isinstance(test, Mapping) for test in value):
        inputs, outputs = ([test.get(name) for test in value] for name in ("input", "output"))
    else:
        inputs = outputs = None
    if not (_texts(inputs) and _texts(outputs) and len(inputs) == len(outputs)):
        raise DataError(
            f"{row.place}: `{field}` is not as many texts of `input` as of `output`. Fix or drop the row."
        )
    return tuple(OutputTest(read, printed, tolerance) for read, printed in zip(inputs, outputs, strict=True))


def _texts(value: Json) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)


def _parsed(row: Row, field: str) -> Json:
    value = row.fields.get(field)
    if "." in field and field not in row.fields and field.partition(".")[0] in row.fields:
        value = field_of(row, field, "tests_field")
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{row.place}: `{field}` is text and not JSON: {error}. Fix or drop the row."
        ) from None


def _function(row: Row, tests: str) -> tuple[str, tuple[CallTest, ...]] | None:
    """Return the function that a row in the form of APPS asks for, and its calls; None for whole programs."""
    value = _parsed(row, tests)
    if not isinstance(value, Mapping) or value.get("fn_name") is None:
        return None
    name: Any = value.get("fn_name")
    inputs, outputs = (_lists(value.get(field)) for field in ("inputs", "outputs"))
    named = isinstance(name, str) and name.isidentifier()
    if not (named and all(isinstance(each, list) for each in inputs) and len(inputs) == len(outputs) > 0):
        raise DataError(
            f"{row.place}: `{tests}` asks for the function {name!r} without as many lists of arguments in `inputs` as results "
            "in `outputs`. Fix or drop the row."
        )
    calls = (
        CallTest(name, tuple(arguments), expected, tolerance=1e-6, one_of_one=True)
        for arguments, expected in zip(inputs, outputs, strict=True)
    )
    return name, tuple(calls)


def _lists(value: Json) -> list[Any]:
    return value if isinstance(value, list) else []


def _function_problem(row: Row, question: str, name: str, calls: tuple[CallTest, ...]) -> Problem:
    # LeetCode's form: the function is a method of a class without arguments.
    method = (
        f"\n\nif {name!r} not in globals() and 'Solution' in globals():\n    {name} = Solution().{name}\n"
    )

    def grade(program: str, sandbox: Backend, limits: Limits) -> CodeGrade:
        return grade_calls(program + method, calls, sandbox, limits)

    asked = question_in(row, question, "question_field").strip()
    begun = row.text("starter_code", "path").strip() if row.fields.get("starter_code") else ""
    told = f"Define the function `{name}`." + (f" Begin with:\n{begun}" if begun else "")
    return Problem(f"{asked}\n\n{told}", (), grade, _solution(row))


PYTHON_3 = 3
"""CodeContests' number of the language."""


def _solution(row: Row) -> str | None:
    if "solution" in row.fields:
        return row.text("solution", "path")
    several = _parsed(row, "solutions")
    if isinstance(several, Mapping):
        written = zip(_lists(several.get("language")), _lists(several.get("solution")), strict=False)
        several = [text for language, text in written if language == PYTHON_3]
    return several[0] if _texts(several) and several else None


FORMATS: Mapping[Format, Callable[[Row, str, str], Problem]] = {
    "mbpp": lambda row, _question, _tests: mbpp_problem(row),
    "humaneval": lambda row, _question, _tests: humaneval_problem(row),
    "stdio": stdio_problem,
}
"""How a row is read, given the fields of its text and its private tests where the format leaves them open."""
MBPP_SPLITS: Mapping[Split, range] = {"train": range(601, 975), "test": range(11, 511)}
"""The `task_id`s of MBPP's published splits; 1 to 10 are for prompts, 511 to 600 for validation."""
