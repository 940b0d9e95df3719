"""A published benchmark as an environment: its problems are the test split, and there are no training tasks.

    evaluation.sets: {gsm8k: {name: benchmark, benchmark: gsm8k, path: data/gsm8k}}

`kapelle eval --benchmark gsm8k` evaluates a team on this environment in place of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from kapelle.environment import Answerable, Outcome, QuestionCounts, Reads, Scorable
from kapelle.environments.base import BaseState
from kapelle.environments.benchmarks import mt_bench
from kapelle.environments.benchmarks.definitions import BENCHMARKS, Case, Definition, Form, turns_of
from kapelle.environments.data.conversations import Question
from kapelle.environments.data.source import hub_rows
from kapelle.environments.grading.asking import AnyJudge
from kapelle.environments.grading.verdict import Grade
from kapelle.environments.judged import UsesJudges
from kapelle.environments.questions import Graded, require_agents
from kapelle.environments.sandbox.pool import backend, require
from kapelle.errors import AbsentData, ConfigError, DataError, EpisodeError, did_you_mean
from kapelle.runtime.deadlines import patience_here, within
from kapelle.runtime.row_files import SUFFIXES, DataRow, read_rows
from kapelle.settings.base import FROM_HERE_ON
from kapelle.types import Json, Message, Split, Task


class Rows(NamedTuple):
    """The rows of a benchmark."""

    problems: tuple[DataRow, ...]
    shots: tuple[DataRow, ...]
    """The rows of the examples in the prompt, in their order."""
    contents: Mapping[str, str]
    """Mapping from each file or hub split to its hash."""


class Benchmark(UsesJudges, Graded, Answerable, Reads):
    """A published benchmark with its own prompt, examples, parser and score."""

    name: Literal["benchmark"] = "benchmark"
    benchmark: str
    """The name of the benchmark: `gsm8k`, `math`, `humaneval`, `mbpp` or `mt_bench`."""
    path: str | None = None
    """The data as published: a file with the problems, a folder that also contains the file of the examples, or the name of a data set on
    the Hugging Face Hub. If null, the benchmark's data set on the Hub."""
    shots: int | None = Field(default=None, ge=0)
    """The number of examples in the prompt. If null, the benchmark's own number."""
    shots_path: str | None = None
    """The file with the rows of the examples. If null, they are read from `path`."""
    form: Form = "chat"
    """How agents read the prompt. `chat`: as one user message. `completion`: as bare text without a chat template, for base models and
    agents without a prompt and a system message."""
    metric: str | None = None
    """The score that is the success. If null, the first score of the benchmark. All scores are reported."""
    judge: AnyJudge | None = None
    """The judge of `mt_bench`: a model at an endpoint (`endpoint`, `model`), or a frozen model in this process (`path`)."""
    judge_prompts: str | None = None
    """The published judge prompts of MT-Bench (`judge_prompts.jsonl` of FastChat). If null, prompts of the same structure are used."""
    sandbox: Annotated[str, FROM_HERE_ON] = "bubblewrap"
    """The sandbox in which programs run."""

    @field_validator("benchmark")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in BENCHMARKS:
            raise ValueError(
                f"there is no benchmark '{name}'.{did_you_mean(name, BENCHMARKS)} All: {', '.join(BENCHMARKS)}"
            )
        return name

    @model_validator(mode="after")
    def _fits(self) -> Benchmark:
        metrics = self.definition.metrics
        if self.metric is not None and self.metric not in metrics:
            raise ValueError(
                f"`{self.benchmark}` has no metric '{self.metric}'.{did_you_mean(self.metric, metrics)}"
            )
        if self.shots and not self.definition.shots:
            raise ValueError(f"`{self.benchmark}` is defined without examples; remove `shots`")
        if self.benchmark == "mt_bench" and self.form == "completion":
            raise ValueError("`mt_bench` is a conversation; remove `form`")
        return self

    # -------- Data

    @property
    def definition(self) -> Definition:
        """The definition of the benchmark."""
        return BENCHMARKS[self.benchmark]

    @property
    def rendered_prompts(self) -> bool:
        """Whether models read the prompt without a chat template, which the checks of a run require models and agents to allow."""
        return self.form == "completion"

    @property
    def shot_count(self) -> int:
        """The number of examples in the prompt."""
        return self.definition.shots if self.shots is None else self.shots

    @cached_property
    def rows(self) -> Rows:
        """The problems and the examples. Raises DataError if data are missing or have other columns."""
        spec, contents = self.definition, dict[str, str]()
        try:
            problems, others = self._read(contents)
        except AbsentData as error:
            reason = str(error).replace("`environment.path`", f"`{self.benchmark}.path`")
            raise AbsentData(f"`{self.benchmark}` has no data. {reason} {self._wanted}") from None
        if self.shots_path is not None and self.shot_count:
            others = read_rows(Path(self.shots_path).expanduser(), contents)
        problems = tuple(row for row in self._checked(problems) if spec.is_problem(row))
        shots = tuple(spec.choose_shots(self._checked(others), self.shot_count)) if self.shot_count else ()
        if not problems:
            raise DataError(
                f"The data of `{self.benchmark}` contain no problem of its test split. {self._wanted}"
            )
        if len(shots) < self.shot_count:
            raise DataError(
                f"`{self.benchmark}` shows {self.shot_count} examples, but its data contain {len(shots)} ({spec.shot_split} split). "
                f"Set `{self.benchmark}.shots_path` to their file, or `{self.benchmark}.shots=0`. {self._wanted}"
            )
        return Rows(problems, shots, contents)

    @property
    def _wanted(self) -> str:
        spec = self.definition
        files = f"{spec.files[0]}.jsonl" + (
            f" and {spec.shot_split}.jsonl" if spec.shot_split == "train" else ""
        )
        columns = ", ".join(column.replace("|", " or ") for column in spec.columns)
        return (
            f"Set `{self.benchmark}.path` to a folder with {files} (also .json, .csv, .parquet, .gz), to one file, or to a data set on "
            f"the Hub such as {spec.hub[0]}; the columns are {columns}."
        )

    def _read(self, contents: dict[str, str]) -> tuple[tuple[DataRow, ...], tuple[DataRow, ...]]:
        """Return the rows that contain the problems and the rows that contain the examples."""
        spec, (hub, config, split) = self.definition, self.definition.hub
        place = Path(self.path or hub).expanduser()
        shot_split = spec.shot_split if self.shot_count and self.shots_path is None else ""
        file = _file_in(place, spec.files) if place.is_dir() else place
        if file is not None and file.is_file():
            problems = read_rows(file, contents)
            references = place / "reference_answer" / "gpt-4.jsonl"
            if self.benchmark == "mt_bench" and references.is_file():
                problems = _with_references(problems, read_rows(references, contents))
            shots = _file_in(place, [shot_split]) if shot_split else None
            if shots is not None:
                return problems, read_rows(shots, contents)
            return problems, problems if self.benchmark == "mbpp" else ()  # one file has all splits of MBPP
        if place.is_dir() or (self.path or hub).endswith(SUFFIXES) or (self.path or hub).count("/") != 1:
            raise AbsentData(f"There is no such file at '{place}'.")
        name, config = self.path or hub, config if self.path in (None, hub) else None
        others = hub_rows(name, config, shot_split, contents) if shot_split else ()
        return hub_rows(name, config, split, contents), others

    def _checked(self, rows: Sequence[DataRow]) -> Sequence[DataRow]:
        for row in rows:
            for column in self.definition.columns:
                if not any(row.fields.get(name) not in (None, "") for name in column.split("|")):
                    raise DataError(
                        f"{row.place} has no column {column.replace('|', ' or ')}. {self._wanted}"
                    )
        return rows

    def contents(self) -> Mapping[str, str]:
        """Return the hash of each file or hub split that was read."""
        return self.rows.contents

    # -------- The environment

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the two splits. There are no training tasks."""
        return {"train": "nothing", "test": f"{self.benchmark}, {self.path or self.definition.hub[0]}"}

    @property
    def asked(self) -> Sequence[tuple[AnyJudge, QuestionCounts]]:
        """The judge, with one query for each answer."""
        return [] if self.judge is None else [(self.judge, QuestionCounts(episode=1))]

    def check(self, agents: Sequence[str]) -> None:
        """Read all data. Raises ConfigError without a judge, DataError for data, and SandboxError if programs cannot run here."""
        if self.benchmark == "mt_bench" and self.judge is None:
            raise ConfigError(
                "`mt_bench` needs a judge. Set `mt_bench.judge={endpoint: URL, model: NAME}`, or `mt_bench.judge={path: MODEL}`."
            )
        _ = self.rows, self._prompts
        if self.definition.metrics == ("pass",):
            require(backend(self.sandbox))

    def size(self, split: Split) -> int:
        """Return the number of problems, which are all in the split `test`."""
        return len(self.rows.problems) if split == "test" else 0

    def task(self, split: Split, index: int) -> Task:
        """Return the problem at an index, with the benchmark's prompt as the question."""
        spec, row = self.definition, self.rows.problems[index]
        prompt = spec.prompt(row, self.rows.shots, self.form)
        return Task(f"{split}-{index}", prompt, {"row": index}, rendered=self.rendered_prompts)

    def second(self, task: Task, answer: str, sample: int) -> Task:
        """Return the second question of a conversation of `mt_bench`, after the answer to the first question."""
        first, then = turns_of(self.rows.problems[task.data["row"]])[:2]
        talk = (Message("user", first), Message("assistant", answer), Message("user", then))
        return Question(talk).task(f"{task.id}-{sample}-second", {**task.data, "first": answer})

    def start(self, task: Task, agents: Sequence[str], seed: int) -> BenchmarkState:
        """Start an episode of one problem and return its state."""
        return BenchmarkState(self, task, agents)

    def extract(self, text: str) -> str | None:
        """Return the answer in a text in the form that a vote compares, or None if the text contains no answer."""
        return self.definition.answer(self.definition.said(text, self.form), self.main)

    @property
    def main(self) -> str:
        """The metric that is the success."""
        return self.metric or self.definition.metrics[0]

    @cached_property
    def _prompts(self) -> mt_bench.Prompts:
        return mt_bench.read_prompts(self.judge_prompts)

    async def grades(self, text: str, task: Task) -> Mapping[str, Grade]:
        """Return the grade of an answer by each metric."""
        case = Case(
            self.rows.problems[task.data["row"]],
            self.form,
            self.sandbox,
            None if self.judge is None else self._judges.of(self.judge),
            self._prompts,
            task.data.get("first"),
        )
        return await self.definition.grades(self.definition.said(text, self.form), case)

    def about(self, task: Task) -> Mapping[str, Json]:
        """Return the parts of the benchmark to which a problem belongs: its level, or its category and turn."""
        fields = self.rows.problems[task.data["row"]].fields
        if self.benchmark == "mt_bench":
            turn = "turn 2" if "first" in task.data else "turn 1"
            return {turn: True, str(fields["category"]): True}
        level = fields.get("level") if self.benchmark == "math" else None
        return {} if level is None else {str(level): True}

    def described(self) -> dict[str, Any]:
        """Return how the benchmark was run, for the result: definition, prompt, examples, parser, score and data."""
        spec, rows = self.definition, self.rows
        shown = [spec.prompt(row, (), self.form) for row in rows.shots]
        judge = (
            {}
            if self.judge is None
            else {
                "judge": self.judge.model_dump(mode="json"),
                "judge_prompts": self.judge_prompts or "kapelle",
                "judge_prompts_sha256": hashlib.sha256(json.dumps(self._prompts).encode()).hexdigest(),
                "references": sum(bool(row.fields.get("reference")) for row in rows.problems),
            }
        )
        return {
            "name": self.benchmark,
            "paper": spec.paper,
            "definition": spec.source,
            "form": self.form,
            "shots": len(rows.shots),
            "shot_rows": [row.place for row in rows.shots],
            "prompt_sha256": hashlib.sha256(
                "\0".join([*shown, self.task("test", 0).question]).encode()
            ).hexdigest(),
            "stops": list(spec.stops),
            "parser": spec.parser,
            "metric": self.main,
            "metrics": list(spec.metrics),
            "problems": len(rows.problems),
            "data": dict(rows.contents),
            **judge,
        }


class BenchmarkState(BaseState, Scorable):
    """The state of one problem. The first step answers it. Each text is graded once, also if several agents wrote it."""

    def __init__(self, benchmark: Benchmark, task: Task, agents: Sequence[str]) -> None:
        super().__init__(task, agents)
        self._benchmark = benchmark
        self._known: dict[str, Mapping[str, Grade]] = {}
        self._outcome: Outcome | None = None

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Grade the answers. Raises EpisodeError if an agent is unknown or an answer cannot be graded."""
        if self.over:
            raise EpisodeError("The problem has already been answered. A benchmark allows one step.")
        require_agents(actions, self.agents, "answered")
        answer = final if final is not None else list(actions.values())[-1]
        grades = await self._graded(answer)
        # A judge reads only the answer of the team.
        judged = self._benchmark.judge is not None
        rewards = {
            name: grades[self._benchmark.main].score if judged else await self.score(name, text)
            for name, text in actions.items()
        }
        info: dict[str, Json] = {
            **self._benchmark.about(self.task),
            **{metric: g.score for metric, g in grades.items() if len(grades) > 1 and g.status != "ungraded"},
            "answer": grades[self._benchmark.main].answer,
            "explanation": grades[self._benchmark.main].explanation,
        }
        self._outcome = Outcome(rewards, grades[self._benchmark.main].score, info)
        self.over = True
        return {}

    async def score(self, agent: str, text: str) -> float:
        """Return the score of a text. The text does not count as an answer."""
        return (await self._graded(text))[self._benchmark.main].score

    async def _graded(self, text: str) -> Mapping[str, Grade]:
        if text not in self._known:
            work = self._benchmark.grades(text, self.task)
            grades = await within("Grading an answer", "grader", patience_here.get().grader, work)
            if (grade := grades[self._benchmark.main]).status == "ungraded":
                raise EpisodeError(f"The grader gave no verdict: {grade.explanation}")
            self._known[text] = grades
        return self._known[text]

    def outcome(self) -> Outcome:
        """Return the outcome. An episode without an answer is truncated and has success 0."""
        return self._outcome or Outcome({}, 0.0, self._benchmark.about(self.task), truncated=True)


def _file_in(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the first file in a folder with one of the names and a suffix of a data file, or None."""
    every = (folder / f"{name}{suffix}" for name in names for suffix in SUFFIXES)
    return next((file for file in every if file.is_file()), None)


def _with_references(problems: Sequence[DataRow], answers: Sequence[DataRow]) -> tuple[DataRow, ...]:
    """Return the rows of MT-Bench with the reference answers of FastChat's `reference_answer/gpt-4.jsonl`."""
    known = {row.fields["question_id"]: row.fields["choices"][0]["turns"] for row in answers}
    return tuple(
        DataRow(row.place, {**row.fields, "reference": known.get(row.fields["question_id"])})
        for row in problems
    )
