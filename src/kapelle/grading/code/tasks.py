"""Problems with their tests.

MBPP (arXiv 2108.07732) and HumanEval (arXiv 2107.03374) in the form of their published rows. The reference solution of a row only
says which names are the candidate's: a solution that defines `set` or `abs` does not redefine what the tests mean by it, unless that is
what the problem asks for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kapelle.errors import DataError
from kapelle.grading.code.grade import ProgramTests
from kapelle.grading.code.programs import tree_of


@dataclass(frozen=True, slots=True)
class CodeTask:
    """One problem: what a solver reads, how its answer is tested, and a solution that is right."""

    id: str
    prompt: str
    tests: ProgramTests
    solution: str


def mbpp_task(row: Mapping[str, Any]) -> CodeTask:
    """Return the problem of one row of MBPP, sanitized or not. Its first assert is shown, all are graded.

    Raises DataError for a row of another form.
    """
    try:
        programs, extra = tuple(row["test_list"]), tuple(row.get("challenge_test_list", ()))
        sanitized = "test_imports" in row
        setup, solution = "\n".join(row["test_imports"]) if sanitized else row["test_setup_code"], row["code"]
        names, classes = _shared_names(solution, (setup, *programs, *extra))
        text = row["prompt" if sanitized else "text"]
        shown = f"{text}\n\nYour code must pass this test:\n{programs[0].strip()}"
        return CodeTask(
            id=f"mbpp-{row['task_id']}",
            prompt=shown,
            tests=ProgramTests(programs + extra, setup, names, classes),
            solution=solution,
        )
    except (KeyError, TypeError, IndexError, SyntaxError) as error:
        raise DataError(f"A row of MBPP has another form than expected: {error!r}.") from None


def humaneval_task(row: Mapping[str, Any]) -> CodeTask:
    """Return the problem of one row of HumanEval; a solution is a program that begins with the prompt.

    Raises DataError for a row of another form.
    """
    try:
        entry = row["entry_point"]
        return CodeTask(
            id=row["task_id"],
            prompt=row["prompt"],
            tests=ProgramTests(
                (f"{row['test']}\n\ncheck({entry})\n",), candidate=tuple(_NAME.findall(entry)[:1])
            ),
            solution=row["prompt"] + row["canonical_solution"],
        )
    except (KeyError, TypeError) as error:
        raise DataError(f"A row of HumanEval has another form than expected: {error!r}.") from None


_NAME = re.compile(r"\w*")
"""What an entry point begins with: `f`, or `Solution` of `Solution().f`."""


def _shared_names(solution: str, programs: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names that a solution defines at its top and that programs use, and those of them that are classes."""
    body = [node for node in tree_of(solution).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    nodes = [node for program in programs for node in ast.walk(tree_of(program))]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    names = sorted({node.name for node in body} & used)
    return tuple(names), tuple(sorted({node.name for node in body if isinstance(node, ast.ClassDef)} & used))
