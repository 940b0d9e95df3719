from __future__ import annotations

import hashlib
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kapelle.environments.arithmetic import Arithmetic, columns, combine, split_of, step_before, value_of
from kapelle.errors import ConfigError
from kapelle.types import Message, Task

# question, notes, answer, notes without the carry, answer to those, answer that ignores a carry in the notes
WORKED = [
    ("47+85", "2,12+1", "132", "2,12", "122", "122"),
    ("42+13", "5,5", "55", "5,5", "55", "55"),
    ("99+99", "8,18+1", "198", "8,18", "188", "188"),
    ("85-47", "8,4-1", "38", "8,4", "48", "48"),
    ("45-38", "7,1-1", "7", "7,1", "17", "17"),
    ("10-10", "0,0", "0", "0,0", "0", "0"),
    ("395+205", "0,9+1,5+1", "600", "0,9,5", "590", "590"),
    ("347+285", "2,2+1,5+1", "632", "2,2,5", "522", "522"),
    ("7+5", "12", "12", "12", "12", "12"),
]


@pytest.mark.parametrize(("question", "notes", "answer", "dropped", "wrong", "ignored"), WORKED)
def test_worked_examples(
    question: str, notes: str, answer: str, dropped: str, wrong: str, ignored: str
) -> None:
    assert columns(question, carry=True) == notes
    assert combine(notes, carry=True) == answer
    assert columns(question, carry=False) == dropped
    assert combine(dropped, carry=True) == wrong
    assert combine(notes, carry=False) == ignored


@given(st.integers(1, 12), st.sampled_from("+-"), st.data())
def test_both_roles_together_compute_the_answer(digits: int, operator: str, data: st.DataObject) -> None:
    low = 0 if digits == 1 else 10 ** (digits - 1)
    a, b = (data.draw(st.integers(low, 10**digits - 1)) for _ in range(2))
    a, b = max(a, b), min(a, b)
    truth = a + b if operator == "+" else a - b
    assert combine(columns(f"{a}{operator}{b}", carry=True), carry=True) == str(truth)


@pytest.mark.parametrize("notes", ["", "x", "1,", "1,2,+1", "123,4", "1;2", "２,1"])
def test_unreadable_notes_give_no_answer(notes: str) -> None:
    assert combine(notes, carry=True) == "?"


def test_no_operand_pair_is_in_both_splits_in_either_order() -> None:
    environment = Arithmetic(operators=("+", "-"))
    pairs = {
        split: {
            tuple(sorted(map(int, environment.task(split, i).question.replace("-", "+").split("+"))))
            for i in range(1500)
        }
        for split in ("train", "test")
    }
    # There are only 4,095 unordered pairs of two-digit operands, so that 4,000 draws would overlap by chance.
    assert not pairs["train"] & pairs["test"]
    assert len(pairs["test"]) > 500


def test_a_fifth_of_the_pairs_belongs_to_test() -> None:
    splits = [split_of(a, b) for a in range(10, 100) for b in range(10, 100)]
    assert 0.18 < splits.count("test") / len(splits) < 0.22
    assert all(split_of(a, b) == split_of(b, a) for a in range(30) for b in range(30))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_share_of_carries(share: float) -> None:
    environment = Arithmetic(carry_share=share)
    carries = 0
    for index in range(1000):
        question = environment.task("test", index).question
        carries += int(question[1]) + int(question[4]) >= 10
    assert carries / 1000 == pytest.approx(share, abs=0.0 if share in {0.0, 1.0} else 0.05)


def test_the_seed_changes_the_tasks_and_not_the_split() -> None:
    one, other = Arithmetic(), Arithmetic(seed=1)
    assert [one.task("test", i) for i in range(20)] != [other.task("test", i) for i in range(20)]
    for index in range(200):
        a, b = map(int, other.task("train", index).question.split("+"))
        assert split_of(a, b) == "train"


TASK = Task("train-0", "47+85", {"answer": 132})
EASY = Task("train-1", "42+13", {"answer": 55})


def read(text: str) -> tuple[Message, ...]:
    return (Message("user", text),)


def test_the_script_has_the_role_of_the_agent() -> None:
    environment = Arithmetic()
    assert environment.script("reasoner", TASK, read("47+85"), 0) == "2,12+1"
    assert environment.script("actor", TASK, read("2,12+1"), 0) == "132"
    assert environment.script("actor", TASK, read("2,12"), 0) == "122"
    assert environment.script("solver", TASK, read("47+85"), 0) == "132"
    renamed = Arithmetic(roles={"planner": "columns"})
    assert renamed.script("planner", TASK, read("47+85"), 0) == "2,12+1"


def test_flaws_have_their_share_and_are_independent() -> None:
    environment = Arithmetic(flaws={"reasoner": 0.6, "actor": 0.25})
    drops = [environment.script("reasoner", TASK, read("47+85"), seed) == "2,12" for seed in range(1000)]
    ignores = [environment.script("actor", TASK, read("2,12+1"), seed) == "122" for seed in range(1000)]
    assert sum(drops) / 1000 == pytest.approx(0.6, abs=0.05)
    assert sum(ignores) / 1000 == pytest.approx(0.25, abs=0.05)
    both = sum(d and i for d, i in zip(drops, ignores, strict=True)) / 1000
    assert both == pytest.approx(0.15, abs=0.05)
    assert environment.script("reasoner", EASY, read("42+13"), 0) == "5,5"


@pytest.mark.parametrize(
    ("text", "answer"), [("132", "132"), ("= 132.", "132"), ("007", "7"), ("", None), ("2,", "2")]
)
def test_answers_have_a_normal_form(text: str, answer: str | None) -> None:
    assert Arithmetic().extract(text) == answer


def test_impossible_settings_are_errors() -> None:
    with pytest.raises(ValidationError, match="digits: 2"):
        Arithmetic(digits=1, operators=("-",), carry_share=0.5)
    with pytest.raises(ValidationError, match="actor"):
        Arithmetic(flaws={"actor": 1.5})
    with pytest.raises(ValidationError):
        Arithmetic(operators=())
    with pytest.raises(ConfigError, match="Did you mean 'actor'"):
        Arithmetic(flaws={"actr": 0.5}).check(["reasoner", "actor"])


def test_tasks_stay_the_same() -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"digits": 3, "operators": ("+", "-")},
        {"digits": 1, "seed": 4},
        {"carry_share": 0.5},
    ]
    questions = [
        Arithmetic(**kind).task(split, k).question
        for kind in kinds
        for split in ("train", "test")
        for k in range(50)
    ]
    assert questions[:4] == ["64+66", "35+72", "58+31", "15+70"]
    assert hashlib.sha256(" ".join(questions).encode()).hexdigest()[:16] == "0e7a49c8298988f7"


ALL = ("+", "-", "×", "÷")
KINDS: list[dict[str, Any]] = [
    {"operators": ("×",)},
    {"operators": ALL, "digits": 1},
    {"operators": ALL, "operations": 3},
    {"operators": ALL, "operations": 4, "brackets": True},
    {"operators": ALL, "operations": 2, "fractions": True, "digits": 1, "brackets": True},
    {"operators": ("÷",), "operations": 8, "digits": 1},
    {"operators": ("×",), "operations": 3, "digits": 12},
]


class TestExpressions:
    """Products, quotients, brackets and fractions, against Python's own arithmetic on fractions."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_answer_is_the_value_of_the_question(self, kind: dict[str, Any]) -> None:
        environment = Arithmetic(**kind)
        for split, index in ((split, k) for split in ("train", "test") for k in range(30)):
            task = environment.task(split, index)  # type: ignore[arg-type]
            code = re.sub(r"([0-9]+)", r"Fraction(\1)", task.question).replace("×", "*").replace("÷", "/")
            value = eval(code, {"Fraction": Fraction})  # noqa: S307 (digits, signs and brackets alone)
            assert Fraction(task.data["answer"]) == value >= 0
            assert kind.get("fractions") or value.denominator == 1
            operators = [sign for sign in task.question if sign in "+-×÷"]
            assert len(operators) == kind.get("operations", 1)
            assert set(operators) <= set(kind["operators"])
            assert kind.get("brackets") or "(" not in task.question

    @pytest.mark.parametrize("kind", KINDS)
    def test_scripts_reach_it_by_notes_or_alone(self, kind: dict[str, Any]) -> None:
        environment = Arithmetic(**kind)
        for index in range(20):
            task = environment.task("train", index)
            notes = environment.script("reasoner", task, (), 0)
            for text in (
                environment.script("actor", task, read(notes), 0),
                environment.script("solver", task, read(task.question), 0),
            ):
                assert environment.answers.grade(text, task).score == 1.0, (task, notes, text)  # type: ignore[union-attr]

    def test_notes_are_one_step_from_the_answer(self) -> None:
        for question, notes, answer, cut in (
            ("47×85", "3760+235", "3995", "3760"),
            ("3995÷85", "40+7", "47", "40"),
            ("(2+3)×4-6", "20-6", "14", "20"),
            ("3/4+5/6", "9/12+10/12", "19/12", "3/4"),
            ("(3/4)÷(5/6)", "18/20", "9/10", "18"),
            ("20×30", "600", "600", "600"),
            ("1-(2-3)", "1-(-1)", "2", "1"),
        ):
            assert step_before(question, whole=True) == notes
            assert value_of(notes, whole=True) == answer
            assert value_of(step_before(question, whole=False), whole=True) == cut
            assert value_of(notes, whole=False) in {cut, answer}
        assert value_of("?", whole=True) == value_of("1/0", whole=True) == "?"

    def test_flaws_omit_the_last_part(self) -> None:
        environment = Arithmetic(operators=ALL, operations=2, flaws={"reasoner": 1.0})
        wrong = [
            environment.script("actor", task, read(environment.script("reasoner", task, (), 0)), 0)
            != str(task.data["answer"])
            for task in (environment.task("train", index) for index in range(100))
        ]
        assert sum(wrong) > 70

    @pytest.mark.parametrize(
        ("text", "score"),
        [("19/12", 1), ("38/24", 1), ("1 7/12", 1), ("So it is 1 7/12.", 1), ("3/4+5/6 = 1 7/12", 1), (r"\frac{19}{12}", 1),
         ("7/12", 0), ("1.58333", 0), ("11 7/12", 0), ("1.7/12", 0)],
    )  # fmt: skip
    def test_only_equal_values_are_correct(self, text: str, score: int) -> None:
        environment = Arithmetic(fractions=True)
        task = Task("train-0", "3/4+5/6", {"answer": "19/12"})
        assert environment.answers.grade(text, task).score == score  # type: ignore[union-attr]
        assert (environment.extract(text) == "19/12") == bool(score)

    def test_a_quotient_and_its_product_belong_to_one_split(self) -> None:
        environment = Arithmetic(operators=("*", "/"), digits=1)
        factors: dict[str, set[tuple[int, ...]]] = {"train": set(), "test": set()}
        for split, index in ((split, k) for split in factors for k in range(500)):
            task = environment.task(split, index)  # type: ignore[arg-type]
            a, b = map(int, re.split("[×÷]", task.question))
            factors[split].add(tuple(sorted((a, b) if "×" in task.question else (b, task.data["answer"]))))
        assert len(factors["train"]) > 35
        assert not factors["train"] & factors["test"]

    def test_both_spellings_are_one_setting(self) -> None:
        assert Arithmetic(operators=("×", "÷", "−")) == Arithmetic(operators=("*", "/", "-"))

    @pytest.mark.parametrize(
        ("settings", "problem"),
        [
            ({"operators": ("%",)}, "operators"),
            ({"brackets": True}, "operations: 2"),
            ({"operators": ("×",), "carry_share": 0.5}, "carry_share"),
            ({"fractions": True, "carry_share": 0.5}, "carry_share"),
            ({"operations": 9}, "operations"),
            ({"digits": 12, "operations": 4}, "60 digits"),
            ({"digits": 9, "operations": 2, "fractions": True}, "54 digits"),
        ],
    )  # fmt: skip
    def test_incompatible_settings_are_errors(self, settings: dict[str, Any], problem: str) -> None:
        with pytest.raises(ValidationError, match=problem):
            Arithmetic(**settings)
