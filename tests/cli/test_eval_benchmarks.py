"""`kapelle eval --benchmark`: a run and a model on published benchmarks, and every fault before a model is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Kapelle
from tests.support.tiny import tiny_model

from kapelle.environments import judged
from kapelle.models.weights import save_model
from kapelle.runs.findings import read_evaluated
from kapelle.types import Message

ROWS = [{"question": f"{k}+{k}?", "answer": f"#### {2 * k}"} for k in range(4)]
RACE: dict[str, Any] = {
    "question_id": 101,
    "category": "reasoning",
    "turns": ["1+1?", "2+1?"],
    "reference": ["2", "3"],
}


def data(name: str, *rows: object) -> Path:
    file = Path(name)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_run_is_evaluated_by_the_name_of_a_benchmark(kapelle: Kapelle, run: Path) -> None:
    file = data("questions.jsonl", *ROWS)
    said = kapelle(
        "eval", str(run), "--benchmark", "gsm8k", f"gsm8k.path={file}", "gsm8k.shots=0", "--samples", "2",
        "--no-baselines", "--output", "results.json", "--json",
    )  # fmt: skip
    assert said.code == 0, said.err
    row = said.json
    assert (row["environment"], row["steps"], row["team"]["problems"]) == ("gsm8k", 2, 4)
    found = row["benchmark"]
    assert found["data"] == {str(file): hashlib.sha256(file.read_bytes()).hexdigest()}
    assert (found["name"], found["shots"], found["form"], found["metric"]) == (
        "gsm8k",
        0,
        "chat",
        "strict-match",
    )
    assert (found["problems"], found["evaluated"]) == (4, 4)
    assert "lm-evaluation-harness 4e7e0d47" in found["definition"]
    assert found["scores"]["strict-match"] == row["team"]["success"]
    assert {"pass@1", "pass@2", "avg@2"} <= set(row["team"]["parts"])
    kept = json.loads(Path("results.json").read_text())
    assert [len(each["turns"]) for each in kept["episodes"]] == [2] * 8, "the workflow of the run: two agents"
    assert {each["question"] for each in kept["episodes"]} == {
        f"Question: {k}+{k}?\nAnswer:" for k in range(4)
    }
    assert read_evaluated(run)[-1]["benchmark"] == found
    assert f"gsm8k.path={file}" in read_evaluated(run)[-1]["settings"]


def test_a_model_answers_two_benchmarks_and_the_table_names_the_shots(kapelle: Kapelle) -> None:
    save_model(Path("model"), tiny_model())
    file = data("questions.jsonl", *ROWS)
    halves = data("halves.jsonl", {"problem": "1/2?", "answer": "\\frac{1}{2}"})
    said = kapelle(
        "eval", "model", "-b", "gsm8k,math", f"gsm8k.path={file}", f"gsm8k.shots_path={file}", "gsm8k.shots=1", "-n", "2",
        f"math.path={halves}", "math.shots=0", "math.form=completion", "team.sampling.max_tokens=4", "--table", "lm-eval",
    )  # fmt: skip
    assert said.code == 0, said.err
    lines = [[cell.strip() for cell in line.split("|")[1:]] for line in said.out.splitlines()[2:]]
    assert [line[:5] for line in lines] == [
        ["gsm8k", "1", "strict-match", "1", "success"],
        ["math", "1", "is_equiv", "0", "success"],
    ]
    team = kapelle(
        "eval", "--model", "model", "--environment", "demo", "-b", "gsm8k", f"gsm8k.path={file}", "gsm8k.shots=0",
        "team.sampling.max_tokens=4", "--no-baselines", "--json",
    )  # fmt: skip
    assert team.code == 0, team.err
    assert list(team.json["agents"]) == ["reasoner", "actor"]
    assert team.json["benchmark"]["max_tokens"] == {"reasoner": 4, "actor": 4}


def test_mt_bench_has_two_turns(kapelle: Kapelle, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Sequence[Message]] = []

    async def judge(messages: Sequence[Message]) -> str:
        read.append(messages)
        return "[[8]]" if RACE["turns"][1] in messages[1].content else "[[4]]"

    monkeypatch.setattr(judged, "query_endpoint", lambda _: judge)
    file = data("question.jsonl", RACE)
    said = kapelle(
        "eval", str(run), "--benchmark", "mt_bench", f"mt_bench.path={file}",
        "mt_bench.judge={endpoint: 'http://localhost:1/v1', model: judge}", "--no-baselines", "--json",
    )  # fmt: skip
    assert said.code == 0, said.err
    found = said.json["benchmark"]
    assert found["scores"] == {"rating": pytest.approx(6.0)}
    assert found["judge"]["model"] == "judge"
    parts = said.json["team"]["parts"]
    assert (parts["turn 1"]["success"], parts["turn 2"]["success"]) == (0.4, 0.8)
    assert len(read) == 2


def test_the_list(kapelle: Kapelle) -> None:
    said = kapelle("eval", "--benchmark", "list")
    assert [line.split()[0] for line in said.out.splitlines()[1:]] == [
        "gsm8k",
        "math",
        "humaneval",
        "mbpp",
        "mt_bench",
    ]


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-b", "gms8k"], "--benchmark 'gms8k' is unknown. Did you mean 'gsm8k'?"),
        (["-b", "gsm8k", "gsm8k.path=none.jsonl"], "the columns are question, answer"),
        (["-b", "gsm8k", "gsm8k.shot=0"], "`gsm8k.shot`"),
        (["-b", "gsm8k", "math.shots=0"], "is a setting of math"),
        (["-b", "mt_bench", "mt_bench.path=x.jsonl"], "needs a judge"),
        (["-b", "gsm8k", "gsm8k.path=x.jsonl", "gsm8k.shots=0"], "context"),
        (
            ["-b", "gsm8k", "gsm8k.path=y.jsonl", "gsm8k.shots=0", "gsm8k.form=completion"],
            "gsm8k.form=completion",
        ),
    ],
)
def test_faults_come_before_a_model_is_loaded(
    kapelle: Kapelle, run: Path, words: list[str], message: str
) -> None:
    data("x.jsonl", {"question": "one " * 100, "answer": "#### 1"})
    data("y.jsonl", *ROWS)
    said = kapelle("eval", str(run), *words)
    assert said.code == 2
    assert message in said.err
