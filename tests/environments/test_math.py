from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.programs import output_of, ticking
from tests.workflows.stage import lines, play, transcript

from kapelle.environments import math as math_environment
from kapelle.environments.grading.math.grade import math_processes, read_math
from kapelle.environments.grading.processes import AnswerLimits
from kapelle.environments.grading.verdict import Grade
from kapelle.environments.math import Math
from kapelle.errors import DataError
from kapelle.types import Split, Task
from kapelle.workflows.chain import Chain
from kapelle.workflows.solo import Solo

TRAIN = [
    {"question": "Two and three?", "answer": "2+3 = <<2+3=5>>5\n#### 5"},
    {"question": "A thousand and more?", "answer": "#### 1,234"},
]
TEST = [
    {"question": "Half?", "answer": r"It is \boxed{\frac{1}{2}}."},
    {"question": "What percentage?", "answer": "50"},
    {"question": "Which sum?", "answer": r"$\boxed{x + 1}$"},
]


def folder(
    path: Path, train: Sequence[Mapping[str, Any]] = TRAIN, test: Sequence[Mapping[str, Any]] = TEST
) -> str:
    for name, rows in (("train", train), ("test", test)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_questions_and_gold_answers_come_from_the_rows(tmp_path: Path) -> None:
    environment = Math(path=folder(tmp_path))
    environment.check(["solver"])
    assert (environment.size("train"), environment.size("test")) == (2, 3)
    gold = {split: [environment.task(split, k).data["answer"] for k in range(n)] for split, n in SIZES}
    assert gold == {"train": ["5", "1,234"], "test": [r"\frac{1}{2}", "50", "x + 1"]}
    assert environment.task("train", 1).question == "A thousand and more?"
    assert len({environment.task("test", k).id for k in range(3)}) == 3


SIZES: tuple[tuple[Split, int], ...] = (("train", 2), ("test", 3))


@pytest.mark.parametrize(
    ("gold", "correct", "incorrect"),
    [
        ("1,234", ["#### 1234"], []),
        ("1234", [r"so \boxed{1,234.00}"], []),
        ("18", ["#### $18"], ["18"]),
        ("50", ["#### 50%"], []),
        ("0.5", [], ["#### 50%"]),
        (r"\frac{1}{2}", ["#### 0.5"], []),
        ("1/3", [], ["#### 0.333"]),
        ("x + 1", [r"\boxed{x+1}"], [r"\boxed{x+2}"]),
        ("x^2-1", [r"\boxed{(x+1)(x-1)}"], []),
        (r"\sqrt{8}", [r"\boxed{2\sqrt{2}}"], []),
        ("(1,2]", [r"\boxed{(1, 2]}"], [r"\boxed{[1, 2]}"]),
        (r"\{1,2\}", [r"\boxed{\{2,1\}}"], []),
        (r"\text{Tuesday}", [r"\boxed{Tuesday}"], []),
        ("5", [], ["#### 5 #### 6", r"#### 6 and \boxed{5}"]),
    ],
)
async def test_grading(gold: str, correct: list[str], incorrect: list[str]) -> None:
    assert [(await Math().grade(text, gold)).score for text in correct] == [1.0] * len(correct)
    assert [(await Math().grade(text, gold)).score for text in incorrect] == [0.0] * len(incorrect)


@pytest.mark.parametrize(
    ("gold", "correct", "incorrect"),
    [
        (
            "5",
            [
                "x=5",
                "x = 5",
                r"5\text{ cm}",
                r"5^\circ",
                "5 dollars",
                "(5)",
                r"n = 5\text{ units}",
                r"\mathbf{5}",
            ],
            [
                "5 or 6",
                "5 and 5",
                "4-6",
                "5=5",
                "5 million",
                "5x/x",
                "6",
                "5.0001",
                r"\pm 5",
                "5, 5",
            ],
        ),
        ("2^3", ["a=2^3", "2^3 cm"], ["2^4", "23", "2^{3^{2}}", "2^x"]),
        (r"\sqrt{9}", [r"x=\sqrt9"], [r"\sqrt{91}", r"\pm\sqrt{9}", "1.7320508^2"]),
        ("1,234", ["x = 1,234", "1234 dollars", r"\$1{,}234"], ["1.234", "1, 234 and 5", "(1,234,5)"]),
        ("$18", ["18 dollars", "18", "x = 18"], ["€18", r"18\text{ cents}"]),
        ("50", ["x = 50%", r"50\%", "50 percent"], ["0.5", "x = 0.5", r"0.5\%"]),
        ("y=5", ["5", "y = 5"], ["x=5"]),
        (r"5\text{ cm}", ["5", "x=5", "5 cm"], ["5 m", r"5\text{ km}"]),
    ],
)
async def test_a_number_is_correct_in_any_form_and_symmetrically(
    gold: str, correct: list[str], incorrect: list[str]
) -> None:
    environment = Math(percent_is_unit=True)
    for answers, score in ((correct, 1.0), (incorrect, 0.0)):
        for answer in answers:
            assert (await environment.grade(rf"\boxed{{{answer}}}", gold)).score == score, answer
            assert (await environment.grade(rf"\boxed{{{gold}}}", answer)).score == score, (answer, "as gold")
    # For a gold answer without unit and name, the correct answers are one vote.
    if gold not in {"$18", "y=5", r"5\text{ cm}"}:
        one = environment.extract(rf"\boxed{{{gold}}}")
        assert {environment.extract(rf"\boxed{{{answer}}}") for answer in correct} == {one}
        assert one not in {environment.extract(rf"\boxed{{{answer}}}") for answer in incorrect}


def test_equal_answers_are_one_vote() -> None:
    environment = Math()
    for answers in (
        ["x+1", "1+x", r"\frac{2x+2}{2}"],
        [r"\{1,2\}", "2, 1", "1 and 2"],
        ["(1,2]", "( 1 , 2 ]"],
        [r"2\sqrt2", r"\sqrt{8}"],
        ["y=2x+1", "2x+1"],
        [r"\text{Tuesday}", "tuesday"],
    ):
        assert len({environment.extract(rf"\boxed{{{answer}}}") for answer in answers}) == 1, answers
    different = ["(1,2]", "[1,2]", "(1,2)", "(2,1)", "1,2", "1,2,2", "12", "x", r"\text{monday}", "5x/x", "5"]
    assert len({environment.extract(rf"\boxed{{{answer}}}") for answer in different}) == len(different)


async def test_a_percentage_can_be_hundredths() -> None:
    environment = Math(percent_is_unit=False)
    assert (await environment.grade("#### 50%", "0.5")).score == 1.0
    assert (await environment.grade("#### 50%", "50")).score == 0.0


@pytest.mark.slow
async def test_undecided_answers_are_compared_in_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with math_processes(size=1, limits=AnswerLimits(cpu_s=20.0, wall_s=60.0)) as patient:
        monkeypatch.setattr(math_environment, "shared_math_processes", lambda: patient)
        environment = Math()
        assert (await environment.grade(r"\boxed{1-\cos^2 x}", r"\sin^2 x")).score == 1.0
        assert (await environment.grade(r"\boxed{\cos x}", r"\sin x")).score == 0.0


@pytest.mark.slow
async def test_a_slow_comparison_is_incorrect_and_does_not_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with math_processes(size=1, limits=AnswerLimits(cpu_s=0.2, wall_s=20.0)) as hasty:
        hasty.warm()
        monkeypatch.setattr(math_environment, "shared_math_processes", lambda: hasty)
        task = Task("train-0", "q", {"answer": r"\tan 5"})
        long = r"\boxed{\tan(\tan(\tan(\tan(\tan 5))))}"
        async with ticking(at_least=100):
            [episode] = await play(Math(), Solo(), ["solver"], {"solver": lines(long)}, task)
    assert episode.error is None
    assert episode.rewards == {"solver": 0.0}


@pytest.mark.slow
def test_the_shared_pool_ends_with_its_process_but_not_with_a_fork() -> None:
    program = (
        "import os, sys\n"
        "from kapelle.environments.grading.math.grade import grade_math, shared_math_processes\n"
        "pool = shared_math_processes()\n"
        "assert pool is shared_math_processes() and not pool._running\n"
        "pool.warm()\n"
        "[server] = pool._running\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    sys.exit(shared_math_processes() is pool)\n"
        "assert os.waitpid(child, 0)[1] == 0 and server.poll() is None\n"
        "print(server.pid)\n"
    )
    server = int(output_of(program))
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("5 #### ", "test.jsonl, line 1"),
        ("#### 5 #### 6", "2 answers"),
        ("", "empty"),
        (r"\boxed{", "closed"),
    ],
)
def test_a_row_without_an_answer_is_an_error(tmp_path: Path, answer: str, message: str) -> None:
    environment = Math(path=folder(tmp_path, test=[{"question": "q", "answer": answer}]))
    with pytest.raises(DataError, match=message):
        environment.check(["solver"])


def test_another_answer_field(tmp_path: Path) -> None:
    rows = [{"problem": "p", "solution": "#### 3"}]
    path = folder(tmp_path, train=[{"problem": "other", "solution": "#### 4"}], test=rows)
    environment = Math(path=path, question_field="problem", answer_field="solution")
    environment.check(["solver"])
    assert environment.task("test", 0).data["answer"] == "3"
    with pytest.raises(DataError, match="answer_field"):
        Math(path=path, question_field="problem").check(["solver"])


async def test_a_chain_on_a_question(tmp_path: Path) -> None:
    environment = Math(path=folder(tmp_path))
    scripts = {"reasoner": lines("Add them: 2+3=5."), "actor": lines("It is five.\n#### 5")}
    [episode] = await play(environment, Chain(), ["reasoner", "actor"], scripts, environment.task("train", 0))
    assert transcript(episode) == [
        "0 seen=0 Two and three? -> reasoner: Add them: 2+3=5.",
        "1 seen=1 Two and three?\n\nreasoner: Add them: 2+3=5. -> actor: It is five.\n#### 5",
    ]
    assert episode.rewards == {"actor": 1.0}
    assert episode.success == 1.0


async def test_the_script_writes_its_part_of_the_solution(tmp_path: Path) -> None:
    environment = Math(path=folder(tmp_path))
    task = environment.task("train", 0)
    assert environment.script("reasoner", task, (), 0) == "2+3 = 5"
    assert environment.script("actor", task, (), 0) == "#### 5"
    assert environment.script("solver", task, (), 0) == "2+3 = 5\n#### 5"
    boxed = Math(path=environment.path, extraction=("last_box",), roles={"closer": "answer"})
    assert boxed.script("closer", environment.task("test", 0), (), 0) == r"\boxed{\frac{1}{2}}"
    for split, size in SIZES:
        for index in range(size):
            task = environment.task(split, index)
            for agent in ("actor", "solver"):
                solution = environment.script(agent, task, (), 0)
                assert (await environment.grade(solution, task.data["answer"])).score == 1.0


@pytest.mark.data
async def test_gsm8k(gsm8k_folder: Path) -> None:
    environment = Math(path=str(gsm8k_folder))
    environment.check(["solver"])
    assert (environment.size("train"), environment.size("test")) == (7473, 1319)
    for index in range(0, 1319, 5):
        task = environment.task("test", index)
        solution = environment.script("solver", task, (), 0)
        assert (await environment.grade(solution, task.data["answer"])).score == 1.0
    assert environment.task("test", 0).data["answer"] == "18"


def score(written: str, gold: str) -> float:
    """Return the exact reader's score of an answer after `####`; 0 if it is undecided."""
    grade = read_math(f"#### {written}", gold, ["hash"])
    return (grade.score or 0.0) if isinstance(grade, Grade) else 0.0


@pytest.mark.parametrize(
    "written",
    [r"\boxed{5}", "**5**", "`5`", "5,", "5;", "= 5", r"\therefore 5", r"\boxed{\fbox{5}}", "**x = 5**"],
)
def test_marks_around_a_whole_answer_are_ignored(written: str) -> None:
    assert score(written, "5") == 1.0
    assert score("5", written) == 1.0
    assert score(written, "6") == 0.0


@pytest.mark.parametrize(
    "written", ["**5** or **6**", r"\boxed{5} \boxed{6}", "`5` `6`", "== 5", "5 = 6", "**5", ",", "="]
)
def test_marks_around_parts_are_not_ignored(written: str) -> None:
    assert score(written, "5") == 0.0


MMLU = {"question": "Which is even?", "choices": ["one", "two", "three"], "answer": 1}
ARC = {
    "question": "Which is even?",
    "choices": {"text": ["one", "two", "three"], "label": ["1", "2", "3"]},
    "answer": "2",
}


@pytest.mark.parametrize(
    ("row", "letter"),
    [
        (MMLU, "B"),
        ({**MMLU, "answer": "B"}, "B"),
        ({**MMLU, "answer": "two"}, "B"),
        ({"question": "Which is even?", "options": ["one", "two"], "answer": "1"}, "B"),
        (ARC, "2"),
        ({**ARC, "answer": 2}, "2"),
        ({**ARC, "choices": {"text": ["one", "two", "three"], "label": [1, 2, 3]}, "answer": 2}, "2"),
        ({**MMLU, "answer": 1.0}, "B"),
        ({**MMLU, "answer": "(b)"}, "B"),
        ({"question": "Which?", "options": {"A": "one", "B": "two"}, "answer": "B"}, "B"),
    ],
)
async def test_a_multiple_choice_question_has_options_and_a_letter_as_its_answer(
    row: dict[str, Any], letter: str, tmp_path: Path
) -> None:
    environment = Math(path=folder(tmp_path, [row], [{**row, "question": "Other?"}]))
    environment.check(["solver"])
    task = environment.task("train", 0)
    assert f"{letter}. two" in task.question
    for text, expected in ((letter, 1.0), (f"({letter}) two", 1.0), ("A" if letter == "B" else "1", 0.0)):
        scripts = {"solver": lines(rf"\boxed{{{text}}}")}
        [one] = await play(environment, Solo(), ["solver"], scripts, task)
        assert one.rewards == {"solver": expected}


@pytest.mark.parametrize(
    "answer", [float("nan"), "nan", float("inf"), "#### nan", r"\boxed{NaN}", {**MMLU}["choices"]]
)
def test_a_missing_gold_answer_is_an_error(answer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1"):
        Math(path=folder(tmp_path, [{"question": "What?", "answer": answer}])).check(["solver"])


@pytest.mark.parametrize(
    "choices",
    [{"text": ["one", "two"], "label": ["A"]}, {"text": ["one", "two"], "label": ["A", "A"]}, [{}, {}]],
)
def test_incomplete_options_are_an_error(choices: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1"):
        Math(path=folder(tmp_path, [{**MMLU, "choices": choices, "answer": "A"}])).check(["solver"])
