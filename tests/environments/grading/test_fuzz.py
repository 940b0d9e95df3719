"""No text breaks a grader or takes it long: a sample in every run, 100,000 texts on demand.

`KAPELLE_FUZZ=100000 make test TESTS=tests/environments/grading/test_fuzz.py` runs all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.patience import timed

from kapelle.environments.grading.math.grade import grade_math
from kapelle.environments.grading.math.numeric import grade_numeric, parse_number
from kapelle.environments.grading.processes import KillableProcesses
from kapelle.environments.grading.text.extraction import ExtractionRule
from kapelle.environments.grading.text.json_answer import grade_json
from kapelle.environments.grading.text.match import grade_choice, grade_exact
from kapelle.environments.grading.text.tool_call import grade_tool_call
from kapelle.environments.grading.verdict import Grade
from kapelle.types import Json

SAMPLE = int(os.environ.get("KAPELLE_FUZZ", "200"))
POLICIES: tuple[ExtractionRule, ...] = ("tag", "hash", "only_box", "last_number", "whole")

PIECES = [
    *(
        "\\boxed{",
        "}",
        "{",
        "(",
        ")",
        "[",
        "]",
        "#### ",
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        "```",
        "\n",
    ),
    *(
        "\\frac",
        "\\sqrt",
        "\\pi",
        "\\pm",
        "\\infty",
        "\\cup",
        "\\text{",
        "\\begin{pmatrix}",
        "\\end{pmatrix}",
        "&",
    ),
    *(
        "\\\\",
        "\\left",
        "\\circ",
        "\\%",
        "\\binom",
        "^",
        "_",
        "!",
        "=",
        "+",
        "-",
        "*",
        "/",
        ",",
        ".",
        "$",
        "%",
        " ",
    ),
    *(
        "0",
        "1",
        "2",
        "5",
        "12",
        "999999999",
        "1e9",
        "x",
        "y",
        "i",
        "e",
        "pi",
        "sqrt",
        "and",
        " or ",
        "cm",
        "inf",
    ),
    *(
        '{"name": "f", "arguments": {',
        '"a": ',
        "f(a=",
        "<tool_call>",
        "</tool_call>",
        "'",
        '"',
        "NaN",
        "null",
        "\\",
    ),
    *(
        "> ",
        "<|im_end|>",
        "\u200b",
        "\u202e",
        "\x00",
        "\ud800",
        "½",
        "５",
        "\u2212",
        "°",
        "±",
        "ñ",
        "__import__",
    ),
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=24).map("".join)
GOLDS = st.sampled_from(["5", "1/2", "x+1", r"\{1,2\}", "[0,1)", r"\sqrt{2}", "50%", "Bern"])


class Unequal(KillableProcesses):
    """Stands in for the library, which has a test of its own below."""

    def ask(self, question: Json) -> Json:
        return False


UNEQUAL = Unequal("tests.environments.grading.no_such_module")


def grades(text: str, gold: str) -> Sequence[Grade]:
    number = parse_number(gold)
    assert number is None or number.figure is not None
    five = parse_number("5")
    assert five is not None
    return [
        grade_exact(text, gold, POLICIES),
        grade_numeric(text, number or five, POLICIES),
        grade_math(text, gold, POLICIES, UNEQUAL),
        grade_choice(text, "B", {"A": "6", "B": gold}, POLICIES),
        grade_json(text, {"a": [1, gold]}),
        grade_tool_call(text, [{"f": {"a": [gold, 5]}}]),
    ]


@pytest.mark.slow
@settings(max_examples=SAMPLE, suppress_health_check=list(HealthCheck))
@given(TEXTS, GOLDS)
def test_every_text_is_graded_within_a_second(text: str, gold: str) -> None:
    for wrapped in (text, rf"\boxed{{{text}}}"):
        verdicts, seconds = timed(partial(grades, wrapped, gold), 1.0)
        assert seconds < 1.0
        assert all(grade.score in {0.0, 1.0} for grade in verdicts)
        assert all(grade.explanation for grade in verdicts)


@settings(max_examples=max(30, SAMPLE // 100), suppress_health_check=list(HealthCheck))
@given(text=TEXTS, gold=st.sampled_from([r"\sin x", "x > 5", r"\log 2"]))
def test_no_text_breaks_math_verify_in_its_process(
    text: str, gold: str, math_pool: KillableProcesses
) -> None:
    for answer in (text, f"{gold}{text}", rf"\sin({text})"):
        grade = grade_math(rf"\boxed{{{answer}}}", gold, ["only_box"], math_pool)
        assert grade.score in {0.0, 1.0}
