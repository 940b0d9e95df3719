"""Programming problems with tests: MBPP, HumanEval, and programs that read and print.

Programs run in the sandbox and nowhere else. With `max_attempts` above 1 an agent reads what the shown tests
said to its program and tries again, under a workflow in which the environment decides who moves (`parallel`,
`tool_use`); workflows that end in one answer (`solo`, `chain`) make one attempt.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from kapelle.environment import Answerable, Outcome, Retriable, Scorable, Scripted
from kapelle.environments.code.problems import FORMATS, MBPP_SPLITS, Format, Problem
from kapelle.environments.data.settings import DataSettings
from kapelle.environments.data.source import Row, Words, question_in, text_in
from kapelle.environments.questions import need_seats
from kapelle.errors import DataError, EpisodeError
from kapelle.grading.code.grade import CodeGrade
from kapelle.grading.code.programs import program_of
from kapelle.grading.text.extraction import defused
from kapelle.runtime.deadlines import patience_here, within
from kapelle.sandbox.contract import Limits
from kapelle.sandbox.pool import Pool, backend, require, shared_pool
from kapelle.settings.base import FREE, FROM_HERE_ON
from kapelle.types import Json, Message, Split, Task

# -------- The world of one programming problem: programs come in, what their shown tests say goes out

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


class CodeWorld(Scorable, Retriable):
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


class Code(DataSettings, Answerable, Scripted):
    """Programming problems, graded by running their tests on what an agent wrote."""

    name: Literal["code"] = "code"
    format: Format = "mbpp"
    """The form of the rows."""
    path: str = "google-research-datasets/mbpp"
    config: str | None = "full"
    published_split: bool = True
    """Whether one file of MBPP is split by `task_id` as published: train 601 to 974, test 11 to 510."""
    question_field: str = "question"
    """Field of the problem's text in `format: stdio`; dots reach into objects, a conversation is asked without its system
    messages."""
    tests_field: str = "input_output"
    """Field of the private tests in `format: stdio`; verl's rows have them in `reward_model.ground_truth`."""
    max_attempts: int = Field(default=1, ge=1)
    """How many programs an agent may hand in; the last one counts."""
    partial_credit: bool = False
    """True: a program earns the share of tests that it passes. False: 1 for all of them, else 0."""
    sandbox: Annotated[str, FROM_HERE_ON] = "bubblewrap"
    """What runs programs: `bubblewrap`, `docker`, or `unsafe_subprocess`, which contains nothing."""
    cpu_s: Annotated[float, FREE] = Field(default=10.0, gt=0.0)
    """Seconds of CPU that a program may use for all tests together (for each, where it reads and prints)."""
    wall_s: Annotated[float, FREE] = Field(default=20.0, gt=0.0)
    """Seconds on the clock, which pass for a program that waits and on a machine that is crowded."""
    memory_mb: Annotated[int, FREE] = Field(default=512, ge=64)
    """Mebibytes that a program may use."""
    output_mb: Annotated[int, FREE] = Field(default=1, ge=1)
    """Mebibytes that a program may print."""
    parallel: Annotated[int, FREE] = Field(default=2, ge=1)
    """Programs that are graded at one time; the others wait."""

    @property
    def sources(self) -> Mapping[Split, str]:
        """The file or hub split of each."""
        if self._by_id:
            return {
                split: f"{self.path}, task_id {ids.start} to {ids.stop - 1}"
                for split, ids in MBPP_SPLITS.items()
            }
        return super().sources

    @property
    def _by_id(self) -> bool:
        return self.format == "mbpp" and self.published_split and Path(self.path).expanduser().is_file()

    def _key(self) -> tuple[str, str, Words]:
        if self.format == "stdio":
            return self.question_field, "question_field", question_in
        return "task_id", "format", text_in

    def _read(self, row: Row) -> Problem:
        try:
            return FORMATS[self.format](row, self.question_field, self.tests_field)
        except DataError as fault:
            placed = str(fault) if str(fault).startswith(row.place) else f"{row.place}: {fault}"
            raise DataError(f"{placed} Is it a row of `environment.format: {self.format}`?") from None

    @cached_property
    def _by_split(self) -> Mapping[Split, tuple[Problem, ...]]:
        chosen: dict[Split, tuple[Row, ...]] = {"train": self.rows.train, "test": self.rows.test}
        if self._by_id:
            every = sorted(
                (*self.rows.train, *self.rows.test), key=lambda row: int(text_in(row, "task_id", "format"))
            )
            chosen = {
                split: tuple(row for row in every if int(text_in(row, "task_id", "format")) in ids)
                for split, ids in MBPP_SPLITS.items()
            }
        if empty := [split for split, kept in chosen.items() if not kept]:
            raise DataError(
                f"'{self.path}' has no problem of MBPP's published {empty[0]} split. Set "
                "`environment.published_split: false`."
            )
        return {split: tuple(map(self._read, kept)) for split, kept in chosen.items()}

    def _problems(self, split: Split) -> tuple[Problem, ...]:
        return self._by_split[split]

    @property
    def _limits(self) -> Limits:
        mebi = 1024**2
        # A reward must not say how busy the machine was.
        return Limits(
            self.wall_s, self.cpu_s, self.memory_mb * mebi, output_bytes=self.output_mb * mebi, patience=9.0
        )

    def check(self, agents: Sequence[str]) -> None:
        """Read both splits and look for the sandbox.

        Raises DataError for a row of another form, SandboxError when this machine cannot give the sandbox.
        """
        for split in ("train", "test"):
            self._problems(split)
        require(backend(self.sandbox))

    def size(self, split: Split) -> int | None:
        """Return the number of problems."""
        return len(self._problems(split))

    def task(self, split: Split, index: int) -> Task:
        """Return the problem at an index. Its tests are not in it."""
        return Task(f"{split}-{index}", self._problems(split)[index].prompt)

    def _problem(self, task: Task) -> Problem:
        split, _, index = task.id.rpartition("-")
        return self._problems("train" if split == "train" else "test")[int(index)]

    def start(self, task: Task, agents: Sequence[str], seed: int) -> CodeWorld:
        """Open the world of one problem. SandboxError for an unknown sandbox."""
        sandboxes = shared_pool(self.sandbox, self._limits, self.parallel)
        return CodeWorld(
            self._problem(task), agents, sandboxes, self._limits, self.max_attempts, self.partial_credit
        )

    def extract(self, text: str) -> str | None:
        """Return the program of a text: equal programs are equal votes."""
        program = program_of(text)
        return None if program is None else program.strip()

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the data set's own solution. DataError where it has none."""
        solution = self._problem(task).solution
        if solution is None:
            raise DataError(f"The problem {task.id} of '{self.path}' has no solution to show.")
        return f"```python\n{solution.rstrip()}\n```"
