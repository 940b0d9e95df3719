from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from tests.workflows.stage import lines, play

from kapelle.environments.nli import NLI
from kapelle.errors import DataError
from kapelle.workflows.vote import Vote

ROWS = [
    {"premise": "A cat sleeps.", "hypothesis": "An animal rests.", "label": "e"},
    {"premise": "A cat sleeps.", "hypothesis": "The cat is black.", "label": 1},
    {"premise": "A cat sleeps.", "hypothesis": "The cat runs.", "label": "Contradiction"},
]
OTHER = [{"premise": "It rains.", "hypothesis": "It is wet.", "label": "0"}]


def folder(path: Path, train: list[dict[str, object]], test: list[dict[str, object]]) -> NLI:
    for name, rows in (("train_r1", train), ("test_r1", test)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return NLI(path=str(path))


def test_labels_are_letters_words_or_numbers(tmp_path: Path) -> None:
    environment = folder(tmp_path, ROWS, OTHER)  # type: ignore[arg-type]
    environment.check(["a"])
    assert [environment.task("train", k).data["answer"] for k in range(3)] == [
        "entailment",
        "neutral",
        "contradiction",
    ]
    assert environment.task("test", 0).question == (
        "Premise: It rains.\nHypothesis: It is wet.\n"
        "Does the premise entail the hypothesis? Answer entailment, neutral or contradiction."
    )


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("entailment", "entailment"),
        ("<answer>N</answer>", "neutral"),
        ("#### Contradiction.", "contradiction"),
        (r"so \boxed{e}", "entailment"),
        ("(c)", "contradiction"),
        ("entailment or neutral", None),
        ("not entailment", None),
        ("0", None),
        ("<answer>e</answer> <answer>c</answer>", None),
        ("", None),
    ],
)
def test_answers(text: str, answer: str | None) -> None:
    assert NLI().extract(text) == answer


async def test_a_vote(tmp_path: Path) -> None:
    environment = folder(tmp_path, ROWS, OTHER)  # type: ignore[arg-type]
    scripts = {"a": lines("<answer>neutral</answer>"), "b": lines("n"), "c": lines("c")}
    [episode] = await play(environment, Vote(), ["a", "b", "c"], scripts, environment.task("train", 1))
    assert episode.rewards == {"a": 1.0, "b": 1.0, "c": 0.0}
    assert episode.success == 1.0
    assert episode.info["label"] == "neutral"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"premise": "p", "hypothesis": "h", "label": "x"}, "line 2: the label 'x'"),
        ({"premise": "p", "hypothesis": "h"}, "line 2 has no field 'label'"),
        ({"premise": "p", "label": "e"}, "line 2 has no field 'hypothesis'"),
    ],
)
def test_a_faulty_row_is_an_error(tmp_path: Path, row: dict[str, object], says: str) -> None:
    environment = folder(tmp_path, [ROWS[0], row], OTHER)  # type: ignore[list-item,arg-type]
    with pytest.raises(DataError, match=says):
        environment.check(["a"])


async def test_anlis_own_rows(data_folder: Path, tmp_path: Path) -> None:
    place = data_folder / "anli"
    if not (place / "r1_dev.jsonl.gz").is_file():
        pytest.skip(f"the folder {place} holds no r1_dev.jsonl.gz (ANLI)")
    shutil.copy(place / "r1_dev.jsonl.gz", tmp_path / "rows.jsonl.gz")
    environment = NLI(path=str(tmp_path / "rows.jsonl.gz"))
    environment.check(["a"])
    train, test = environment.size("train") or 0, environment.size("test") or 0
    assert train + test == 1000
    assert 60 < test < 140
    labels = Counter(environment.task("train", k).data["answer"] for k in range(train))
    assert set(labels) == {"entailment", "neutral", "contradiction"}
    train_premises = {environment.task("train", k).question.split("\nHypothesis")[0] for k in range(train)}
    test_premises = {environment.task("test", k).question.split("\nHypothesis")[0] for k in range(test)}
    assert not train_premises & test_premises


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("entailment", "entailment"),
        ("Entailment.", "entailment"),
        ("**entailment**", "entailment"),
        ("The answer is entailment.", "entailment"),
        ("The answer is **entailment**.", "entailment"),
        ("Label: neutral", "neutral"),
        ("The relationship is contradiction.", "contradiction"),
        ("Both may be true.\n\nAnswer: neutral", "neutral"),
        ("The premise says nothing of it, so the answer is: neutral.", "neutral"),
        ("Neutral is the correct answer.", "neutral"),
        (r"\boxed{\text{neutral}}", "neutral"),
        ("The answer is not entailment.", None),
        ("It is entailment or neutral.", None),
        ("The answer is neither entailment", None),
        ("I don't know", None),
    ],
)
def test_a_label_in_a_sentence(text: str, label: str | None) -> None:
    assert NLI().extract(text) == label
