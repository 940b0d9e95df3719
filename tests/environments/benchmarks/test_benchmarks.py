"""The benchmarks by their own published examples, and the documented hard cases of their parsers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from itertools import product
from math import comb
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.workflows.stage import team_of

from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environments.benchmarks.environment import Benchmark
from kapelle.environments.benchmarks.math_equality import is_equiv
from kapelle.environments.grading.verdict import Grade
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.errors import AbsentData, ConfigError, DataError
from kapelle.rollout.episodes import rollout
from kapelle.rollout.evaluation.evaluate import at_k
from kapelle.rollout.setup import RolloutSetup
from kapelle.types import Episode, Group, Message, Task
from kapelle.workflows.solo import Solo

APPLES = {
    "question": "Ann has 1,000 apples and buys 234. How many?",
    "answer": "1000 + 234 = <<1000+234=1234>>1234\n#### 1,234",
}
PEARS = {"question": "Bo has 2 pears and eats 1. How many?", "answer": "2 - 1 = <<2-1=1>>1\n#### 1"}
HALF = {
    "problem": "What is $1 - 1/2$?",
    "level": "Level 1",
    "type": "Algebra",
    "solution": "It is $\\boxed{\\frac{1}{2}}$.",
}
HALVE = {
    "task_id": "Halve/0",
    "prompt": 'import math\n\n\ndef halve(x):\n    """Return half of x, rounded down."""\n',
    "canonical_solution": "    return math.floor(x / 2)\n",
    "test": "def check(candidate):\n    assert candidate(4) == 2\n    assert candidate(7) == 3\n",
    "entry_point": "halve",
}  # fmt: skip
DOUBLE = {
    "text": "Write a function to double a number.",
    "code": "def double(x):\r\n\treturn 2 * x",
    "test_setup_code": "",
    "test_list": ["assert double(2) == 4", "assert double(3) == 6", "assert double(-7) == -14"],
    "challenge_test_list": ["assert double('a') == 4"],
}
RACE: dict[str, Any] = {
    "question_id": 101,
    "category": "reasoning",
    "turns": ["You overtake the second person. What is your position?", "And if it was the last person?"],
    "reference": ["Second place.", "That is impossible."],
}


def written(file: Path, *rows: Mapping[str, Any]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


async def scores(benchmark: Benchmark, text: str, index: int = 0) -> dict[str, float]:
    grades = await benchmark.grades(text, benchmark.task("test", index))
    return {metric: grade.score for metric, grade in grades.items()}


class TestGSM8K:
    @pytest.fixture
    def apples(self, tmp_path: Path) -> Benchmark:
        return Benchmark(benchmark="gsm8k", path=written(tmp_path / "test.jsonl", APPLES), shots=0)

    # What each filter reads: the harness at 4e7e0d47, tasks/gsm8k/gsm8k.yaml.
    @pytest.mark.parametrize(
        ("text", "strict", "flexible", "kapelle"),
        [
            (APPLES["answer"], 1, 1, 1),
            ("#### 1234", 1, 1, 1),
            ("#### $1,234", 0, 1, 1),  # a dollar sign is not in the pattern of strict-match
            ("The answer is 1234.", 0, 1, 0),  # the final point is ignored; kapelle wants a mark
            ("The answer is 1234.0", 0, 0, 0),
            ("#### 1234.0", 0, 0, 1),  # the harness compares strings, kapelle numbers
            ("#### 1234\nQuestion: How many are 2 + 2?\nAnswer: #### 4", 1, 1, 1),  # cut at the stop string
            ("#### 5\n#### 1234", 0, 1, 0),  # strict-match takes the first; kapelle accepts no second
            ("no number", 0, 0, 0),
        ],
    )
    async def test_the_filters_of_the_harness(
        self, apples: Benchmark, text: str, strict: int, flexible: int, kapelle: int
    ) -> None:
        found = await scores(apples, text)
        assert found == {"strict-match": strict, "flexible-extract": flexible, "kapelle": kapelle}

    def test_the_prompt_shows_the_first_training_rows(self, tmp_path: Path) -> None:
        written(tmp_path / "train.jsonl", PEARS, APPLES)
        written(tmp_path / "test.jsonl", APPLES)
        task = Benchmark(benchmark="gsm8k", path=str(tmp_path), shots=1).task("test", 0)
        assert (
            task.question
            == f"Question: {PEARS['question']}\nAnswer: {PEARS['answer']}\n\nQuestion: {APPLES['question']}\nAnswer:"
        )

    @pytest.mark.data
    async def test_every_gold_answer_is_correct(self, data_folder: Path) -> None:
        benchmark = Benchmark(benchmark="gsm8k", path=str(data_folder / "gsm8k"))
        assert (benchmark.size("test"), benchmark.size("train")) == (1319, 0)
        for index in range(0, 1319, 7):
            row = benchmark.rows.problems[index].fields
            assert set((await scores(benchmark, str(row["answer"]), index)).values()) == {1.0}

    @pytest.mark.data
    async def test_published_labels_of_model_solutions(self, data_folder: Path) -> None:
        """Solutions of OpenAI end in `A: 18`: strict-match reads none, and flexible-extract agrees with the labels."""
        benchmark = Benchmark(benchmark="gsm8k", path=str(data_folder / "gsm8k"))
        with gzip.open(
            data_folder / "gsm8k" / "example_model_solutions.jsonl.gz", "rt", encoding="utf-8"
        ) as lines:
            labelled = [json.loads(line)["175b_verification"] for line in lines]
        for index in range(0, 1319, 7):
            found = await scores(benchmark, labelled[index]["solution"], index)
            assert found["flexible-extract"] == labelled[index]["is_correct"], index
            assert found["strict-match"] == 0.0


class TestMath:
    # Pairs by the rules of hendrycks/math 985bdc16, modeling/math_equivalence.py.
    @pytest.mark.parametrize(
        ("answer", "gold", "same"),
        [
            ("\\frac12", "\\frac{1}{2}", True),
            ("\\dfrac{1}{2}", "1/2", True),
            ("\\frac1{72}", "\\frac{1}{72}", True),
            ("0.5", "\\frac{1}{2}", True),
            (".5", "0.5", True),
            ("x = 5", "5", True),
            ("ab = 5", "5", False),  # the name and its space have three characters
            ("10\\%", "10", True),
            ("10%", "10", False),
            ("90^\\circ", "90", True),
            ("5\\text{ cm}", "5", True),
            ("\\sqrt3", "\\sqrt{3}", True),
            ("\\left(1,2\\right)", "(1, 2)", True),
            ("1,000", "1000", False),
            ("\\frac{2}{4}", "\\frac{1}{2}", False),
            ("0.50", "\\frac{1}{2}", False),
            ("-1/2", "\\frac{-1}{2}", True),
            ("\\frac{x}{2}", "x/2", False),
            ("\\sqrt", "\\sqrt", True),
        ],
    )
    def test_is_equiv(self, answer: str, gold: str, same: bool) -> None:
        assert is_equiv(answer, gold) is same

    async def test_the_answer_after_the_sentence_of_minerva(self, tmp_path: Path) -> None:
        benchmark = Benchmark(benchmark="math", path=written(tmp_path / "x.jsonl", HALF), shots=0)
        text = "It is {}.\nFinal Answer: The final answer is ${}$. I hope it is correct."
        assert await scores(benchmark, text.format("1", "\\frac12")) == {"is_equiv": 1, "kapelle": 1}
        assert await scores(benchmark, text.format("1", "\\frac24")) == {"is_equiv": 0, "kapelle": 1}
        assert await scores(benchmark, "So \\boxed{\\frac{1}{2}}") == {"is_equiv": 1, "kapelle": 1}
        assert await scores(benchmark, text.format("1", "2") + "\n\nProblem:\n\\boxed{0.5}") == {
            "is_equiv": 0,
            "kapelle": 0,
        }
        assert await scores(benchmark, "\\boxed{3} or \\boxed{\\frac12}") == {"is_equiv": 1, "kapelle": 1}
        assert await scores(benchmark, "\\boxed{\\frac12} or \\boxed{3}") == {"is_equiv": 0, "kapelle": 0}
        assert await scores(benchmark, "one half") == {"is_equiv": 0, "kapelle": 0}
        assert benchmark.about(benchmark.task("test", 0)) == {"Level 1": True}

    def test_the_examples_of_minerva_come_first(self, tmp_path: Path) -> None:
        known = {"problem": "If $\\det \\mathbf{A} = 2$, what is it?", "solution": "$\\boxed{2}$"}
        written(tmp_path / "train.jsonl", HALF, known)
        written(tmp_path / "test.jsonl", HALF)
        task = Benchmark(benchmark="math", path=str(tmp_path), shots=2).task("test", 0)
        first, second, asked = task.question.split("\n\nProblem:\n")
        assert first == (
            f"Problem:\n{known['problem']}\n\nSolution: $\\boxed{{2}}$\n"
            "Final Answer: The final answer is $2$. I hope it is correct."
        )
        assert "The final answer is $\\frac{1}{2}$." in second
        assert asked == f"{HALF['problem']}\n\nSolution:"


class TestCode:
    async def test_humaneval(self, sandbox: Bubblewrap, tmp_path: Path) -> None:
        path = written(tmp_path / "HumanEval.jsonl", HALVE)
        chat, completion = (
            Benchmark(benchmark="humaneval", path=path, form=form) for form in ("chat", "completion")
        )
        solution = str(HALVE["canonical_solution"])
        # The text after the function is cut, although it would fail.
        assert await scores(completion, f"{solution}\nprint(undefined)") == {"pass": 1}
        assert await scores(completion, f"{solution}\ndef halve(x):\n    return 0") == {"pass": 1}
        assert await scores(completion, "    return x / 2\n") == {"pass": 0}
        assert completion.task("test", 0) == Task("test-0", str(HALVE["prompt"]), {"row": 0}, rendered=True)
        assert await scores(chat, f"Here it is:\n```python\n{HALVE['prompt']}{solution}```") == {"pass": 1}
        assert await scores(chat, "def halve(x):\n    return x // 2") == {"pass": 1}
        assert await scores(chat, "I cannot.") == {"pass": 0}

    async def test_mbpp(self, sandbox: Bubblewrap, tmp_path: Path) -> None:
        rows = [
            {**DOUBLE, "task_id": number, "text": f"Task {number}."}
            for number in (1, 2, 3, 4, 10, 11, 510, 511)
        ]
        benchmark = Benchmark(benchmark="mbpp", path=written(tmp_path / "mbpp.jsonl", *rows))
        assert benchmark.size("test") == 2, "task_id 11 to 510"
        question = benchmark.task("test", 0).question
        tests = "\n".join(DOUBLE["test_list"])
        asked = "You are an expert Python programmer, and here is your task: Task {}. Your code should pass these tests:\n\n"
        shown = "".join(f"{asked.format(k)}{tests}\n[BEGIN]\n{DOUBLE['code']}\n[DONE]\n\n" for k in (2, 3, 4))
        assert question == f"{shown}{asked.format(11)}{tests}\n[BEGIN]\n"
        # The challenge test would raise an exception.
        assert await scores(benchmark, f"{DOUBLE['code']}\n[DONE]\n\nYou are an expert") == {"pass": 1}
        assert await scores(benchmark, f"[BEGIN]\n{DOUBLE['code']}\n[DONE]") == {"pass": 1}
        assert await scores(benchmark, f"```python\n{DOUBLE['code']}\n```") == {"pass": 1}
        assert await scores(benchmark, "def double(x):\n    return 4") == {"pass": 0}

    @pytest.mark.data
    async def test_published_programs_of_mbpp_pass(self, sandbox: Bubblewrap, data_folder: Path) -> None:
        benchmark = Benchmark(benchmark="mbpp", path=str(data_folder / "mbpp"))
        assert benchmark.size("test") == 500
        assert [row.fields["task_id"] for row in benchmark.rows.shots] == [2, 3, 4]
        for index in range(0, 500, 100):
            solution = benchmark.rows.problems[index].fields["code"]
            assert await scores(benchmark, f"{solution}\n[DONE]", index) == {"pass": 1}


class TestMTBench:
    def benchmark(self, path: str, replies: Sequence[str], read: list[Sequence[Message]]) -> Benchmark:
        left = iter(replies)

        async def ask(messages: Sequence[Message]) -> str:
            read.append(messages)
            return next(left)

        judge = {"endpoint": "http://localhost:1/v1", "model": "judge"}
        return Benchmark(benchmark="mt_bench", path=path, judge=judge).judged_by(ask)

    async def test_two_turns_with_reference_answers(self, tmp_path: Path) -> None:
        read: list[Sequence[Message]] = []
        benchmark = self.benchmark(
            written(tmp_path / "question.jsonl", RACE), ["Good. [[9]]", "Rating: [6.5]"], read
        )
        first = benchmark.task("test", 0)
        assert first.question == RACE["turns"][0]
        second = benchmark.second(first, "Second.", 0)
        assert [message.content for message in second.prompt_messages] == [
            RACE["turns"][0],
            "Second.",
            RACE["turns"][1],
        ]
        assert await scores_of(benchmark, first, "Second.") == 0.9
        assert await scores_of(benchmark, second, "Impossible.") == 0.65
        one, both = (messages[1].content for messages in read)
        assert RACE["reference"][0] in one
        assert RACE["turns"][1] not in one
        assert all(text in both for text in (*RACE["turns"], *RACE["reference"], "Second.", "Impossible."))
        assert benchmark.about(second) == {"turn 2": True, "reasoning": True}

    @pytest.mark.parametrize("reply", ["Excellent.", "[[11]]", "[[0]]", "Rating: 7"])
    async def test_a_reply_without_a_rating_is_no_score(self, tmp_path: Path, reply: str) -> None:
        row = {**RACE, "category": "writing"}
        benchmark = self.benchmark(written(tmp_path / "question.jsonl", row), [reply], [])
        grade = (await benchmark.grades("Second.", benchmark.task("test", 0)))["rating"]
        assert grade.status == "ungraded"

    async def test_published_files(self, tmp_path: Path) -> None:
        """The folder of FastChat: reference answers of GPT-4 and the judge prompts as published."""
        written(tmp_path / "question.jsonl", RACE)
        (tmp_path / "reference_answer").mkdir()
        gold = {"question_id": 101, "choices": [{"index": 0, "turns": ["GOLD 1", "GOLD 2"]}]}
        written(tmp_path / "reference_answer" / "gpt-4.jsonl", gold)
        names = [f"single{math}-v1{turn}" for math, turn in product(("", "-math"), ("", "-multi-turn"))]
        rows = [
            {"name": name, "system_prompt": name, "prompt_template": "{ref_answer_1}|{answer_1}"}
            for name in names
        ]
        read: list[Sequence[Message]] = []
        benchmark = self.benchmark(str(tmp_path), ["[[1]]"], read).model_copy(
            update={"judge_prompts": written(tmp_path / "judge_prompts.jsonl", *rows)}
        )
        await benchmark.grades("Second {place}.", benchmark.task("test", 0))
        assert [message.content for message in read[0]] == ["single-math-v1", "GOLD 1|Second {place}."]


async def scores_of(benchmark: Benchmark, task: Task, text: str) -> float:
    grade: Grade = (await benchmark.grades(text, task))["rating"]
    return grade.score


async def test_a_team_answers_in_an_episode(tmp_path: Path) -> None:
    benchmark = Benchmark(benchmark="gsm8k", path=written(tmp_path / "x.jsonl", APPLES, PEARS), shots=0)
    engine = ScriptedEngine({"solver": lambda request: "#### 1"})
    setup = RolloutSetup(team_of("solver"), benchmark, Solo(), engine)
    groups = await rollout(setup, [benchmark.task("test", k) for k in (0, 1)], 1, seed=0)
    assert [group.episodes[0].error for group in groups] == [None, None]
    assert [group.episodes[0].success for group in groups] == [0.0, 1.0]
    assert [group.episodes[0].info["flexible-extract"] for group in groups] == [0.0, 1.0]


def test_pass_at_k_by_hand(tmp_path: Path) -> None:
    """3 of 5 answers of one problem are correct, and 1 of 5 of another: Chen et al. 2021, equation 1."""
    benchmark = Benchmark(benchmark="gsm8k", path=written(tmp_path / "x.jsonl", APPLES, PEARS), shots=0)
    groups = []
    for index, correct in enumerate((3, 1)):
        task = benchmark.task("test", index)
        episodes = tuple(Episode(task, k, ("a",), (), success=float(k < correct)) for k in range(5))
        groups.append(Group(task, episodes))
    found = {name: rate.value for name, rate in at_k(groups, 5, benchmark, seed=0).items()}
    assert [found["avg@5"], found["pass@1"]] == pytest.approx([(3 / 5 + 1 / 5) / 2] * 2)
    # C(2, 2) / C(5, 2) = 1 / 10 and C(4, 2) / C(5, 2) = 6 / 10.
    assert found["pass@2"] == pytest.approx((9 / 10 + 4 / 10) / 2)
    assert found["pass@4"] == pytest.approx((1 + (1 - 1 / comb(5, 4))) / 2)
    assert found["pass@5"] == 1.0


class TestFaults:
    def test_an_unknown_name(self) -> None:
        with pytest.raises(ValidationError, match=r"no benchmark 'gsm8'.* Did you mean 'gsm8k'"):
            Benchmark(benchmark="gsm8")

    def test_missing_data_are_one_message(self, tmp_path: Path) -> None:
        with pytest.raises(
            AbsentData,
            match=r"`gsm8k` has no data.*test\.jsonl and train\.jsonl.*openai/gsm8k; the columns are question, answer",
        ):
            Benchmark(benchmark="gsm8k", path=str(tmp_path / "none")).check(())
        with pytest.raises(DataError, match=r"shows 5 examples, but its data contain 0.*gsm8k.shots_path"):
            Benchmark(benchmark="gsm8k", path=written(tmp_path / "x.jsonl", APPLES)).check(())
        with pytest.raises(DataError, match="line 1 has no column solution or answer"):
            Benchmark(benchmark="math", path=written(tmp_path / "y.jsonl", {"problem": "?"}), shots=0).check(
                ()
            )

    def test_mt_bench_needs_a_judge(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="needs a judge"):
            Benchmark(benchmark="mt_bench", path=written(tmp_path / "x.jsonl", RACE)).check(())
