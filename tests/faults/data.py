"""Made-up rows in the forms that the shipped recipes read: the harness needs no data set and no network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROWS = 24


def write_data(folder: Path) -> None:
    """Write every file that `recipes.py` names into a folder that is still empty."""
    for split, first in (("train", 0), ("test", ROWS)):
        numbers = range(first, first + ROWS)
        _write(folder / "gsm8k" / f"{split}.jsonl", (_word_problem(n) for n in numbers))
    _write(folder / "nli.jsonl", (_pair(n) for n in range(2 * ROWS)))
    _write(folder / "mbpp.jsonl", (_program(n) for n in (*range(11, 11 + ROWS), *range(601, 601 + ROWS))))
    _write(folder / "answers.jsonl", (_answer(n, k) for n in range(2 * ROWS) for k in range(2)))
    for category in ("simple_python", "multiple", "parallel"):
        _write(folder / "bfcl" / f"{category}.jsonl", (_call(category, n) for n in range(ROWS)))
        asked = ({"id": f"{category}_{n}", "ground_truth": [{"add": {"a": [n]}}]} for n in range(ROWS))
        _write(folder / "bfcl" / "possible_answer" / f"{category}.jsonl", asked)


def _write(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def _word_problem(n: int) -> Mapping[str, Any]:
    a, b = 3 + n, 2 + n % 5
    steps = f"{a}+{b} = <<{a}+{b}={a + b}>>{a + b} apples.\n#### {a + b}"
    return {"question": f"Ada has {a} apples and finds {b}. How many has she?", "answer": steps}


def _pair(n: int) -> Mapping[str, Any]:
    premise = f"There are {n} birds on the roof."
    return {"premise": premise, "hypothesis": f"There are {n + n % 3} birds.", "label": "enc"[n % 3]}


def _program(n: int) -> Mapping[str, Any]:
    tests = [f"assert plus_{n}({k}) == {k + n}" for k in range(3)]
    code = f"def plus_{n}(a):\n    return a + {n}\n"
    return {"task_id": n, "text": f"Add {n}.", "code": code, "test_setup_code": "", "test_list": tests}


def _answer(n: int, k: int) -> Mapping[str, Any]:
    return {"question": f"{n}+1", "solution": str(n + 1 + k), "is_correct": k == 0}


def _call(category: str, n: int) -> Mapping[str, Any]:
    number = {
        "type": "dict",
        "properties": {"a": {"type": "integer", "description": "it"}},
        "required": ["a"],
    }
    tool = {"name": "add", "description": "Adds.", "parameters": number}
    said = [[{"role": "user", "content": f"Add {n}."}]]
    return {"id": f"{category}_{n}", "question": said, "function": [tool]}
