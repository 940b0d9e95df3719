"""Syntax and style are read from the text alone: literal scores, and texts that try to break the reader."""

from __future__ import annotations

import time

import pytest

from kapelle.environments.grading.code.style import MAX_PROGRAM, style_parts, style_score, syntax_score

GOOD = '''"""Sums."""

import math


def total(numbers: list[float]) -> float:
    """Return the sum of the numbers."""
    return math.fsum(numbers)
'''


@pytest.mark.parametrize(
    ("program", "score"),
    [
        ("x = 1", 1.0),
        ("    x = 1\n    y = 2", 1.0),  # it is run as if it stood at the margin
        ("", 0.0),
        ("   \n", 0.0),
        ("x = (", 0.0),
        ("x = 1\ny = 2\nz = = 3\n", 2 / 3),
        ("x = 1\ny = 2\nz = 3\ndef f(:", 3 / 4),
        ("x = 1\x00", 0.0),
        ("x = 1\ny = '\\ud800'", 1.0),
    ],
)
def test_the_syntax_score_is_1_or_the_share_before_the_error(program: str, score: float) -> None:
    assert syntax_score(program) == pytest.approx(score)


@pytest.mark.parametrize(
    ("change", "part", "score"),
    [
        (("    return", "\treturn"), "layout", 7 / 8),
        (("numbers)\n", "numbers)   \n"), "layout", 7 / 8),
        (("numbers)\n", f"numbers)  # {'x' * 99}\n"), "layout", 7 / 8),
        (("def total", "def computeTotal"), "names", 1 / 2),
        (('    """Return the sum of the numbers."""\n', ""), "docstrings", 0.0),
        (("import math", "import math, os"), "imports", 1 / 2),
        (("import math", "from math import *"), "imports", 0.0),
        (
            ("return math.fsum(numbers)", "return math.fsum(numbers) if numbers == None else 0"),
            "habits",
            4 / 5,
        ),
        (("return math.fsum(numbers)", "x = 1; return math.fsum(numbers)"), "habits", 5 / 6),
        (("numbers: list[float]", "numbers: list[float] = []"), "habits", 4 / 5),
    ],
)
def test_each_convention_is_a_share(change: tuple[str, str], part: str, score: float) -> None:
    whole = dict.fromkeys(("layout", "names", "docstrings", "imports", "habits"), 1.0)
    assert style_parts(GOOD) == whole
    assert style_score(GOOD) == 1.0
    changed = GOOD.replace(*change)
    assert changed != GOOD
    if part == "layout" and "\t" in change[1]:
        changed = changed.replace('    """Return', '\t"""Return')
        score = 6 / 8
    found = style_parts(changed)
    assert {name: value for name, value in found.items() if value != 1.0} == {part: pytest.approx(score)}
    assert style_score(changed) == pytest.approx((4 + score) / 5)


@pytest.mark.parametrize(
    "program",
    [
        "-" * 19_000 + "1",
        "(" * 19_000,
        "a" + ".b" * 9_000,
        "1" + "+1" * 9_000,
        "lambda:" * 2_700 + "1",
        "9" * 19_000,
        "a<" * 9_000 + "a",
        "if 1:\n pass\n" + "elif 1:\n pass\n" * 1_300,
        "".join(" " * k + "if 1:\n" for k in range(190)),
        "x = 1\n" * 3_000,
        "y" * (MAX_PROGRAM + 1),
        "f'{" * 6_000,
    ],
    ids=range(12),
)
def test_every_program_is_read_quickly_and_without_an_error(program: str) -> None:
    began = time.process_time()
    assert 0.0 <= syntax_score(program) <= 1.0
    assert 0.0 <= style_score(program) <= 1.0
    assert time.process_time() - began < 3.0


def test_nothing_is_run_or_imported(capsys: pytest.CaptureFixture[str]) -> None:
    program = "import this\nprint('ran')\nraise SystemExit(3)"
    assert syntax_score(program) == 1.0
    assert style_score(program) < 1.0
    assert capsys.readouterr().out == ""
