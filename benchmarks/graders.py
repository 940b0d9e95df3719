"""What grading one answer costs: time per grader on honest and hostile answers, and what many leave behind.

Times are wall milliseconds of one call, `p99.9` and `max` over all calls; `library` is the share that
math-verify decides, in a process of its own. Reads MATH's gold answers under $KAPELLE_DATA where they are.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from tests.environments.grading.hostile import HOSTILE

from kapelle.environments.grading.judge import judge_answer
from kapelle.environments.grading.math.answers import read_answer
from kapelle.environments.grading.math.expression import Unfamiliar, Unreadable
from kapelle.environments.grading.math.grade import grade_math, math_processes
from kapelle.environments.grading.math.numeric import Number, grade_numeric, parse_number
from kapelle.environments.grading.processes import KillableProcesses
from kapelle.environments.grading.text.extraction import ExtractionRule
from kapelle.environments.grading.text.json_answer import grade_json
from kapelle.environments.grading.text.match import grade_choice, grade_exact, grade_regex, regex_processes
from kapelle.environments.grading.text.tool_call import grade_tool_call
from kapelle.environments.grading.verdict import Grade
from kapelle.types import Message

POLICIES: tuple[ExtractionRule, ...] = ("tag", "hash", "only_box")
HONEST = 2_000
MANY = 10_000

Pair = tuple[str, str]
"""A text and the gold answer it is graded against."""

READ = [
    ("1/2", "0.5"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
    ("(1, 2)", "(1,2)"),
    ("x+1", "1+x"),
    ("18", "20"),
    ("Bern", "Bern"),
]
LIBRARY = [
    (r"1-\cos^2 x", r"\sin^2 x"),
    (r"2\sqrt[3]{2}", r"\sqrt[3]{16}"),
    (r"5 < x", r"x > 5"),
    (r"3\log 2", r"\log 8"),
    (r"\cos x", r"\sin x"),
    (r"\frac{\ln x}{2}", r"\ln\sqrt{x}"),
]


def boxed(pairs: list[Pair], count: int) -> list[Pair]:
    """Return `count` texts around the answers, over and over."""
    return [
        (rf"So it is \boxed{{{answer}}}.", gold)
        for answer, gold in (pairs * (count // len(pairs) + 1))[:count]
    ]


async def agreeable(_conversation: Sequence[Message]) -> str:
    """Return no verdict: the time is the grader's alone."""
    return ""


def graders(
    mathematics: KillableProcesses, patterns: KillableProcesses
) -> dict[str, Callable[[str, str], Grade]]:
    """Return each grader as a function of a text and a gold answer."""
    five = Number(Fraction(5))
    return {
        "exact": lambda text, gold: grade_exact(text, gold, POLICIES),
        "numeric": lambda text, gold: grade_numeric(text, parse_number(gold) or five, POLICIES),
        "math": lambda text, gold: grade_math(text, gold, POLICIES, mathematics),
        "choice": lambda text, gold: grade_choice(text, "B", {"A": "6", "B": gold}, POLICIES),
        "regex": lambda text, gold: grade_regex(text, re.escape(gold), POLICIES, patterns),
        "json": lambda text, gold: grade_json(text, gold, POLICIES),
        "tool_call": lambda text, gold: grade_tool_call(text, [{"f": {"x": [gold]}}]),
        "judge": lambda text, gold: asyncio.run(judge_answer(agreeable, "?", text, gold)),
    }


def spread(grade: Callable[[str, str], Grade], pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the times of grading each pair once, and how often each status came out."""
    times, statuses = [], Counter[str]()
    for text, gold in pairs:
        start = time.perf_counter()
        statuses[grade(text, gold).status] += 1
        times.append((time.perf_counter() - start) * 1000)
    times.sort()
    return {
        "calls": len(times),
        "median_ms": round(times[len(times) // 2], 3),
        "p99.9_ms": round(times[min(len(times) - 1, int(len(times) * 0.999))], 1),
        "max_ms": round(times[-1], 1),
        **statuses,
    }


def resident_kb(process: int | str = "self") -> int:
    """Return the resident memory of a process; 0 where there is no /proc."""
    status = Path(f"/proc/{process}/status")
    found = re.search(r"VmRSS:\s+(\d+)", status.read_text(encoding="ascii")) if status.exists() else None
    return int(found[1]) if found else 0


def descriptors() -> int:
    """Return how many files this process holds open; 0 where there is no /proc."""
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


def growth(grade: Callable[[str, str], Grade], pairs: Sequence[Pair]) -> dict[str, int]:
    """Return what grading many answers adds to this process, after a first tenth that may fill caches."""
    tenth = len(pairs) // 10
    for text, gold in pairs[:tenth]:
        grade(text, gold)
    memory, files = resident_kb(), descriptors()
    for text, gold in pairs[tenth:]:
        grade(text, gold)
    return {"calls": len(pairs), "memory_kb": resident_kb() - memory, "descriptors": descriptors() - files}


def coverage() -> dict[str, Any]:
    """Return how many of MATH's gold answers the own reader reads."""
    path = Path(os.environ.get("KAPELLE_DATA", "")) / "deepscaler_parts" / "train_math.json.gz"
    if not path.is_file():
        return {"skipped": "KAPELLE_DATA holds no deepscaler_parts/train_math.json.gz"}
    with gzip.open(path, "rt", encoding="utf-8") as file:
        golds = [str(row["answer"]) for row in json.load(file)]
    outcomes = Counter(map(_reading, golds))
    return {"answers": len(golds), **outcomes}


def _reading(gold: str) -> str:
    try:
        read_answer(gold)
    except Unfamiliar:
        return "library"
    except Unreadable:
        return "refused"
    return "own reader"


def run() -> dict[str, Any]:
    """Measure every grader."""
    hostile = [(text, row.gold) for row in HOSTILE for text in row.texts]
    with math_processes(size=1) as mathematics, regex_processes(size=1) as patterns:
        start = time.perf_counter()
        mathematics.warm()
        started = round(time.perf_counter() - start, 2)
        patterns.warm()
        every = graders(mathematics, patterns)
        results: dict[str, Any] = {
            name: {"honest": spread(grade, boxed(READ, HONEST)), "hostile": spread(grade, hostile)}
            for name, grade in every.items()
        }
        results["math"]["library"] = spread(every["math"], boxed(LIBRARY, 300))
        return {
            "graders": results,
            "math_verify_start_s": started,
            "growth": {
                "math": growth(every["math"], boxed(READ, MANY)),
                "regex": growth(every["regex"], boxed(READ, MANY)),
            },
            "coverage_of_MATH": coverage(),
        }


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
