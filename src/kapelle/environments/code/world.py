"""The world of one programming problem: programs come in, what their shown tests say goes out."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kapelle.environment import Outcome
from kapelle.environments.code.problems import Problem
from kapelle.environments.question_world import need_seats
from kapelle.errors import EpisodeError
from kapelle.grading.code.grade import CodeGrade
from kapelle.grading.code.programs import program_of
from kapelle.grading.text.extraction import defused
from kapelle.runtime.deadlines import patience_here, within
from kapelle.sandbox.contract import Limits
from kapelle.sandbox.pool import Pool
from kapelle.types import Json

NO_PROGRAM = CodeGrade((), explanation="no program was found")
SHOWN_CHARACTERS = 1000
"""Most characters of one test's report that an agent reads."""


@dataclass(slots=True)
class Attempts:
    """What one agent has tried."""

    grades: list[CodeGrade] = field(default_factory=list)

    @property
    def last(self) -> CodeGrade:
        """The verdict that counts."""
        return self.grades[-1]


class CodeWorld:
    """One problem; every agent that acts has attempts of its own, and the last one is what it earns.

    An agent that failed reads the report of the shown tests and may try again. Of the other tests it learns
    only that not all passed: what a program prints or raises there could tell it the inputs.
    """

    def __init__(
        self,
        problem: Problem,
        agents: Sequence[str],
        sandboxes: Pool,
        limits: Limits,
        max_attempts: int,
        partial_credit: bool,
    ) -> None:
        self._problem = problem
        self._attempts = {agent: Attempts() for agent in agents}
        self._sandboxes = sandboxes
        self._limits = limits
        self._max_attempts = max_attempts
        self._partial_credit = partial_credit
        self._finals: list[CodeGrade] = []
        self._most = 1
        self._over = False

    def allow_answers(self, most: int) -> None:
        """Take so many programs of the team, one after another, until one passes all tests."""
        self._most = self._max_attempts = most

    def observe(self, agent: str) -> str:
        """Return the problem, or what became of the agent's last attempt, or of the team's where it had some."""
        if self._most > 1 and self._finals:
            return feedback(self._finals[-1], self._problem.shown, len(self._finals), self._most)
        grades = self._attempts[agent].grades
        if not grades:
            return self._problem.prompt
        return feedback(grades[-1], self._problem.shown, len(grades), self._max_attempts)

    def movers(self) -> tuple[str, ...]:
        """Return the agents that have not solved it and have attempts left."""
        if self._over:
            return ()
        if self._most > 1 and self._finals:  # the team has another go, whoever had a right program of its own
            return tuple(self._attempts)
        return tuple(
            agent
            for agent, tried in self._attempts.items()
            if len(tried.grades) < self._max_attempts and not (tried.grades and tried.last.solved)
        )

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Run the programs of these texts; EpisodeError for a stranger, or tests that could not be run.

        A `final` text is the team's answer and ends the episode, unless it fails and more are allowed.
        """
        need_seats(actions, self._attempts)
        for agent in actions:
            if agent not in self.movers():
                raise EpisodeError(
                    f"'{agent}' has no attempt left; the environment allows {self._max_attempts}."
                )
        texts = dict.fromkeys([*actions.values(), *([] if final is None else [final])])
        grades = dict(zip(texts, await asyncio.gather(*map(self._graded, texts)), strict=True))
        for agent, text in actions.items():
            self._attempts[agent].grades.append(grades[text])
        if final is not None:
            self._finals.append(grades[final])
            self._over = grades[final].solved or len(self._finals) >= self._most
        return {}

    async def score(self, agent: str, text: str) -> float:
        """Return what the program of a text would earn, without counting as an attempt."""
        return self._worth(await self._graded(text))

    async def _graded(self, text: str) -> CodeGrade:
        program = program_of(text)
        if program is None:
            return NO_PROGRAM
        work = functools.partial(self._problem.grade, program, self._sandboxes, self._limits)
        grade = await within(
            "Grading a program", "grader", patience_here.get().grader, self._sandboxes.call(work)
        )
        if grade.status == "ungraded":
            raise EpisodeError(f"The tests could not be run: {grade.explanation}")
        return grade

    def _worth(self, grade: CodeGrade) -> float:
        return grade.score if self._partial_credit else float(grade.solved)

    def outcome(self) -> Outcome:
        """Return what the last attempts are worth; truncated when nobody acted."""
        acted = {agent: tried for agent, tried in self._attempts.items() if tried.grades}
        rewards = {agent: self._worth(tried.last) for agent, tried in acted.items()}
        if self._finals:
            success = self._worth(self._finals[-1])
        else:
            success = sum(rewards.values()) / len(rewards) if rewards else 0.0
        info: dict[str, Json] = {
            "attempts": {agent: len(tried.grades) for agent, tried in acted.items()},
            "tests": {agent: [test.status for test in tried.last.tests] for agent, tried in acted.items()},
            "explanations": {agent: tried.last.explanation for agent, tried in acted.items()},
        }
        return Outcome(rewards, success, info, truncated=not acted)

    async def close(self) -> None:
        """Hold nothing: the sandboxes belong to the process."""


def feedback(grade: CodeGrade, shown: Sequence[str], attempt: int, most: int) -> str:
    """Return what an agent reads after an attempt that failed: of the tests that are not shown, one bit."""
    begin = f"Attempt {attempt} of {most} failed."
    again = "Answer with the whole program again, in one block that opens with ```python and closes with ```."
    if grade is NO_PROGRAM:
        return f"{begin} No program was found. {again}"
    said = []
    for test, outcome in zip(shown, grade.tests, strict=False):
        told = defused(outcome.explanation[:SHOWN_CHARACTERS])
        said.append(f"{test}\n# {outcome.status}{': ' if told else ''}{told}")
    if any(test.status != "passed" for test in grade.tests[len(shown) :]):
        said.append("Tests that are not shown to you: not all passed.")
    return "\n\n".join([begin, *said, again])
