"""Programming problems with tests: MBPP, HumanEval, and programs that read and print.

Programs run in the sandbox and nowhere else. With `max_attempts` above 1 an agent reads what the shown tests
said to its program and tries again, under a workflow in which the environment decides who moves (`parallel`,
`tool_use`); workflows that end in one answer (`solo`, `chain`) make one attempt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from kapelle.configured import Configured
from kapelle.environments.code_problems import FORMATS, MBPP_SPLITS, Format, Problem
from kapelle.environments.code_world import CodeWorld
from kapelle.environments.data_source import DataSource, Row
from kapelle.errors import DataError
from kapelle.grading.code_text import program_of
from kapelle.sandbox.backends import backend, require
from kapelle.sandbox.contract import Limits
from kapelle.sandbox.shared import shared_pool
from kapelle.types import Message, Split, Task


class Code(Configured):
    """Programming problems, graded by running their tests on what an agent wrote."""

    name: Literal["code"] = "code"
    format: Format = "mbpp"
    """The form of the rows."""
    path: str = "google-research-datasets/mbpp"
    """A folder with a file per split, one file, or `owner/name` on the Hugging Face hub."""
    config: str | None = "full"
    """Configuration of the hub's data set; null for its only one."""
    train: str = "train"
    """File (suffix optional) or hub split to train on."""
    test: str = "test"
    """File or hub split to evaluate on."""
    test_share: float = Field(0.1, gt=0.0, lt=1.0)
    """Share of the problems held out for testing where `path` is one file; a hash of each decides."""
    published_split: bool = True
    """Whether one file of MBPP is split by `task_id` as published: train 601 to 974, test 11 to 510."""
    question_field: str = "question"
    """Field of the problem's text in `format: stdio`."""
    max_attempts: int = Field(1, ge=1)
    """How many programs an agent may hand in; the last one counts."""
    partial_credit: bool = False
    """True: a program earns the share of tests that it passes. False: 1 for all of them, else 0."""
    sandbox: str = "bubblewrap"
    """What runs programs: `bubblewrap`, `docker`, or `unsafe_subprocess`, which contains nothing."""
    cpu_s: float = Field(10.0, gt=0.0)
    """Seconds of CPU that a program may use for all tests together (for each, where it reads and prints)."""
    wall_s: float = Field(20.0, gt=0.0)
    """Seconds on the clock, which pass for a program that waits and on a machine that is crowded."""
    memory_mb: int = Field(512, ge=64)
    """Mebibytes that a program may use."""
    parallel: int = Field(2, ge=1)
    """Programs that are graded at one time; the others wait."""

    @model_validator(mode="after")
    def _apart(self) -> Code:
        if self.train == self.test:
            raise ValueError(
                f"`train` and `test` both name '{self.train}'. Nothing is tested on what it trains on."
            )
        return self

    @property
    def reward_range(self) -> tuple[float, float]:
        """From no test passed to all."""
        return (0.0, 1.0)

    @property
    def sources(self) -> Mapping[Split, str]:
        """The file or hub split of each."""
        if self._by_id:
            return {
                split: f"{self.path}, task_id {ids.start} to {ids.stop - 1}"
                for split, ids in MBPP_SPLITS.items()
            }
        return {"train": self._source.describe("train"), "test": self._source.describe("test")}

    @property
    def _by_id(self) -> bool:
        return self.format == "mbpp" and self.published_split and Path(self.path).expanduser().is_file()

    @property
    def _source(self) -> DataSource:
        return DataSource(self.path, self.config, self.train, self.test, self.test_share)

    def _problems(self, split: Split) -> tuple[Problem, ...]:
        key = self.question_field if self.format == "stdio" else "task_id"
        return _read(self._source, self.format, key, self.question_field, self._by_id)[split]

    @property
    def _limits(self) -> Limits:
        return Limits(wall_s=self.wall_s, cpu_s=self.cpu_s, memory_bytes=self.memory_mb * 1024**2)

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

    def script(self, agent: str, task: Task, heard: Sequence[Message], seed: int) -> str:
        """Return the data set's own solution. DataError where it has none."""
        solution = self._problem(task).solution
        if solution is None:
            raise DataError(f"The problem {task.id} of '{self.path}' has no solution to show.")
        return f"```python\n{solution.rstrip()}\n```"


@lru_cache(maxsize=8)
def _read(
    source: DataSource, form: Format, key: str, question: str, by_id: bool
) -> Mapping[Split, tuple[Problem, ...]]:
    rows = source.load(key, "format" if key == "task_id" else "question_field")
    chosen: dict[Split, tuple[Row, ...]] = {"train": rows.train, "test": rows.test}
    if by_id:
        every = sorted((*rows.train, *rows.test), key=lambda row: int(row.text("task_id", "format")))
        chosen = {
            split: tuple(row for row in every if int(row.text("task_id", "format")) in ids)
            for split, ids in MBPP_SPLITS.items()
        }
    if empty := [split for split, kept in chosen.items() if not kept]:
        raise DataError(
            f"'{source.path}' has no problem of MBPP's published {empty[0]} split. Set "
            "`environment.published_split: false`."
        )
    return {split: tuple(_problem(row, form, question) for row in kept) for split, kept in chosen.items()}


def _problem(row: Row, form: Format, question: str) -> Problem:
    try:
        return FORMATS[form](row, question)
    except DataError as fault:
        placed = str(fault) if str(fault).startswith(row.place) else f"{row.place}: {fault}"
        raise DataError(f"{placed} Is it a row of `environment.format: {form}`?") from None
