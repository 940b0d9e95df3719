"""The definition of each benchmark: its data, its prompt with examples (shots), its parser and its score.

The definitions agree with lm-evaluation-harness at commit 4e7e0d47 and FastChat at commit 0e6d3e4b (both read 2026-11) and with the
papers; `docs/howto/evaluate.md` lists every difference. A text is cut at the stop strings after it was generated, which gives the same
score as to stop there.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from kapelle.environments.benchmarks import mt_bench
from kapelle.environments.benchmarks.math_equality import is_equiv, normal_form
from kapelle.environments.code import MBPP_SPLITS, Code, CodeProblem, humaneval_problem, mbpp_problem
from kapelle.environments.grading.code.programs import program_of
from kapelle.environments.grading.judge import Ask
from kapelle.environments.grading.text.extraction import boxes, own_turn
from kapelle.environments.grading.verdict import Grade, no_answer, right, ungraded, wrong
from kapelle.environments.math import Math
from kapelle.environments.sandbox.pool import shared_pool
from kapelle.runtime.row_files import DataRow

HARNESS = "lm-evaluation-harness 4e7e0d47 (2026-08-21), {}, read 2026-11"
Form = Literal["chat", "completion"]
"""How agents read the prompt. `chat`: as one user message in the model's chat template. `completion`: as bare text, without a chat
template, for agents without a prompt and a system message."""
PARALLEL = 2
"""The maximum number of programs that are graded in parallel."""


@dataclass(frozen=True, slots=True)
class Case:
    """Everything that a score may depend on, besides the answer."""

    row: DataRow
    form: Form
    sandbox: str
    ask: Ask | None
    prompts: mt_bench.Prompts
    """The prompts of the judge."""
    first: str | None
    """The answer to the first question of a conversation, if the answer to its second question is graded."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A benchmark."""

    about: str
    paper: str
    source: str
    """Where the definition was read: the project, its version, the file and the date."""
    hub: tuple[str, str | None, str]
    """The data set, the configuration and the split of its problems on the Hugging Face Hub."""
    files: tuple[str, ...]
    """The names, without suffix, of the file with the problems in a local folder."""
    columns: tuple[str, ...]
    """The columns that each row needs. `a|b` means one of the two."""
    shots: int
    """The number of examples in the prompt."""
    shot_split: str
    """The file or split with the rows of the examples; empty if there are no examples."""
    stops: tuple[str, ...]
    """The strings at which an answer ends."""
    parser: str
    metrics: tuple[str, ...]
    """The scores of an answer. The first is the success unless the user chooses another."""
    prompt: Callable[[DataRow, Sequence[DataRow], Form], str]
    grades: Callable[[str, Case], Awaitable[Mapping[str, Grade]]]
    """Return the grade of an answer by each metric. The answer has already been cut at the stop strings."""
    answer: Callable[[str, str], str | None]
    """Return the answer in a text in a form that a vote can compare, given the name of the metric."""
    choose_shots: Callable[[Sequence[DataRow], int], Sequence[DataRow]] = lambda rows, count: rows[:count]
    is_problem: Callable[[DataRow], bool] = lambda row: True
    stops_in_chat: bool = True
    """Whether an answer to a chat message, which may be a whole program, also ends at the stop strings."""

    def said(self, text: str, form: Form) -> str:
        """Return an answer without its thoughts, cut at the first stop string. A block of code in a chat is left whole."""
        if form == "chat":
            text = own_turn(text)
            if "```" in text or not self.stops_in_chat:
                return text
        places = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        return text[: min(places, default=None)]


def _graded(answer: str | None, gold: str, same: bool) -> Grade:
    if answer is None:
        return no_answer("The parser found no answer.")
    return right(answer) if same else wrong(answer, gold)


# -------- GSM8K

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")


def _gsm8k_prompt(row: DataRow, shots: Sequence[DataRow], form: Form) -> str:
    solved = (f"Question: {s.fields['question']}\nAnswer: {s.fields['answer']}\n\n" for s in shots)
    return f"{''.join(solved)}Question: {row.fields['question']}\nAnswer:"


def _gsm8k_answer(text: str, metric: str) -> str | None:
    if metric == "strict-match":
        found = _STRICT.search(text)
        return None if found is None else _figure(found[1])
    every = list(_FLEXIBLE.finditer(text))
    return _figure(every[-1][0]) if every else None


def _figure(text: str) -> str:
    """Return a string as the metric `exact_match` of the harness compares it."""
    return re.sub(r"(?s).*#### |\.$", "", re.sub(r"[,$]", "", text)).lower()


async def _gsm8k_grades(text: str, case: Case) -> Mapping[str, Grade]:
    written = str(case.row.fields["answer"])
    gold = _figure(written)
    found = {metric: _gsm8k_answer(text, metric) for metric in ("strict-match", "flexible-extract")}
    grades = {metric: _graded(answer, gold, answer == gold) for metric, answer in found.items()}
    return grades | {"kapelle": await Math().grade(text, gold)}


# -------- MATH

_FINAL = re.compile(
    r"Final Answer: The final answer is(.*?)(?:\. I hope it is correct|\.?[ \t]*$)", re.MULTILINE
)
MINERVA = (
    "Find the domain of the expression",
    "If $\\det \\mathbf{A} = 2$",
    "Terrell usually lifts",
    "6x-4y&=a",
)
"""Words of the four training problems that are the examples of Minerva (arXiv:2206.14858, appendix D.2), in their order."""


def _math_shots(rows: Sequence[DataRow], count: int) -> Sequence[DataRow]:
    """Return the examples of Minerva if the training rows contain them, or else the first training rows, all with solutions."""
    rows = [row for row in rows if row.fields.get("solution")]
    named = [
        next((row for row in rows if words in str(row.fields["problem"])), None) for words in MINERVA[:count]
    ]
    found = [row for row in named if row is not None]
    others = [row for row in rows[:count] if all(row is not each for each in found)]
    return [*found, *others][:count]


def _last_box(text: str) -> str | None:
    """Return the content of the last box. The environment `math` would join boxes that follow one another."""
    found = boxes(text)
    return found[-1].content if found else None


def _math_gold(row: DataRow) -> str:
    return _last_box(str(row.fields.get("solution") or "")) or str(row.fields.get("answer") or "")


def _math_prompt(row: DataRow, shots: Sequence[DataRow], form: Form) -> str:
    text = ""
    for shot in shots:
        end = f"Final Answer: The final answer is ${_math_gold(shot)}$. I hope it is correct."
        text += f"Problem:\n{shot.fields['problem']}\n\nSolution: {shot.fields['solution']}\n{end}\n\n"
    return f"{text}Problem:\n{row.fields['problem']}\n\nSolution:"


def _math_answer(text: str, metric: str = "") -> str | None:
    found = _FINAL.search(text)
    if found is None:
        return _last_box(text)
    return found[1].strip().strip("$").strip() or None


async def _math_grades(text: str, case: Case) -> Mapping[str, Grade]:
    answer, gold = _math_answer(text), _math_gold(case.row)
    exact = _graded(answer, gold, answer is not None and is_equiv(answer, gold))
    return {
        "is_equiv": exact,
        "kapelle": exact if answer is None else await Math().grade(f"\\boxed{{{answer}}}", gold),
    }


def _math_vote(text: str, metric: str) -> str | None:
    answer = _math_answer(text)
    try:
        return None if answer is None else normal_form(answer)
    except ValueError:
        return answer


# -------- HumanEval and MBPP: a program that must pass all tests, in the sandbox


async def _code_grades(
    text: str, case: Case, problem_of: Callable[[DataRow], CodeProblem]
) -> Mapping[str, Grade]:
    program = text if case.form == "completion" else _program(text)
    if program is None or not program.strip():
        return {"pass": no_answer("The text contains no program.")}
    problem, limits = problem_of(case.row), Code().limits
    pool = shared_pool(case.sandbox, limits, PARALLEL)
    grade = await pool.call(partial(problem.grade, program, pool, limits))
    if grade.status == "ungraded":
        return {"pass": ungraded(program, grade.explanation)}
    return {"pass": Grade(float(grade.solved), program, grade.explanation or f"{grade.passed} tests passed.")}


def _program(text: str, metric: str = "") -> str | None:
    text = text.partition("[BEGIN]")[2] or text
    program = program_of(text) if "```" in text else text
    return program if program and program.strip() else None


def _humaneval_prompt(row: DataRow, shots: Sequence[DataRow], form: Form) -> str:
    prompt = str(row.fields["prompt"])
    if form == "completion":
        return prompt
    return f"Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```\n"


def _mbpp_problem(row: DataRow) -> CodeProblem:
    """Return a problem of MBPP with its three tests. The published score does not use the `challenge_test_list`."""
    return mbpp_problem(replace(row, fields={**row.fields, "challenge_test_list": []}))


def _mbpp_prompt(row: DataRow, shots: Sequence[DataRow], form: Form) -> str:
    def asked(each: DataRow) -> str:
        fields, tests = each.fields, "\n".join(each.fields["test_list"])
        task = fields.get("text") or fields["prompt"]
        return (
            f"You are an expert Python programmer, and here is your task: {task} Your code should pass these tests:\n\n"
            f"{tests}\n[BEGIN]\n"
        )

    return "".join(f"{asked(each)}{each.fields['code']}\n[DONE]\n\n" for each in shots) + asked(row)


# -------- MT-Bench


def turns_of(row: DataRow) -> Sequence[str]:
    """Return the two questions of a row of MT-Bench."""
    return [str(turn) for turn in row.fields.get("turns") or row.fields["prompt"]]


async def _mt_bench_grades(text: str, case: Case) -> Mapping[str, Grade]:
    assert case.ask is not None, "`Benchmark.check` requires a judge"
    references = case.row.fields.get("reference") or ()
    if case.row.fields["category"] not in mt_bench.WITH_REFERENCE:
        references = ()
    answers = [text] if case.first is None else [case.first, text]
    return {"rating": await mt_bench.rate(case.ask, case.prompts, turns_of(case.row), answers, references)}


# -------- The table

BENCHMARKS: Mapping[str, Definition] = {
    "gsm8k": Definition(
        about="grade-school word problems",
        paper="arXiv:2110.14168",
        source=HARNESS.format("task gsm8k version 3.0"),
        hub=("openai/gsm8k", "main", "test"),
        files=("test",),
        columns=("question", "answer"),
        shots=5,
        shot_split="train",
        stops=("Question:", "</s>", "<|im_end|>"),
        parser="strict-match: the first `#### NUMBER`; flexible-extract: the last number",
        metrics=("strict-match", "flexible-extract", "kapelle"),
        prompt=_gsm8k_prompt,
        grades=_gsm8k_grades,
        answer=_gsm8k_answer,
    ),
    "math": Definition(
        about="competition mathematics",
        paper="arXiv:2103.03874, prompt of arXiv:2206.14858",
        source=HARNESS.format("task minerva_math version 3.0") + "; is_equiv of hendrycks/math 985bdc16",
        hub=("DigitalLearningGmbH/MATH-lighteval", None, "test"),
        files=("test",),
        columns=("problem", "solution|answer"),
        shots=4,
        shot_split="train",
        stops=("Problem:",),
        parser="the text of `Final Answer: The final answer is …`, or else the last \\boxed{…}",
        metrics=("is_equiv", "kapelle"),
        prompt=_math_prompt,
        grades=_math_grades,
        answer=_math_vote,
        choose_shots=_math_shots,
    ),
    "humaneval": Definition(
        about="Python functions from docstrings",
        paper="arXiv:2107.03374",
        source=HARNESS.format("task humaneval version 1.0, chat: humaneval_instruct version 4.0"),
        hub=("openai/openai_humaneval", None, "test"),
        files=("HumanEval", "test"),
        columns=("task_id", "prompt", "entry_point", "canonical_solution", "test"),
        shots=0,
        shot_split="",
        stops=("\nclass", "\ndef", "\n#", "\nif", "\nprint"),
        parser="the last block of Python, or else the text up to the first stop string, after the prompt; check(entry_point)",
        metrics=("pass",),
        stops_in_chat=False,
        prompt=_humaneval_prompt,
        grades=partial(_code_grades, problem_of=humaneval_problem),
        answer=_program,
    ),
    "mbpp": Definition(
        about="short Python programs with three tests",
        paper="arXiv:2108.07732",
        source=HARNESS.format("task mbpp version 1.0"),
        hub=("google-research-datasets/mbpp", "full", "test"),
        files=("mbpp", "sanitized-mbpp", "test"),
        columns=("task_id", "text|prompt", "code", "test_list"),
        shots=3,
        shot_split="prompt",
        stops=("[DONE]",),
        parser="the last block of Python, or else the text up to [DONE]; the asserts of test_list",
        metrics=("pass",),
        prompt=_mbpp_prompt,
        grades=partial(_code_grades, problem_of=_mbpp_problem),
        answer=_program,
        choose_shots=lambda rows, count: [
            row for row in rows if int(row.fields["task_id"]) in range(2, 2 + count)
        ],
        is_problem=lambda row: int(row.fields["task_id"]) in MBPP_SPLITS["test"],
    ),
    "mt_bench": Definition(
        about="two-turn questions, graded by a judge",
        paper="arXiv:2306.05685",
        source="FastChat 0e6d3e4b (2025-04-12), fastchat/llm_judge, read 2026-11",
        hub=("HuggingFaceH4/mt_bench_prompts", None, "train"),
        files=("question",),
        columns=("turns|prompt", "category"),
        shots=0,
        shot_split="",
        stops=(),
        parser="the judge's first [[rating]], or else [rating], from 1 to 10, divided by 10",
        metrics=("rating",),
        prompt=lambda row, shots, form: turns_of(row)[0],
        grades=_mt_bench_grades,
        answer=lambda text, metric: text.strip() or None,
    ),
}
