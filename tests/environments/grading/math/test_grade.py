from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kapelle.environments.grading.math.grade import COMPARISON, grade_math, math_processes
from kapelle.environments.grading.processes import AnswerLimits, KillableProcesses, ProcessFailed, TooCostly


@pytest.fixture(scope="module")
def patient_pool() -> Iterator[KillableProcesses]:
    """Says the same on a busy machine."""
    with math_processes(size=1, limits=AnswerLimits(cpu_s=20.0, wall_s=60.0)) as pool:
        yield pool


@pytest.fixture(scope="module")
def no_pool() -> Iterator[KillableProcesses]:
    """A pool that cannot start: what it is asked gives up."""
    with KillableProcesses("tests.environments.grading.no_such_module", 1) as pool:
        yield pool


@pytest.mark.parametrize(
    ("gold", "answer", "score"),
    [
        (r"\sin^2 x", r"1-\cos^2 x", 1.0),
        (r"\sqrt[3]{16}", r"2\sqrt[3]{2}", 1.0),
        (r"x > 5", r"5 < x", 1.0),
        (r"\log 8", r"3\log 2", 1.0),
        (r"\sin x", r"\cos x", 0.0),
        (r"x > 5", r"x \ge 5", 0.0),
    ],
)
def test_notation_that_only_math_verify_knows(
    gold: str, answer: str, score: float, patient_pool: KillableProcesses
) -> None:
    for one, other in ((answer, gold), (gold, answer)):
        grade = grade_math(rf"\boxed{{{one}}}", other, ["only_box"], patient_pool)
        assert (grade.score, grade.status) == (score, "graded"), grade


@pytest.mark.parametrize(
    ("exact", "decimal", "score"),
    [
        (r"\sqrt{17}", "4.123105625617661", 1.0),
        (r"x = -\sqrt{17}", "-4.123105625617661", 1.0),
        (r"3\pi", "9.424777960769380", 1.0),
        (r"\frac{\sqrt{17}}{3}", "1.3743685418726", 1.0),
        (r"\frac{\sqrt{17}}{3}", "1.3743685418727", 0.0),
        (r"\frac{\sqrt{17}}{3}", "1.374368541872", 0.0),  # 13 digits
        ("2/3", "0.66666666666667", 0.0),
        (r"y = \sqrt{17}", "x = 4.123105625617661", 0.0),
        (r"x - x + \sqrt{17}", "4.123105625617661", 0.0),
        ("2", "1.999999999999999", 0.0),
    ],
)
def test_the_float_of_an_irrational_number_equals_it(
    exact: str, decimal: str, score: float, no_pool: KillableProcesses
) -> None:
    for one, other in ((exact, decimal), (decimal, exact)):
        assert grade_math(rf"\boxed{{{one}}}", other, ["only_box"], no_pool).score == score


@pytest.mark.parametrize(
    ("gold", "answer", "status"),
    [
        ("5", "5", "graded"),
        ("5", "6", "graded"),
        (r"\sin x", r" \sin  x ", "graded"),
        ("x^2", "(x)(x)", "graded"),
        ("5", "9^{9^9}", "no_answer"),
        (r"e^{x}", r"1.5^{x}", "ungraded"),
        (r"e^{x}", r"e^{x}, 2", "no_answer"),
        (r"\sin x", r"\sin y", "no_answer"),
        (r"\sin x", r"\def\x{1}", "no_answer"),
        (r"\sin x", r"\sin x?", "no_answer"),
        (r"\sin x", r"\sin x = 1 = 2", "no_answer"),
        (r"\sin x", "ｓｉｎ x", "no_answer"),
        (r"\sin x", r"\sin 2 3", "no_answer"),
        (r"\sin x", r"\sin 2x", "ungraded"),
    ],
)
def test_math_verify_only_gets_answers_that_may_be_correct(
    gold: str, answer: str, status: str, no_pool: KillableProcesses
) -> None:
    assert grade_math(rf"\boxed{{{answer}}}", gold, ["only_box"], no_pool).status == status


class Costly(KillableProcesses):
    """Compares nothing that the answer or the gold answer makes costly, and is late for whatever names it."""

    def __init__(self, costly: str, late: str = "") -> None:
        super().__init__("tests.environments.grading.no_such_module")
        self._costly, self._late = costly, late

    def ask(self, question: Any) -> bool:
        texts = f"{question['gold']} {question['answer']}"
        if self._late and self._late in texts:
            raise ProcessFailed("It takes longer than 0.9 s.")
        if self._costly in texts:
            raise TooCostly("It takes longer than 0.8 s of CPU.")
        return True


@pytest.mark.parametrize(
    ("answer", "gold", "processes", "status"),
    [
        (r"\tan 5", r"\sin 5", Costly("tan"), "no_answer"),
        (r"\sin 5", r"\tan 5", Costly("tan"), "ungraded"),
        (r"\tan 5", r"\sin 5", Costly("none", late="tan"), "ungraded"),
        (r"\tan 5", r"\sin 5", Costly("tan", late=r"\sin 5$ $\sin 5"), "ungraded"),
    ],
)
def test_a_costly_answer_is_incorrect_and_other_timeouts_fail_the_episode(
    answer: str, gold: str, processes: Costly, status: str
) -> None:
    grade = grade_math(answer, gold, ["whole"], processes)
    assert (grade.status, grade.score) == (status, 0.0)


def test_a_grader_without_a_core_for_seconds_still_rewards_correct_answers() -> None:
    with math_processes(size=1) as pool, ThreadPoolExecutor(1) as threads:
        pool.warm()
        (server,) = pool._running
        os.killpg(server.pid, signal.SIGSTOP)
        asked = threads.submit(
            grade_math, r"\boxed{\frac{(2n)!}{n!\,n!}}", r"\binom{2n}{n}", ["only_box"], pool
        )
        time.sleep(1.5)
        os.killpg(server.pid, signal.SIGCONT)
        for _ in range(3):
            # Its child too is stopped, wherever it is by then.
            time.sleep(0.05)
            os.killpg(server.pid, signal.SIGSTOP)
            time.sleep(1.0)
            os.killpg(server.pid, signal.SIGCONT)
        assert asked.result().score == 1.0


def test_a_comparison_is_limited_by_cpu_time_and_not_by_load() -> None:
    assert COMPARISON.cpu_s <= 3.0
    assert COMPARISON.wall_s / COMPARISON.cpu_s >= 40
    assert math_processes()._limits is COMPARISON


def test_math_verify_does_not_evaluate(patient_pool: KillableProcesses) -> None:
    # Its reader of plain expressions evaluates Python; only the LaTeX reader may see an answer.
    try:
        assert patient_pool.ask({"gold": "$5$", "answer": "__import__('os').getpid()"}) == "answer"
    except ProcessFailed:
        pytest.fail("the question reaches no evaluation, so nothing can give up")
