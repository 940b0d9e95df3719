"""On whole data sets the gold answer is correct, and generic answers are not."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from kapelle.environments.grading.math.grade import gold_problem, library_problem, shared_math_processes
from kapelle.environments.math import Math
from kapelle.types import Split

SPLITS: tuple[Split, ...] = ("train", "test")
CHEATS = {
    "nothing": "",
    "words": "The answer is obvious.",
    "empty box": r"\boxed{}",
    "two boxes": r"\boxed{{{gold}}} or \boxed{{{gold}1}}",
    "hedge": r"\boxed{{{gold} \text{{ or }} 7777}}",
    "list": r"\boxed{{{gold}, 7777}}",
    "a letter times nothing": r"\boxed{{{gold}+0Q}}",
    "the question": r"\boxed{{{question:.200}}}",
    "not a number": r"\boxed{nan}",
    "any number": r"\boxed{7777}",
    "a word for the answer": r"\boxed{answer}",
    "thought": r"<think>\boxed{{{gold}}}</think>",
    "quoted": r"> \boxed{{{gold}}}",
    "fenced": "```\n\\boxed{{{gold}}}\n```",
    "unclosed": r"\boxed{{{gold}",
}


def cheat(what: str, gold: str, question: str) -> str:
    template = CHEATS[what]
    return template.format(gold=gold, question=question) if "{{" in template else template


def answered(source: Path, target: Path, answer: str) -> str:
    """Write the rows that have an answer to a file, and return it."""
    if not source.is_file():
        pytest.skip(f"there is no file {source}")
    text = gzip.decompress(source.read_bytes()).decode()
    rows = list(map(json.loads, text.splitlines())) if ".jsonl" in source.name else json.loads(text)
    target.write_text("".join(json.dumps(row) + "\n" for row in rows if row[answer]))
    return str(target)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize(
    ("file", "question", "answer", "size", "every"),
    [
        ("deepscaler_parts/train_math.json.gz", "problem", "answer", 7470, 40),
        ("deepscaler_parts/train_aime.json.gz", "problem", "answer", 975, 10),
        ("deepmath_sample/train.jsonl.gz", "prompt", "ground_truth", 4994, 40),
    ],
)
async def test_gold_answers_are_correct_and_cheats_are_not(
    data_folder: Path, tmp_path: Path, file: str, question: str, answer: str, size: int, every: int
) -> None:
    path = answered(data_folder / file, tmp_path / "rows.jsonl", answer)
    policies = ("hash", "only_box")
    environment = Math(path=path, question_field=question, answer_field=answer, extraction=policies)
    environment.check(["solver"])
    tasks = [environment.task(split, k) for split in SPLITS for k in range(environment.size(split) or 0)]
    assert len(tasks) == size
    for index, task in enumerate(tasks):
        gold = task.data["answer"]
        solution = environment.script("solver", task, (), 0)
        assert (await environment.grade(solution, gold)).score == 1.0, gold
        for what in CHEATS if index % every == 0 else ():
            grade = await environment.grade(cheat(what, gold, task.question), gold)
            assert grade.score == 0.0, (what, gold)
            unread = gold_problem(gold) is None and library_problem(gold, shared_math_processes())
            assert grade.status != "ungraded" or unread, (what, gold)


def golds_of(path: Path, answer: str) -> list[str]:
    return [json.loads(line)[answer].strip() for line in path.read_text().splitlines()]


FORMS = (
    "x = {n}",
    r"{n}\text{{ cm}}",
    r"{n}^\circ",
    "({n})",
    "{n} dollars",
    r"\${n}",
    r"n={n}\text{{ people}}",
)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize(
    ("file", "answer", "integers"),
    [
        ("deepscaler_parts/train_math.json.gz", "answer", 4400),
        ("deepmath_sample/train.jsonl.gz", "ground_truth", 1900),
    ],
)
async def test_every_integer_is_correct_in_its_usual_forms(
    data_folder: Path, tmp_path: Path, file: str, answer: str, integers: int
) -> None:
    path = Path(answered(data_folder / file, tmp_path / "rows.jsonl", answer))
    rows = golds_of(path, answer)
    whole = [gold for gold in rows if re.fullmatch(r"-?[0-9]+", gold)]
    assert len(whole) > integers
    environment = Math(path=str(path), answer_field=answer, extraction=("only_box",))
    for gold in sorted(set(whole)):
        forms = [form.format(n=gold) for form in FORMS]
        for form in forms:
            assert (await environment.grade(rf"\boxed{{{form}}}", gold)).score == 1.0, form
            near = form.replace(gold, f"{gold}1")
            assert (await environment.grade(rf"\boxed{{{near}}}", gold)).score == 0.0, near
        assert {environment.extract(rf"\boxed{{{form}}}") for form in forms} == {str(int(gold))}


@pytest.mark.long
@pytest.mark.data
async def test_votes_and_grades_agree_on_every_pair_of_gold_answers(
    data_folder: Path, tmp_path: Path
) -> None:
    path = Path(
        answered(data_folder / "deepscaler_parts/train_math.json.gz", tmp_path / "rows.jsonl", "answer")
    )
    golds = sorted(set(golds_of(path, "answer")))
    environment = Math(path=str(path), answer_field="answer", extraction=("only_box",))
    forms: dict[str, list[str]] = {}
    for gold in golds:
        forms.setdefault(str(environment.extract(rf"\boxed{{{gold}}}")), []).append(gold)
    alike = [(one, other) for same in forms.values() for one in same[:1] for other in same[1:]]
    assert len(alike) > 50
    differ = [
        (one, other, (await environment.grade(rf"\boxed{{{one}}}", other)).score) for one, other in alike
    ]
    assert [pair for *pair, score in differ if score != 1.0] == []
