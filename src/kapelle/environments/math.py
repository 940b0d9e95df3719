r"""Questions from a data set whose answers can be checked automatically. The default data set is GSM8K.

The answer of a row is the text after `####` in its answer field (GSM8K), otherwise the content of its last `\boxed{…}` (MATH),
otherwise the whole field. Answers are compared by their exact mathematical value (`grading.math`): numbers in context (`x = 5`,
`5\text{ cm}`), expressions, lists, sets, intervals, points, matrices and equations. If the exact comparison cannot decide, the
package math-verify compares the answers. The package math-verify runs in a process that all episodes share and that starts on first
use. An answer that takes more than 3 s of CPU time counts as incorrect.

Demonstrations are the solutions of the data set, without the `<<48/2=24>>` annotations of GSM8K.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from string import ascii_uppercase
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from kapelle.environments.data.conversations import Question, field_of, question_in, text_in
from kapelle.environments.data.source import DataWithQuestions, Words
from kapelle.environments.grading.code.programs import program_of
from kapelle.environments.grading.math.grade import (
    Undecided,
    compare_math,
    gold_problem,
    library_problem,
    read_math,
    shared_math_processes,
    unless_copied,
)
from kapelle.environments.grading.math.sameness import Percent, math_form
from kapelle.environments.grading.text.extraction import ExtractionRule, extract, marked
from kapelle.environments.grading.text.match import grade_choice
from kapelle.environments.grading.verdict import Grade, no_answer
from kapelle.environments.questions import Answers, Questions
from kapelle.environments.sandbox.contract import Limits
from kapelle.environments.sandbox.pool import backend, require, shared_pool
from kapelle.environments.sandbox.session import run
from kapelle.runtime.row_files import DataRow
from kapelle.settings.base import FROM_HERE_ON
from kapelle.types import Json, Message, Split, Task

# -------- Answers by program: the agent writes Python, the sandbox runs it, and its last line of output is the answer

LIMITS = Limits(wall_s=5.0, cpu_s=3.0, memory_bytes=256 * 1024**2)
PARALLEL = 2
"""The maximum number of programs that each process runs in parallel."""


class Printed(NamedTuple):
    """The printed answer of a program, or the reason why there is none."""

    answer: str | None
    """The last non-empty line of the output, or None if the output is empty or the program failed."""
    problem: str
    """The reason why there is no answer, or an empty string if there is an answer."""


async def printed_by(text: str, backend: str) -> Printed:
    """Run the program in a text in the sandbox and return the last line that it prints.

    Raises SandboxError if the sandbox is unavailable.
    """
    program = program_of(text)
    if program is None:
        return Printed(None, "the text contains no program")
    pool = shared_pool(backend, LIMITS, PARALLEL)
    files = {"answer.py": program.encode("utf-8", "surrogatepass")}
    command = [pool.python, "-I", "-B", "answer.py"]
    result = await pool.call(functools.partial(run, pool, files, command, b"", LIMITS))
    if result.limit is not None:
        return Printed(None, f"the program reached its limit of {result.limit}")
    if result.exit_code != 0:
        last = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return Printed(None, " ".join(["the program failed:", *last])[:500])
    lines = [line.strip() for line in result.stdout.decode(errors="replace").splitlines() if line.strip()]
    return Printed(lines[-1], "") if lines else Printed(None, "the program printed nothing")


_CHOICES = ("choices", "options")
Role = Literal["work", "answer", "solve"]
"""The role of an agent's script. `work` writes the solution up to its answer. `answer` writes only the answer. `solve` writes both."""


class Math(DataWithQuestions, Questions):
    """Questions from a data set. An agent's text is graded by its final answer."""

    name: Literal["math"] = "math"
    path: str = "openai/gsm8k"
    config: str | None = "main"
    question_field: str = "question"
    """The field that contains the question. A dot in the name selects a field inside an object. If the field contains a conversation
    (as `prompt` in verl and siiRL), system messages are not part of the question."""
    answer_field: str = "answer"
    """The field that contains the answer. In the format of verl and siiRL, this field is `reward_model.ground_truth`."""
    choices_field: str | None = None
    """The field that contains the options of a multiple-choice question: a list of strings, or an object with `text` and `label`. The
    question lists the options with letters. The row's answer is the letter of an option, the index of an option counted from 0, or
    the text of an option. If null, the field `choices` or `options` is used if the row has such a field."""
    level_field: str = "level"
    """The field that contains the difficulty of a question. Tasks store the value as `level`, which `tasks.curriculum` uses."""
    extraction: tuple[ExtractionRule, ...] = Field(default=("hash", "last_box"), min_length=1)
    """Rules that extract the answer from an agent's text, in the order in which they are applied."""
    answer_by: Literal["text", "program"] = "text"
    """How agents give their answers. With `program`, the agent writes Python code, either alone or in its last ```python block. The
    code runs in the sandbox, and the last line that it prints is the answer."""
    sandbox: Annotated[str, FROM_HERE_ON] = "bubblewrap"
    """The sandbox in which programs run if `answer_by` is `program`."""
    percent_is_unit: bool = True
    """Whether the percent sign is a unit. If true, the answer 50% means 50, as in GSM8K, where the unit is part of the question. If
    false, 50% means 0.5."""
    roles: Mapping[str, Role] = Field(default={"reasoner": "work", "actor": "answer"})
    """Mapping from an agent to the role of its script. Agents that are not listed have the role `solve`."""

    def _key(self) -> tuple[str, str, Words]:
        return self.question_field, "question_field", question_in

    def _read(self, row: DataRow) -> str:
        return self.gold_of(row)

    def question_of(self, row: DataRow) -> Question:
        """Return the question in a row, followed by its options if there are any."""
        question, options = super().question_of(row), self._options(row)
        if options is None:
            return question
        listed = "\n".join(f"{letter}. {text}" for letter, text in options.items())
        return question.worded(lambda text: f"{text}\n\n{listed}")

    def _options(self, row: DataRow) -> Mapping[str, str] | None:
        """Return a mapping from letters to the options of a multiple-choice question, or None for any other question."""
        field = self.choices_field or next((name for name in _CHOICES if row.fields.get(name)), None)
        if field is None:
            return None
        value = field_of(row, field, "choices_field")
        texts, labels = value, None
        if isinstance(value, Mapping) and "text" in value:
            texts, labels = value["text"], value.get("label")
        elif isinstance(value, Mapping):
            texts, labels = list(value.values()), list(value)
        if not isinstance(texts, list) or not 1 < len(texts) <= len(ascii_uppercase):
            raise row.unusable(f"the field '{field}' must be a list of options", "choices_field")
        named = list(map(str, ascii_uppercase[: len(texts)] if labels is None else labels))
        if len(set(named)) != len(texts) or any(isinstance(text, Mapping | list) for text in texts):
            raise row.unusable(
                f"the field '{field}' must contain a string and a distinct letter for each option"
            )
        return dict(zip(named, map(str, texts), strict=True))

    def _right_option(self, row: DataRow, options: Mapping[str, str]) -> str:
        """Return the letter of the correct option in a multiple-choice question."""
        value = field_of(row, self.answer_field, "answer_field")
        letters = list(options)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # pandas stores integers with a missing value as floats
        written = str(value).strip()
        if written in options:
            return written
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(letters):
            return letters[value]
        by_text = [letter for letter, text in options.items() if text.strip() == written]
        if len(by_text) == 1:
            return by_text[0]
        if written.isdecimal() and int(written) < len(letters):
            return letters[int(written)]
        letter = written.strip("().").upper()
        if letter in options and not by_text:
            return letter
        raise row.unusable(
            f"the answer {written[:40]!r} is not one of the options {', '.join(letters)}",
            "answer_field",
        )

    def check(self, agents: Sequence[str]) -> None:
        """Read both splits. Raises DataError, which names files and lines, if too many rows have no answer.

        If `answer_by` is `program`, raises SandboxError if the sandbox is unavailable on this machine.
        """
        if self.answer_by == "program":
            require(backend(self.sandbox))
        self.skipped()

    def gold_of(self, row: DataRow) -> str:
        """Return the gold answer of a row. For a multiple-choice question, the gold answer is a letter.

        Raises DataError if there is no answer.
        """
        options = self._options(row)
        if options is not None:
            return self._right_option(row, options)
        written = self._written(row).strip()
        gold, problem = written, ""
        if "####" in written or "\\boxed{" in written:
            found = extract(written, ("hash", "last_box"))
            gold, problem = found.text or "", found.problem
        problem = problem or gold_problem(gold) or ""
        if problem or gold.casefold() == "nan":
            raise row.unusable(
                f"the answer '{gold[:40]}' cannot be read ({problem.rstrip('.') or 'it is missing'})"
            )
        return gold

    def doubts(self) -> Sequence[str]:
        """Return a warning with the number of gold answers that math-verify cannot parse, and with the first of them as an example.

        Only gold answers that must be compared by math-verify are checked.
        """
        rows = (*self.rows.train, *self.rows.test)
        golds = {self.gold_of(row) for row in rows if self._options(row) is None}
        left = sorted(gold for gold in golds if gold_problem(gold) is None)
        chosen = left[:: -(-len(left) // MOST_ASKED) or 1]
        pool = shared_math_processes()
        unread = [gold for gold in chosen if library_problem(gold, pool)]
        if not unread:
            return []
        doubt = (
            f"{len(unread)} of {len(chosen)} unusual gold answers cannot be read, such as '{unread[0][:40]}'. An episode fails unless "
            "its answer has exactly the same spelling. Remove their rows"
        )
        return [doubt]

    def _written(self, row: DataRow) -> str:
        text = text_in(row, self.answer_field, "answer_field")
        if text.strip().casefold() in ("nan", "inf", "-inf"):
            raise row.unusable(f"the field '{self.answer_field}' is {text}, not an answer")
        return text

    @cached_property
    def _parts(self) -> frozenset[str]:
        """The values of the column `data_source` of verl, or an empty set if all rows have the same value."""
        rows = (*self.rows.train, *self.rows.test)
        found = frozenset(str(row.fields["data_source"]) for row in rows if "data_source" in row.fields)
        return found if len(found) > 1 else frozenset()

    def task(self, split: Split, index: int) -> Task:
        """Return the question at an index."""
        row = self.rows.of(split)[index]
        options = self._options(row)
        choices = {} if options is None else {"choices": options}
        part = {"part": str(row.fields.get("data_source"))} if self._parts else {}
        level = row.fields.get(self.level_field)
        hard = {"level": level} if isinstance(level, str | int | float) else {}
        return self.question_of(row).task(
            f"{split}-{index}",
            {"answer": self.gold_of(row), **part, **hard, **choices},
            rendered=self.rendered_prompts,
        )

    def about(self, task: Task) -> Mapping[str, Json]:
        """Return the part of the data to which the question belongs, if the data have several parts."""
        part = task.data.get("part")
        return {} if part is None else {"part": part, f"part/{part}": True}

    @property
    def answers(self) -> Answers:
        """The grader of answers. An answer is a mathematical answer or a program that prints the answer."""
        return Answers(self._graded, self._normal_form)

    async def _graded(self, text: str, task: Task) -> Grade:
        answer, options = task.data["answer"], task.data.get("choices")
        if options is None or self.answer_by == "program":
            return unless_copied(await self.grade(text, answer), answer, task.question)
        return grade_choice(text, answer, options, self.extraction)

    async def grade(self, text: str, answer: str) -> Grade:
        """Return the grade of the final answer in a text, compared with the gold answer."""
        if self.answer_by == "program":
            printed = await printed_by(text, self.sandbox)
            if printed.answer is None:
                return no_answer(printed.problem)
            text = marked(printed.answer, self.extraction[0])
        read = read_math(text, answer, self.extraction, self._percent)
        if isinstance(read, Undecided):
            return await asyncio.to_thread(compare_math, read, shared_math_processes())
        return read

    def _normal_form(self, text: str) -> str | None:
        # Programs are compared as strings.
        if self.answer_by == "program":
            return program_of(text)
        found = extract(text, self.extraction).text
        return None if found is None else math_form(found, self._percent)

    @property
    def _percent(self) -> Percent:
        return "figure" if self.percent_is_unit else "hundredths"

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the part of the data set's solution that corresponds to the role of the agent."""
        if self.answer_by == "program":
            return f"```python\nprint({task.data['answer']!r})\n```"
        row = self.rows.row_of(task.id)
        options = task.data.get("choices")
        solution = _ANNOTATION.sub(
            "", self._written(row) if options is None else options[task.data["answer"]]
        )
        worked = solution.partition("####")[0].strip()
        answer = marked(task.data["answer"], self.extraction[0])
        role = self.roles.get(agent, "solve")
        if role == "work":
            return worked
        return answer if role == "answer" else f"{worked}\n{answer}"


MOST_ASKED = 200
"""The maximum number of gold answers that are checked with math-verify, chosen at equal intervals from all gold answers that
math-verify must parse. Each check takes about 35 ms."""
_ANNOTATION = re.compile(r"<<[^<>]*>>")
