"""verl's and siiRL's parquet, and unusable rows, which are reported and excluded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import call
from tests.support.tiny import SIZE

from kapelle.environment import Reporting, offers
from kapelle.environments.code import Code
from kapelle.environments.math import Math
from kapelle.environments.mixture import Mixture
from kapelle.environments.nli import NLI
from kapelle.environments.recorded import Labelled, Preferences
from kapelle.errors import DataError


def verl(question: str, answer: object, source: str = "openai/gsm8k", split: str = "train") -> dict[str, Any]:
    """Return a row as verl's and siiRL's preprocessing writes it."""
    return {
        "data_source": source,
        "prompt": [
            {"role": "system", "content": "Think step by step."},
            {"role": "user", "content": question},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": 0, "answer": f"Work. #### {answer}"},
    }


def parquet(folder: Path, **splits: Sequence[dict[str, Any]]) -> Path:
    pytest.importorskip("pyarrow")
    from pyarrow import Table
    from pyarrow import parquet as files

    folder.mkdir(exist_ok=True)
    for name, rows in splits.items():
        files.write_table(Table.from_pylist(list(rows)), folder / f"{name}.parquet")
    return folder


def jsonl(folder: Path, **splits: Sequence[dict[str, Any]]) -> str:
    folder.mkdir(exist_ok=True)
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


VERL = ("environment.question_field=prompt", "environment.answer_field=reward_model.ground_truth")


async def test_verls_parquet_is_read_with_dotted_fields(tmp_path: Path) -> None:
    train = [verl(f"{k}+1?", str(k + 1)) for k in range(6)]
    test = [verl(f"{k}+1?", str(k + 1), source) for k in (50, 51) for source in ("openai/gsm8k", "math")][:3]
    path = str(parquet(tmp_path / "verl", train=train, test=test))
    environment = Math(path=path, question_field="prompt", answer_field="reward_model.ground_truth")
    task = environment.task("train", 0)
    assert (task.question, task.data["answer"]) == ("0+1?", "1")
    assert (await environment.grade("#### x = 1", "1")).score == 1.0
    whole = Math(path=path, question_field="prompt", answer_field="extra_info.answer")
    assert whole.task("train", 0).data["answer"] == "1"
    assert whole.script("reasoner", whole.task("train", 0), (), 0) == "Work."
    assert environment.task("test", 1).data["part"] == "math"
    with pytest.raises(DataError, match=r"reward_model\.ground_truth"):
        Math(path=path).check(["solver"])


@pytest.mark.slow
def test_a_team_trains_on_verls_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [verl(f"{k}+1?", str(k + 1)) for k in range(200)]
    rows[17]["reward_model"]["ground_truth"] = ""
    folder = parquet(tmp_path / "verl", train=rows, test=[verl("500+1?", "501")])
    Path("tiny.yaml").write_text(
        json.dumps(
            {
                "name": "tiny",
                "model": {"path": "embedded", "embedded": SIZE},
                "team": {"agents": [{"name": "solver"}], "sampling": {"max_tokens": 4}},
                "environment": {"name": "math", "path": str(folder)},
                "workflow": {"name": "solo"},
                "algorithm": {"name": "grpo", "group_size": 2},
                "training": {"steps": 1, "tasks_per_step": 2},
                "evaluation": {"problems": 1},
            }
        )
    )
    result = call("train", "tiny.yaml", *VERL, "--run-dir", "run")
    assert result.code == 0, result.err
    assert result.out.count("1 of 200 rows") == 2, "at the start and at the end"
    assert "row 18" in result.out


GOOD = [{"question": f"q{k}", "answer": f"#### {k}"} for k in range(300)]
BAD: list[dict[str, Any]] = [
    {"question": "empty", "answer": ""},
    {"question": "none", "answer": None},
    {"question": "list", "answer": [1]},
    {"question": "", "answer": "#### 1"},
    {"question": 7.5, "answer": True},
    {"question": "x" * 60_000, "answer": "#### 1"},
    {"answer": "#### 1"},
]


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_one_unusable_row_in_three_hundred_is_excluded(tmp_path: Path, bad: dict[str, Any]) -> None:
    path = jsonl(
        tmp_path / "d", train=[*GOOD[:100], bad, *GOOD[100:]], test=[{"question": "t", "answer": "1"}]
    )
    environment = Math(path=path)
    environment.check(["solver"])
    assert environment.size("train") == 300
    assert offers(environment, Reporting)
    assert environment.skipped()["train"].startswith("1 of 301 rows")
    assert f"{path}/train.jsonl, line 101" in environment.skipped()["train"]


def test_too_many_unusable_rows_are_an_error(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d", train=[*GOOD[:100], *BAD], test=GOOD[200:])
    with pytest.raises(DataError) as error:
        Math(path=path).check(["solver"])
    message = str(error.value)
    assert "7 of 107 rows" in message
    assert [f"line {line}" in message for line in (101, 102, 103, 104)] == [True, True, True, False]
    assert message.endswith("and 4 more")
    generous = Math(path=path, max_unusable=0.1)
    generous.check(["solver"])
    assert generous.size("train") == 100


def test_every_environment_of_rows_excludes_unusable_ones(tmp_path: Path) -> None:
    pairs = [{"premise": f"p{k}", "hypothesis": "h", "label": "n"} for k in range(9)]
    nli = NLI(
        path=jsonl(tmp_path / "nli", train=[*pairs, {**pairs[0], "label": "?"}], test=[{**pairs[0], "premise": "t"}]),
        train="train", test="test", max_unusable=0.2,
    )  # fmt: skip
    choices = [{"prompt": f"p{k}", "chosen": "a", "rejected": "b"} for k in range(9)]
    preferences = Preferences(
        path=jsonl(tmp_path / "pref", train=[*choices, {**choices[0], "rejected": "a"}], test=[{**choices[0], "prompt": "t"}]),
        max_unusable=0.2,
    )  # fmt: skip
    solved = [{"question": f"q{k}", "solution": "s", "is_correct": True} for k in range(9)]
    labelled = Labelled(
        path=jsonl(tmp_path / "lab", train=[*solved, {**solved[0], "is_correct": 3}], test=[{**solved[0], "question": "t"}]),
        max_unusable=0.2,
    )  # fmt: skip
    asserts = [
        {"task_id": k, "text": "t", "code": "x = 1", "test_setup_code": "", "test_list": ["assert x"]}
        for k in range(9)
    ]
    code = Code(
        path=jsonl(tmp_path / "code", train=[*asserts, {**asserts[0], "test_list": []}], test=[{**asserts[0], "task_id": 99}]),
        max_unusable=0.2,
    )  # fmt: skip
    for environment in (nli, preferences, labelled, code):
        assert environment.size("train") == 9, environment.name
        assert "1 of 10 rows" in environment.skipped()["train"], environment.name
        assert "train.jsonl, line 10" in environment.skipped()["train"], environment.name
    both = Mixture.model_validate(
        {"parts": {"one": {"environment": nli.model_dump()}, "two": {"environment": labelled.model_dump()}}}
    )
    assert both.skipped()["train"].count("1 of 10 rows") == 2


def test_nli_and_code_read_verls_form_too(tmp_path: Path) -> None:
    rows = [verl("Premise … entail?", "neutral"), verl("Another?", "c")]
    nli = NLI(
        path=jsonl(tmp_path / "nli", train=rows[:1], test=rows[1:]),
        train="train", test="test", question_field="prompt", label_field="reward_model.ground_truth",
    )  # fmt: skip
    task = nli.task("test", 0)
    assert (task.question, task.data["answer"]) == ("Another?", "contradiction")
    tests = json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})
    programs = [verl("Print one more.", tests), verl("Print two more.", tests)]
    code = Code(
        path=jsonl(tmp_path / "code", train=programs[:1], test=programs[1:]),
        format="stdio", question_field="prompt", tests_field="reward_model.ground_truth",
    )  # fmt: skip
    assert code.task("train", 0).question == "Print one more."


def test_an_empty_test_share_is_an_error(tmp_path: Path) -> None:
    folder = jsonl(tmp_path / "d", rows=GOOD[:4])
    with pytest.raises(DataError, match="test_share"):
        Math(path=f"{folder}/rows.jsonl", test_share=0.01).check(["solver"])
