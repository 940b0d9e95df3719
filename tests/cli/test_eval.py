from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import TINY, Kapelle, Said
from tests.support.tiny import tiny_model

from kapelle.models.weights import save_model
from kapelle.runs.findings import read_evaluated
from kapelle.runs.reader import read_evaluations


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_is_measured_as_it_measured_itself_and_gets_one_row(
    kapelle: Kapelle, finished: tuple[Path, Said]
) -> None:
    run, _ = finished
    before = tree(run)
    said = kapelle("eval", str(run), "--json")
    assert said.code == 0, said.err
    assert tree(run) == before | {str(run / "evaluated.jsonl"): (run / "evaluated.jsonl").read_bytes()}
    row = said.json
    assert {key: value for key, value in read_evaluated(run)[-1].items() if key in row} == row
    last = read_evaluations(run)[-1]
    assert row["team"] == {key: value for key, value in last.items() if key != "step"}
    assert (row["steps"], row["environment"], row["greedy"]) == (2, "arithmetic", True)
    assert row["agents"]["reasoner"] is None, "its words are graded through the actor's answer"
    assert row["agents"]["actor"]["success"] == row["team"]["success"]
    assert [each["agents"] for each in row["baselines"] if each["answers"] == 1] == [["reasoner"], ["actor"]]
    for each in row["baselines"]:
        assert each["tokens"] <= round(row["team"]["tokens"])
        assert each["interval"][0] <= each["success"] <= each["interval"][1]


def test_the_table_names_team_agents_parts_and_baselines(
    kapelle: Kapelle, finished: tuple[Path, Said]
) -> None:
    said = kapelle("eval", str(finished[0]), "evaluation.problems=6", "evaluation.greedy=false")
    lines = said.out.splitlines()
    assert lines[0].endswith(
        "after 2 steps: 6 unseen problems of arithmetic, sampled as in training, 95 % intervals"
    )
    first_words = [
        " ".join(line.split("  ")[0 if line[:1] != " " else 1].split()) for line in lines[2:] if line
    ]
    assert first_words[:5] == ["team", "carry", "not carry", "reasoner", "actor"]
    assert {
        "baselines without a team, with the same number of tokens per problem",
        "reasoner alone",
        "actor alone",
    } <= set(first_words)


def test_without_baselines_the_team_stands_alone(kapelle: Kapelle, finished: tuple[Path, Said]) -> None:
    said = kapelle("eval", str(finished[0]), "--no-baselines", "--json")
    assert said.json["baselines"] == []


def test_a_model_plays_an_environment_or_a_recipe(kapelle: Kapelle) -> None:
    save_model(Path("model"), tiny_model())
    small = ("evaluation.problems=3", "team.sampling.max_tokens=4")
    alone = kapelle("eval", "--model", "model", "--environment", "arithmetic", *small, "--json")
    assert alone.code == 0, alone.err
    assert list(alone.json["agents"]) == ["agent_0"]
    assert (alone.json["steps"], alone.json["baselines"]) == (None, [])
    team = kapelle("eval", "--model", "model", "--environment", "demo", *small, "--json")
    assert team.code == 0, team.err
    assert list(team.json["agents"]) == ["reasoner", "actor"]
    # Both agents are the same bare model: alone they say the same.
    assert team.json["baselines"][0]["agents"] == ["reasoner", "actor"]


def test_games_are_measured_by_rewards(kapelle: Kapelle) -> None:
    said = kapelle(
        "eval", "--model", "embedded", "--environment", "matrix", "environment.rules=none", "team.agents=2",
        "evaluation.problems=4",
        "team.sampling.max_tokens=4", *(word for word in TINY if word.startswith("model.")),
    )  # fmt: skip
    assert said.code == 0, said.err
    assert "agent_0" in said.out
    assert "alone" not in said.out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nowhere"], "There is no run of kapelle at nowhere."),
        (["a", "b"], "Name one run directory"),
        (["RUN", "training.steps=9"], "'training.steps=9' would change what was trained."),
        (["RUN", "evaluation.problem=9"], "Unknown key 'evaluation.problem' (set on the command line). Did you mean 'problems'?"),
        (["--model", "./m", "--environment", "arithmetic"], "Model folder './m' does not exist."),
        (["--model", "embedded", "--environment", "arithmatic"], "Unknown recipe or environment 'arithmatic'. Did you mean 'arithmetic'?"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_one_line(
    kapelle: Kapelle, finished: tuple[Path, Said], words: list[str], problem: str
) -> None:
    said = kapelle("eval", *(str(finished[0]) if word == "RUN" else word for word in words))
    assert said.code == 2
    assert said.err.startswith(f"kapelle: {problem}")
    assert said.err.count("\n") == 1


def test_a_run_whose_checkpoints_are_damaged_says_so(kapelle: Kapelle, run: Path) -> None:
    for state in run.rglob("state.json"):
        state.write_bytes(state.read_bytes()[:-1] + b" ")
    said = kapelle("eval", "run")
    assert said.code == 2
    assert said.err.splitlines()[-1].startswith("kapelle: There is no whole checkpoint in run/checkpoints.")
