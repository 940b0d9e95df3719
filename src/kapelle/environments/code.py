"""Programming problems with tests, from MBPP, HumanEval, programs that read and print, or templates.

Programs run only in the sandbox. If `max_attempts` is above 1, an agent reads a report on the shown tests after an incorrect
program and writes another program. Several attempts require a workflow in which the environment decides which agent moves
(`parallel`, `tool_use`). Workflows that end with one answer (`solo`, `chain`) accept one program per episode.

A problem defines the prompt, the tests that are shown in the prompt, and how a program is graded. Everything else about a problem
stays in the environment's process or in the separate sandbox of the tests.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from kapelle.environment import Answerable, Outcome, Retriable, Scorable, Scripted
from kapelle.environments.base import BaseState
from kapelle.environments.data.conversations import (
    Question,
    field_of,
    question_in,
    read_question,
    text_in,
)
from kapelle.environments.data.source import DataSettings, Splits, Words
from kapelle.environments.grading.code.grade import (
    REPLIES,
    CallTest,
    CodeGrade,
    OutputTest,
    ProgramTests,
    grade_calls,
    grade_output,
    grade_program,
    read_literal,
)
from kapelle.environments.grading.code.literal_tests import NotLiteral
from kapelle.environments.grading.code.programs import program_of, runnable, tree_of
from kapelle.environments.grading.code.style import style_score, syntax_score
from kapelle.environments.programming import TEMPLATES, HeldOut, Programming, candidates, problem
from kapelle.environments.questions import Difficulty, describe, place_of, require_agents, up_to
from kapelle.environments.sandbox.contract import Limits
from kapelle.environments.sandbox.pool import Pool, backend, require, shared_pool
from kapelle.environments.sandbox.session import Backend
from kapelle.errors import DataError, EpisodeError, did_you_mean
from kapelle.runtime.deadlines import patience_here, within
from kapelle.runtime.row_files import DataRow
from kapelle.settings.base import FREE, FROM_HERE_ON
from kapelle.types import Json, Message, Split, Task

Rows = Literal["mbpp", "humaneval", "stdio"]
Format = Literal[Rows, "generated"]
"""The format of the problems. `mbpp`: rows of MBPP (arXiv:2108.07732), sanitized or not. `humaneval`: rows of HumanEval
(arXiv:2107.03374) or BigCodeBench (arXiv:2406.15877). `stdio`: programs that read and print, and functions in the format of APPS or
LiveCodeBench (see `stdio_problem`). `generated`: problems generated from templates, which need no data (see
`environments.programming`)."""


# -------- Problems in the formats of published data sets: MBPP, HumanEval, standard input and output


@dataclass(frozen=True, slots=True)
class CodeProblem:
    """A programming problem with its tests."""

    prompt: str
    """The prompt of the agent."""
    shown: tuple[str, ...]
    """The first tests, in the form in which the prompt shows them. The other tests are never shown to agents."""
    grade: Callable[[str, Backend, Limits], CodeGrade]
    """A function that runs a program against all tests and returns when the tests have ended. The function raises SandboxError if the
    sandbox is unavailable."""
    solution: str | None
    """A correct program, or None if the data contain none."""
    begun: str = ""
    """The beginning of the program that is given in the prompt. A completion may continue this code."""
    question: Question | None = None
    """The prompt as a conversation, or None if the row contains no conversation."""
    untrusted: str = ""
    """The reason why a program could manipulate the result of the tests, or an empty string if no program can."""


def mbpp_problem(row: DataRow) -> CodeProblem:
    """Return the problem in a row of MBPP, sanitized or not. The prompt shows the first assertion, and all assertions are graded.

    Raises DataError if the row has a different format. The reference solution determines which names the tests take from the
    candidate: if a program defines `set` or `abs`, the tests use this definition only if the problem requires such a function.
    """
    fields = row.fields
    try:
        programs = (*fields["test_list"], *fields.get("challenge_test_list", ()))
        sanitized = "test_imports" in fields
        setup = "\n".join(fields["test_imports"]) if sanitized else fields["test_setup_code"]
        tests = ProgramTests(programs, setup, *_shared_names(fields["code"], (setup, *programs)))
        shown = programs[0].strip()
        prompt = f"{fields['prompt' if sanitized else 'text']}\n\nYour code must pass this test:\n{shown}"
        return _of_programs(prompt, (shown,), tests, fields["code"])
    except (KeyError, TypeError, IndexError, AttributeError, SyntaxError) as error:
        raise DataError(f"The row does not have the format of MBPP: {error!r}.") from None


def humaneval_problem(row: DataRow) -> CodeProblem:
    """Return the problem in a row of HumanEval or BigCodeBench. Agents see only the examples in the docstring of the function.

    Raises DataError if the row has a different format. A program may define the function or continue at the end of the prompt, and
    can use the imports and helper functions of the prompt. The `check` function, or the test case, counts as one test, so there is
    no partial credit.
    """
    fields = row.fields
    try:
        prompt, entry = fields.get("prompt") or fields["complete_prompt"], fields["entry_point"]
        call = f"\n\ncheck({entry})\n" if re.search(r"^def check\b", fields["test"], re.MULTILINE) else ""
        # The first name: `f` in `f`, and `Solution` in `Solution().f`.
        tests = ProgramTests((fields["test"] + call,), candidate=tuple(re.findall(r"\w+", entry)[:1]))
        return _of_programs(prompt, (), tests, fields["canonical_solution"], prompt.rstrip("\n") + "\n")
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"The row does not have the format of HumanEval: {error!r}.") from None


def _of_programs(
    prompt: str, shown: tuple[str, ...], tests: ProgramTests, solution: str, begun: str = ""
) -> CodeProblem:
    untrusted = ""
    try:
        read_literal(tests)
    except NotLiteral as reason:
        untrusted = f"{reason}"
    except SyntaxError:
        pass  # such tests cannot grade any program, and the grade reports this

    def grade(program: str, sandbox: Backend, limits: Limits) -> CodeGrade:
        # Whether tests that are not literal are allowed was decided by `untrusted_tests` before this call.
        return grade_program(headed(begun, program), tests, sandbox, limits, allow_untrusted=True)

    return CodeProblem(prompt, shown, grade, solution, begun, untrusted=untrusted)


def _shared_names(solution: str, programs: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the top-level names in a solution that are used by `programs`, and the subset of these names that are classes."""
    body = [node for node in tree_of(solution).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    nodes = [node for program in programs for node in ast.walk(tree_of(program))]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    names = sorted({node.name for node in body} & used)
    return tuple(names), tuple(sorted({node.name for node in body if isinstance(node, ast.ClassDef)} & used))


def stdio_problem(row: DataRow, question: str, tests: str = "input_output") -> CodeProblem:
    """Return the problem in a row for a program that reads standard input and prints, or for a function.

    The text of the problem is in the field named by `question`. Tests are in the fields `public_tests`, `private_tests` and
    `generated_tests`, or in the field named by `tests`. Only public tests are shown. The fields have the format of CodeContests
    (`{"input": […], "output": […]}`, or a list of `{"input": …, "output": …}`) or of `input_output` in APPS (`{"inputs": […],
    "outputs": […]}`, also as a JSON string). The field `solution`, or the first Python 3 program in `solutions` (CodeContests), is
    a correct program. The field `tolerance` applies to printed real numbers. If the tests contain `fn_name` (APPS), each input is a
    list of arguments of that function. If `testtype` is `functional` (LiveCodeBench, with the fields `public_test_cases` and
    `private_test_cases`), each line of an input is one argument in JSON.
    """
    called = _function(row, tests) or _functional(row, tests)
    if called is not None:
        name, calls, shown = called
        begun = row.text("starter_code", "path").strip() if row.fields.get("starter_code") else ""
        more = [f"Define the function `{name}`." + (f" Begin with:\n{begun}" if begun else "")]
    else:
        tolerance = float(row.text("tolerance", "path")) if "tolerance" in row.fields else 1e-6
        public = _tests(row, PUBLIC, tolerance)
        every = public + _tests(row, (*PRIVATE, tests), tolerance)
        if not every:
            raise DataError(f"{row.place} has no tests. Add `public_tests`, `private_tests` or `{tests}`.")
        shown = tuple(_example(test.stdin, test.stdout) for test in public)
        more = []

    def grade(program: str, sandbox: Backend, limits: Limits) -> CodeGrade:
        if called is None:
            return grade_output(program, every, sandbox, limits)
        return grade_calls(headed(USUAL_IMPORTS, runnable(program)), calls, sandbox, limits)

    whole = read_question(row, question, "question_field").worded(
        lambda text: "\n\n".join([text.strip(), *shown, *more])
    )
    return CodeProblem(whole.text, shown, grade, _solution(row), question=whole)


def _example(read: str, printed: str) -> str:
    """Return a test in the form in which it is shown in the prompt."""
    return f"Input:\n{read.rstrip()}\nOutput:\n{printed.rstrip()}"


def generated_problem(made: Programming) -> CodeProblem:
    """Return the problem that was generated from a template. The prompt shows the first tests."""
    calls = tuple(CallTest(made.function, arguments, expected) for arguments, expected in made.tests)
    return CodeProblem(
        made.prompt,
        made.shown,
        lambda program, sandbox, limits: grade_calls(program, calls, sandbox, limits),
        made.solution,
    )


PUBLIC = ("public_tests", "public_test_cases")
PRIVATE = ("private_tests", "private_test_cases", "generated_tests")
"""Fields that contain private tests. The names that end in `_cases` occur in LiveCodeBench."""


def _tests(row: DataRow, fields: Sequence[str], tolerance: float) -> tuple[OutputTest, ...]:
    found: list[OutputTest] = []
    for field in fields:
        value = _parsed(row, field)
        inputs: Json = ()
        outputs: Json = () if value is None else None
        if isinstance(value, Mapping):
            inputs, outputs = (value.get(name, value.get(f"{name}s")) for name in ("input", "output"))
        elif isinstance(value, Sequence) and all(isinstance(test, Mapping) for test in value):
            inputs, outputs = ([test.get(name) for test in value] for name in ("input", "output"))
        if not (_texts(inputs) and _texts(outputs) and len(inputs) == len(outputs)):
            raise row.unusable(f"`{field}` must contain equally many `input` and `output` strings")
        found += [OutputTest(read, printed, tolerance) for read, printed in zip(inputs, outputs, strict=True)]
    return tuple(found)


def _texts(value: Json) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)


def _parsed(row: DataRow, field: str) -> Json:
    value = row.fields.get(field)
    if "." in field and field not in row.fields and field.partition(".")[0] in row.fields:
        value = field_of(row, field, "tests_field")
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        if field == "private_test_cases":
            raise DataError(
                f"{row.place}: `{field}` is not JSON. LiveCodeBench publishes it as a compressed pickle, which could run code. Convert it "
                'to JSON, [{"input": …, "output": …, "testtype": …}], or remove the field.'
            ) from None
        raise row.unusable(f"`{field}` is not valid JSON: {error}") from None


def _functional(row: DataRow, tests: str) -> tuple[str, tuple[CallTest, ...], tuple[str, ...]] | None:
    """Return the function name, all test calls and the shown tests of a row in the format of LiveCodeBench.

    Returns None if the row has no functional tests, which means that its tests are for a whole program.
    """
    calls = list[CallTest]()
    shown = list[str]()
    others = 0
    name = ""
    for field in (*PUBLIC, *PRIVATE, tests):
        value = _parsed(row, field)
        for test in value if isinstance(value, list) else ():
            if not isinstance(test, Mapping) or test.get("testtype") != "functional":
                others += 1
                continue
            name = name or _func_name(row)
            try:
                arguments = tuple(json.loads(line) for line in test["input"].split("\n") if line.strip())
                calls.append(
                    CallTest(name, arguments, json.loads(test["output"]), tolerance=1e-6, rule="json")
                )
            except (KeyError, AttributeError, TypeError, ValueError, RecursionError) as error:
                raise row.unusable(
                    f"a functional test in `{field}` needs JSON arguments, one per line, and a JSON result: {error!r}"
                ) from None
            if field in PUBLIC:
                shown.append(_example(test["input"], test["output"]))
    if calls and others:
        raise row.unusable("it mixes tests of a function with tests of a whole program")
    return (name, tuple(calls), tuple(shown)) if calls else None


def _func_name(row: DataRow) -> str:
    """Return the name of the function that a row of LiveCodeBench tests."""
    about = _parsed(row, "metadata")
    name = about.get("func_name") if isinstance(about, Mapping) else None
    if not (isinstance(name, str) and name.isidentifier()):
        raise DataError(
            f'{row.place} has functional tests but no `func_name` in `metadata`. Add {{"func_name": …}}.'
        )
    return name


def _function(row: DataRow, tests: str) -> tuple[str, tuple[CallTest, ...], tuple[str, ...]] | None:
    """Return the function name, all test calls and an empty tuple (for the shown tests) of a row in the format of APPS.

    Returns None if the row has no function name, which means that its tests are for a whole program.
    """
    value = _parsed(row, tests)
    if not isinstance(value, Mapping) or value.get("fn_name") is None:
        return None
    name: Any = value.get("fn_name")
    inputs, outputs = (_lists(value.get(field)) for field in ("inputs", "outputs"))
    named = isinstance(name, str) and name.isidentifier()
    if not (named and all(isinstance(each, list) for each in inputs) and len(inputs) == len(outputs) > 0):
        raise row.unusable(
            f"`{tests}` needs a list of arguments in `inputs` and a result in `outputs` for each call of {name!r}"
        )
    pairs = zip(inputs, outputs, strict=True)
    calls = (CallTest(name, tuple(given), result, tolerance=1e-6, rule="apps") for given, result in pairs)
    return name, tuple(calls), ()


def _lists(value: Json) -> list[Any]:
    return value if isinstance(value, list) else []


PYTHON_3 = 3
"""The number that represents Python 3 in the language fields of CodeContests."""


def _solution(row: DataRow) -> str | None:
    if "solution" in row.fields:
        return row.text("solution", "path")
    several = _parsed(row, "solutions")
    if isinstance(several, Mapping):
        written = zip(_lists(several.get("language")), _lists(several.get("solution")), strict=False)
        several = [text for language, text in written if language == PYTHON_3]
    return several[0] if _texts(several) and several else None


RewardPart = Literal["passed", "solved", "runs", "syntax", "style"]


def _weights(weights: Mapping[RewardPart, float]) -> Mapping[RewardPart, float]:
    for part, weight in weights.items():
        if not 0.0 <= weight < math.inf:
            raise ValueError(f"`reward_weights.{part}` is {weight}; set it to 0 or more")
    if weights and not weights.get("passed", 0.0) + weights.get("solved", 0.0) > 0.0:
        raise ValueError(
            "`reward_weights` gives no reward for correct results. Set a weight for `passed` or `solved`, such as "
            "{passed: 1, syntax: 0.1}"
        )
    return weights


RewardWeights = Annotated[Mapping[RewardPart, float], AfterValidator(_weights)]
MBPP_SPLITS: Mapping[Split, range] = {"train": range(601, 975), "test": range(11, 511)}
"""The ranges of `task_id` in the published splits of MBPP. The ids 1 to 10 are intended for prompts, and 511 to 600 for validation."""


# -------- Imports that a program can omit

USUAL_IMPORTS = """\
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from operator import *
from typing import *
from builtins import *
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
"""
"""The imports that LeetCode and the graders of APPS and LiveCodeBench provide. The built-in functions `pow` and `abs` are not
replaced, and `bisect` remains a module."""


def headed(header: str, program: str) -> str:
    """Return a header followed by a program.

    Lines such as `from __future__ import …` are moved from the program to the beginning of the result, because Python requires them
    there.
    """
    try:
        body = tree_of(program).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return header + program  # the program is a body that continues where the header ends
    lines, first = program.split("\n"), ""
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            first += f"{ast.unparse(node)}\n"
            for place in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[place] = ""
    return first + header + "\n".join(lines)


# -------- An episode: agents write programs and read the reports on the shown tests

ALLOW = "set `environment.untrusted_tests: allow` to use them"

NO_PROGRAM = CodeGrade((), explanation="no program was found")
SHOWN_CHARACTERS = 1000
"""The maximum number of characters of each test's explanation that an agent reads."""


class CodeState(BaseState, Scorable, Retriable):
    """The state of one problem. Each agent that acts writes its own programs, and an agent's last program determines its reward.

    After an incorrect program, an agent reads a report on the shown tests and may write another program. For the hidden tests, the
    report states only that not all of them passed, because the program's output or exceptions could reveal the inputs of these
    tests.
    """

    def __init__(
        self,
        problem: CodeProblem,
        task: Task,
        agents: Sequence[str],
        sandboxes: Pool,
        settings: Code,
        excluded: int = 0,
    ) -> None:
        super().__init__(task, agents)
        self._problem = problem
        self._sandboxes = sandboxes
        self._settings = settings
        self._excluded = excluded
        self._max_attempts = settings.max_attempts
        self._most = 1
        self._attempts: dict[str, list[CodeGrade]] = {agent: [] for agent in agents}
        self._texts: dict[str, str] = {}
        self._finals: list[CodeGrade] = []

    def allow_answers(self, most: int) -> None:
        """Allow the team to submit up to `most` programs, one after another, until a program passes all tests."""
        self._most = self._max_attempts = most

    def observe(self, agent: str) -> str:
        """Return the problem, or after an incorrect program the report on the agent's last program.

        If the team may submit several programs as its answer, the report is on the team's last program.
        """
        grades = self._finals if self._most > 1 and self._finals else self._attempts[agent]
        if not grades:
            return self._problem.prompt
        return self._report(grades)

    def _report(self, grades: Sequence[CodeGrade]) -> str:
        return feedback(grades[-1], self._problem.shown, len(grades), self._max_attempts)

    def movers(self) -> tuple[str, ...]:
        """Return the agents that may write another program because they have attempts left and no correct program."""
        if self.over:
            return ()
        if (
            self._most > 1 and self._finals
        ):  # the team writes another program, even if one agent's program was correct
            return tuple(self._attempts)
        return tuple(
            agent
            for agent, grades in self._attempts.items()
            if len(grades) < self._max_attempts and not (grades and grades[-1].solved)
        )

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Run the programs in the agents' texts. Raises EpisodeError if an agent is unknown or the tests could not be run.

        The text `final` is the answer of the team and ends the episode, unless its program fails and the team may submit another
        answer.
        """
        require_agents(actions, self._attempts)
        for agent in actions:
            if agent not in self.movers():
                raise EpisodeError(f"'{agent}' has no attempts left; the limit is {self._max_attempts}.")
        texts = dict.fromkeys([*actions.values(), *([] if final is None else [final])])
        grades = dict(zip(texts, await asyncio.gather(*map(self._graded, texts)), strict=True))
        for agent, text in actions.items():
            self._attempts[agent].append(grades[text])
            self._texts[agent] = text
        if final is not None:
            self._finals.append(grades[final])
            self.over = grades[final].solved or len(self._finals) >= self._most
        return {}

    async def score(self, agent: str, text: str) -> float:
        """Return the reward of the program in a text. The program does not count as an attempt."""
        return self._reward(text, await self._graded(text))

    async def _graded(self, text: str) -> CodeGrade:
        program = program_of(text)
        if program is None:
            return NO_PROGRAM
        work = functools.partial(self._problem.grade, program, self._sandboxes, self._settings.limits)
        seconds = patience_here.get().grader
        grade = await within("Grading a program", "grader", seconds, self._sandboxes.call(work))
        if grade.status == "ungraded":
            raise EpisodeError(f"The tests could not be run: {grade.explanation}")
        return grade

    def _score(self, grade: CodeGrade) -> float:
        return grade.score if self._settings.partial_credit else float(grade.solved)

    def _reward(self, text: str, grade: CodeGrade) -> float:
        """Return the reward of a program.

        The reward is the score of the tests or, if `reward_weights` is set, the weighted mean of its parts.
        """
        weights = self._settings.reward_weights
        if not weights:
            return self._score(grade)
        parts = self._parts(text, grade)
        return sum(weight * parts[part] for part, weight in weights.items()) / sum(weights.values())

    def _parts(self, text: str, grade: CodeGrade) -> dict[RewardPart, float]:
        """Return the value in [0, 1] of each part of the reward that is listed in `reward_weights`."""
        program = program_of(text) or ""
        begun = self._problem.begun
        if (
            begun and program and syntax_score(program) < 1.0
        ):  # the program is the body of a function whose beginning is in the problem
            program = begun + program
        parts: dict[RewardPart, float] = {}
        for part in self._settings.reward_weights:
            if part == "passed":
                parts[part] = grade.score
            elif part == "solved":
                parts[part] = float(grade.solved)
            elif part == "syntax":
                parts[part] = syntax_score(program)
            elif part == "style":
                parts[part] = grade.score * style_score(program)
            else:
                ended = sum(test.status in ("passed", "failed") for test in grade.tests)
                parts[part] = ended / len(grade.tests) if grade.tests else 0.0
        return parts

    def outcome(self) -> Outcome:
        """Return the outcome with the reward of each agent's last program. The outcome is truncated if no agent acted."""
        last = {agent: grades[-1] for agent, grades in self._attempts.items() if grades}
        rewards = {agent: self._reward(self._texts[agent], grade) for agent, grade in last.items()}
        # Success depends only on the score of the tests.
        scores = [self._score(grade) for grade in (self._finals[-1:] or last.values())]
        info: dict[str, Json] = {
            "attempts": {agent: len(self._attempts[agent]) for agent in last},
            "tests": {agent: [test.status for test in grade.tests] for agent, grade in last.items()},
            "explanations": {
                agent: grade.explanation or ("" if grade.solved else self._report(self._attempts[agent]))
                for agent, grade in last.items()
            },
        }
        if self._settings.untrusted_tests == "allow":
            info["trusted"] = not self._problem.untrusted
            info["untrusted"] = int(bool(self._problem.untrusted))
        elif self._excluded:
            info["problems_excluded"] = self._excluded
        if self._settings.reward_weights:
            info["reward_parts"] = {
                agent: dict(self._parts(self._texts[agent], grade)) for agent, grade in last.items()
            }
        return Outcome(rewards, sum(scores) / len(scores) if scores else 0.0, info, truncated=not last)


def feedback(grade: CodeGrade, shown: Sequence[str], attempt: int, most: int) -> str:
    """Return the report that an agent reads after an incorrect program.

    For the hidden tests, the report states only that not all of them passed.
    """
    begin = f"Attempt {attempt} of {most} failed."
    end = "Answer with the whole program again, in one block that opens with ```python and closes with ```."
    if grade is NO_PROGRAM:
        return f"{begin} No program was found. {end}"
    reports = []
    for test, outcome in zip(shown, grade.tests, strict=False):
        why = outcome.explanation[:SHOWN_CHARACTERS]
        reports.append(f"{test}\n# {outcome.status}{': ' if why else ''}{why}")
    if any(test.status != "passed" for test in grade.tests[len(shown) :]):
        reports.append("Tests that are not shown to you: not all passed.")
    return "\n\n".join([begin, *reports, end])


# -------- The environment


class Code(DataSettings, Answerable, Scripted):
    """Programming problems. The programs of agents are graded by running tests."""

    name: Literal["code"] = "code"
    format: Format = "mbpp"
    """The format of the problems, which is `mbpp`, `humaneval`, `stdio` or `generated`. With `generated`, no data are read."""
    difficulty: Annotated[Difficulty, up_to(3)] = (1, 3)
    """The minimum and maximum difficulty of generated problems, from 1 to 3."""
    templates: tuple[str, ...] = ()
    """The templates from which problems are generated. If empty, all templates of the given difficulty are used."""
    held_out: HeldOut = "problem"
    """How the test split of generated problems differs from the training split: in the parameters of the problems (`problem`) or in
    their templates (`template`)."""
    seed: int = 0
    """The seed of the problem generator. Different seeds generate different problems in a different order, but the split of a problem
    does not depend on the seed."""
    path: str = "google-research-datasets/mbpp"
    config: str | None = "full"
    published_split: bool = True
    """Whether the rows of a single MBPP file are split by `task_id` as published: 601 to 974 for training and 11 to 510 for testing."""
    question_field: str = "question"
    """The field that contains the text of the problem in the format `stdio`. A dot in the name selects a field inside an object. If
    the field contains a conversation, its system message becomes the system message of the task."""
    tests_field: str = "input_output"
    """The field that contains the private tests in the format `stdio`. In rows of verl, this field is `reward_model.ground_truth`."""
    max_attempts: int = Field(default=1, ge=1)
    """The maximum number of programs that an agent may write. The reward depends on the last program."""
    partial_credit: bool = False
    """Whether the reward is the fraction of tests that pass. If false, the reward is 1 if all tests pass, and 0 otherwise."""
    reward_weights: RewardWeights = Field(default={})
    """Mapping from the parts of the reward to their weights. The reward is the weighted mean of the parts. If empty, the reward is the
    score of the tests. The part `passed` is the fraction of tests that pass. The part `solved` is 1 if all tests pass, and 0
    otherwise. The part `runs` is the fraction of tests that end without an exception. The part `syntax` is 1 for a program that can
    be parsed, and otherwise the fraction of lines before the syntax error. The part `style` is the agreement with common
    conventions (`grading.code.style`), multiplied by `passed`. The success of an episode is always the score of the tests."""
    untrusted_tests: Literal["exclude", "allow"] = "exclude"
    """How to handle problems whose tests can be manipulated by a program. `exclude`: the problems are excluded from training and
    evaluation. `allow`: the tests run in the process of the program, and the episodes record `trusted: false`. The documentation
    page of this environment explains the risk."""
    sandbox: Annotated[str, FROM_HERE_ON] = "bubblewrap"
    """The sandbox in which programs run, which is `bubblewrap`, `docker`, or `unsafe_subprocess` (no isolation)."""
    cpu_s: Annotated[float, FREE] = Field(default=10.0, gt=0.0)
    """Maximum CPU time in seconds of a program for all tests together. In the format `stdio`, the limit applies to each test if the
    program reads standard input."""
    wall_s: Annotated[float, FREE] = Field(default=20.0, gt=0.0)
    """Maximum wall-clock time in seconds of a program, including waiting and delays on a busy machine."""
    memory_mb: Annotated[int, FREE] = Field(default=512, ge=64)
    """Maximum memory of a program in MiB."""
    output_mb: Annotated[int, FREE] = Field(default=1, ge=1)
    """Maximum amount of output, in MiB, that a program may print beyond the expected output."""
    parallel: Annotated[int, FREE] = Field(default=2, ge=1)
    """The maximum number of programs that are graded in parallel. Further programs wait."""

    @model_validator(mode="after")
    def _fits(self) -> Code:
        for name in self.templates:
            if name not in TEMPLATES:
                raise ValueError(f"there is no template '{name}'.{did_you_mean(name, TEMPLATES)}")
        if self.format != "generated" and (self.templates or self.held_out == "template"):
            raise ValueError(
                f"`{'templates' if self.templates else 'held_out'}` needs `format: generated`, but `format` is {self.format}"
            )
        for split in ("train", "test") if self.format == "generated" else ():
            if not candidates(split, self.difficulty, self.templates, self.held_out):
                raise ValueError(
                    f"no template of difficulty {list(self.difficulty)} belongs to the {split} split. Add `templates`, or widen "
                    "`difficulty`"
                )
        return self

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the file or hub split from which each split is read, or of the templates of generated problems."""
        if self.format == "generated":
            if self.held_out == "problem":
                return describe("programming problems", self.difficulty)
            return {
                split: f"generated programming problems of the templates {', '.join(self._names(split))}"
                for split in MBPP_SPLITS
            }
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

    def _names(self, split: Split) -> list[str]:
        return candidates(split, self.difficulty, self.templates, self.held_out)

    def contents(self) -> Mapping[str, str]:
        """Return the hash of each file or hub split that was read. For generated problems, the mapping is empty."""
        return {} if self.format == "generated" else super().contents()

    def skipped(self) -> Mapping[Split, str]:
        """Return a description of the excluded rows of each split, with reasons. For generated problems, the mapping is empty."""
        if self.format == "generated":
            return {}
        found = dict(super().skipped())
        for split in self._problems if self.untrusted_tests == "exclude" else ():
            if text := self._untrusted(split):
                found[split] = "; ".join([*filter(None, [found.get(split)]), text, ALLOW])
        return found

    def _read(self, row: DataRow) -> CodeProblem:
        assert self.format != "generated", "no rows are read"
        try:
            if self.format == "stdio":
                return stdio_problem(row, self.question_field, self.tests_field)
            return mbpp_problem(row) if self.format == "mbpp" else humaneval_problem(row)
        except DataError as fault:
            placed = str(fault) if str(fault).startswith(row.place) else f"{row.place}: {fault}"
            raise DataError(f"{placed} Check `environment.format: {self.format}`.") from None

    @cached_property
    def rows(self) -> Splits:
        """The usable rows of both splits. If the data are missing, the error message suggests generated problems, which need no data."""
        try:
            return super().rows
        except DataError as fault:
            if Path(self.path).expanduser().exists():
                raise
            raise DataError(
                f"{fault} To use generated problems, which need no data, set `environment.format: generated`."
            ) from None

    @cached_property
    def _problems(self) -> Mapping[Split, tuple[CodeProblem, ...]]:
        chosen: dict[Split, tuple[DataRow, ...]] = {"train": self.rows.train, "test": self.rows.test}
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
                f"'{self.path}' contains no problem of MBPP's published {empty[0]} split. Set "
                "`environment.published_split: false`."
            )
        return {split: tuple(map(self._read, kept)) for split, kept in chosen.items()}

    @cached_property
    def _usable(self) -> Mapping[Split, tuple[CodeProblem, ...]]:
        """The problems that may be used, given the setting `untrusted_tests`."""
        if self.untrusted_tests == "allow":
            return self._problems
        usable = {
            split: tuple(each for each in every if not each.untrusted)
            for split, every in self._problems.items()
        }
        for split, kept in usable.items():
            if not kept:
                raise DataError(f"'{self.path}', {split}: all {self._untrusted(split)}; {ALLOW}.")
        return usable

    def untrusted_count(self, split: Split) -> int:
        """Return the number of problems whose tests can be manipulated by a program."""
        return sum(bool(each.untrusted) for each in self._problems[split])

    def _untrusted(self, split: Split) -> str:
        """Return a phrase with the number of problems whose tests can be manipulated, or an empty string if there are no such problems."""
        count, total = self.untrusted_count(split), len(self._problems[split])
        return f"{count:,} of {total:,} problems have tests that a program could fool" if count else ""

    def remarks(self) -> Sequence[str]:
        """Return, for each split, a message with the number of problems with untrusted rewards, if such problems are allowed."""
        if self.format == "generated" or self.untrusted_tests == "exclude":
            return ()
        found = [(split, self._untrusted(split)) for split in self._problems]
        return tuple(
            f"{split}: {text}; their episodes record `trusted: false`." for split, text in found if text
        )

    @property
    def limits(self) -> Limits:
        """The resource limits of each program."""
        mebi = 1024**2
        # Returned values are larger than printed output, so these limits leave room for returned values.
        output = self.output_mb * mebi if self.format == "stdio" else max(self.output_mb * mebi, REPLIES)
        # A busy machine must not change a reward.
        return Limits(self.wall_s, self.cpu_s, self.memory_mb * mebi, output_bytes=output, patience=9.0)

    def check(self, agents: Sequence[str]) -> None:
        """Read both splits and check that the sandbox is available.

        Raises DataError if a row has a different format, and SandboxError if the sandbox is unavailable on this machine.
        """
        if self.format != "generated":
            _ = self._usable
        require(backend(self.sandbox))

    def size(self, split: Split) -> int | None:
        """Return the number of problems in a split, or None for generated problems, whose number is unlimited."""
        return None if self.format == "generated" else len(self._usable[split])

    def task(self, split: Split, index: int) -> Task:
        """Return the problem at an index. The task does not contain the tests."""
        problem = self._at(split, index)
        if problem.question is None:
            return Task(f"{split}-{index}", problem.prompt)
        return problem.question.task(f"{split}-{index}")

    def _at(self, split: Split, index: int) -> CodeProblem:
        if self.format != "generated":
            return self._usable[split][index]
        return generated_problem(
            problem(self.seed, split, index, self.difficulty, self.templates, self.held_out)
        )

    def start(self, task: Task, agents: Sequence[str], seed: int) -> CodeState:
        """Start an episode and return its state. Raises SandboxError if the sandbox is unknown."""
        sandboxes = shared_pool(self.sandbox, self.limits, self.parallel)
        split, index = place_of(task.id)
        excluded = 0 if self.format == "generated" else self.untrusted_count(split)
        return CodeState(self._at(split, index), task, agents, sandboxes, self, excluded)

    def extract(self, text: str) -> str | None:
        """Return the program in a text, or None if there is none. In a vote, identical programs count as the same answer."""
        program = program_of(text)
        return None if program is None else program.strip()

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the solution from the data set as a code block. Raises DataError if the data set contains no solution."""
        solution = self._at(*place_of(task.id)).solution
        if solution is None:
            raise DataError(f"Problem {task.id} in '{self.path}' has no solution.")
        return f"```python\n{solution.rstrip()}\n```"
