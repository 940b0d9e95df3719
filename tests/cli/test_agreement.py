"""`kapelle validate --judge`: agreement of judges with graded answers, by hand and over a real endpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.judging import judging

from kapelle.cli import main
from kapelle.cli.agreement import agree, read_graded
from kapelle.errors import DataError


def test_each_number_by_hand() -> None:
    found = agree("rank", [[(0.5, 1.0), (0.5, 0.0)], [(0.2, 1.0), (0.7, 0.0)]], 0)
    assert found.auc is not None
    assert found.auc.value == pytest.approx(
        (0.5 + 0.0 + 0.0 + 0.0) / 4
    )  # 0.5 against 0.5 and 0.7; 0.2 against both
    assert found.accuracy is not None
    assert found.accuracy.value == pytest.approx((0.5 + 0.5 + 0.0 + 0.0) / 4)
    assert found.pairs is not None
    assert found.pairs.value == 0.25  # a tie, and one the wrong way round
    assert found.spearman is not None
    assert found.spearman.value == -0.5  # 0 where the judge tells nothing apart, -1 where it is wrong


def test_grades_between_have_no_accuracy_and_equal_grades_no_correlation() -> None:
    found = agree("rubric", [[(0.5, 0.25), (0.7, 0.75)]], 0)
    assert (found.auc, found.accuracy) == (None, None)
    assert found.spearman is not None
    assert (found.spearman.value, found.spearman.interval) == (1.0, None)
    same = agree("rubric", [[(0.5, 1.0), (0.7, 1.0)]], 0)
    assert (same.auc, same.spearman, same.pairs) == (None, None, None)
    assert agree("rubric", [], 3).ungraded == 3


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "q", "score": 1}, "has no string"),
        ({"question": "q", "text": "t", "score": 2}, "from 0 to 1"),
        ({"question": "q", "text": "t", "score": "good"}, "from 0 to 1"),
    ],
)
def test_a_row_that_is_no_graded_answer_is_named(row: dict[str, object], said: str, tmp_path: Path) -> None:
    file = tmp_path / "graded.jsonl"
    file.write_text(json.dumps({"question": "q", "text": "t", "score": True}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=f"line 2.*{said}"):
        read_graded(file)


def recipe(folder: Path, rewards: object) -> str:
    rows, file = folder / "rows.jsonl", folder / "recipe.yaml"
    rows.write_text(json.dumps({"question": "Say much", "answer": "much"}) + "\n")
    said = {
        "name": "judged",
        "environment": {"name": "rewarded", "path": str(rows), "eval_path": "none", "rewards": rewards},
        "workflow": {"name": "solo"},
        "algorithm": {"name": "grpo"},
    }
    file.write_text(json.dumps(said))
    return str(file)


def test_the_judges_of_a_recipe_score_graded_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graded = tmp_path / "graded.jsonl"
    texts = {"q": {"aaaaaaaa": True, "a": False, "aa": False}, "p": {"bbbbbbb": True, "b": False}}
    rows = [
        {"question": question, "text": text, "score": score}
        for question, answers in texts.items()
        for text, score in answers.items()
    ]
    graded.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with judging(len) as server:
        rewards = [
            {"rubric": {"clear": "?", "right": "?"}, "judge": server.settings},
            {"rank": "longer", "judge": server.settings},
        ]
        assert main(["validate", recipe(tmp_path, rewards), "--judge", str(graded), "--json"]) == 0
        asked = server.asked
    found = json.loads(capsys.readouterr().out)
    assert asked == found["calls"] == 5 + 2 * 2
    assert [each["name"] for each in found["rewards"]] == ["rubric", "rubric/clear", "rubric/right", "rank"]
    for each in found["rewards"]:
        assert (each["graded"], each["ungraded"]) == (5, 0)
        assert each["auc"]["value"] == each["accuracy"]["value"] == each["pairs"]["value"] == 1.0
    assert (found["rewards"][3]["disagreement"], found["rewards"][3]["reversed"]) == (0.0, 0.0)
    assert found["rewards"][0]["disagreement"] is None


def test_a_recipe_without_a_judge_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graded = tmp_path / "graded.jsonl"
    graded.write_text(json.dumps({"question": "q", "text": "t", "score": 1}) + "\n")
    assert main(["validate", "demo", "--judge", str(graded)]) != 0
    assert "no judge" in capsys.readouterr().err
    assert main(["validate", "demo", "--json"]) != 0
