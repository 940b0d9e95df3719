"""The verdict of a grader on a program: how each test went, and what that is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TestStatus = Literal["passed", "failed", "error", "not_run"]
TEST_STATUSES: frozenset[str] = frozenset({"passed", "failed", "error", "not_run"})


@dataclass(frozen=True, slots=True)
class TestOutcome:
    """How one test went."""

    __test__ = False

    status: TestStatus
    """`failed`: it ran and did not hold. `error`: it could not be carried to its end."""
    explanation: str = ""


@dataclass(frozen=True, slots=True)
class CodeGrade:
    """The verdict on one program."""

    tests: tuple[TestOutcome, ...]
    status: Literal["graded", "ungraded"] = "graded"
    """`ungraded`: the tests themselves could not be run, which says nothing about the candidate and must
    never be used as a reward."""
    explanation: str = ""

    @property
    def passed(self) -> int:
        """Number of tests that passed."""
        return sum(test.status == "passed" for test in self.tests)

    @property
    def score(self) -> float:
        """Share of the tests that passed, for partial credit; 0 where nothing was graded."""
        return self.passed / len(self.tests) if self.tests and self.status == "graded" else 0.0

    @property
    def solved(self) -> bool:
        """Whether every test passed."""
        return self.status == "graded" and bool(self.tests) and self.passed == len(self.tests)
