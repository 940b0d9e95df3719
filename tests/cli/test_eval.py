from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import Kapelle, Said
from tests.support.tiny import tiny_model
from transformers import AutoModelForCausalLM

from kapelle.models.checksums import CHECKSUMS
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


class TestOutput:
    """`mrlm eval --model MODEL --environment ENV --num-episodes N --output FILE`, by its own words."""

    def test_every_episode_stands_in_the_file(self, kapelle: Kapelle) -> None:
        save_model(Path("model"), tiny_model())
        said = kapelle(
            "eval", "--model", "model", "--environment", "arithmetic", "--num-episodes", "3", "--output", "results.json",
            "team.sampling.max_tokens=4", "--json",
        )  # fmt: skip
        assert said.code == 0, said.err
        kept = json.loads(Path("results.json").read_text())
        episodes = kept.pop("episodes")
        assert kept == said.json, "the file holds what --json prints"
        assert (kept["team"]["problems"], len(episodes)) == (3, 3)
        assert sum(each["success"] for each in episodes) / 3 == kept["team"]["success"]
        first = episodes[0]
        assert (first["length"], first["error"], list(first["reward"])) == (1, None, ["agent_0"])
        assert first["task"].startswith("test-")
        assert first["turns"][0]["agent"] == "agent_0"
        assert (
            sum(turn["tokens"] for each in episodes for turn in each["turns"]) / 3 == kept["team"]["tokens"]
        )

    @pytest.mark.parametrize(
        ("words", "problem"),
        [
            (["--output", "there.json"], "there.json exists already. Name another --output"),
            (["--output", "no/folder/x.json"], "no/folder/x.json cannot be written"),
            (["--output", "results.csv"], "--output results.csv: name it .json for one object"),
            (["--environment", "algebra,arithmatic"], "Unknown recipe or environment 'arithmatic'. Did you mean 'arithmetic'?"),
            (["--environment", "algebra,"], "--environment 'algebra,' has an empty name."),
            (["--num-episodes", "0"], "argument --num-episodes/-n: 0 is less than 1."),
        ],
    )  # fmt: skip
    def test_wrong_arguments_end_with_one_line_before_a_model_loads(
        self, kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch, words: list[str], problem: str
    ) -> None:
        Path("there.json").write_text("precious")
        monkeypatch.setattr("kapelle.cli.named.open_player", lambda _: pytest.fail("a model is loaded"))
        given = [] if "--environment" in words else ["--environment", "arithmetic"]
        said = kapelle("eval", "--model", "embedded", *given, *words)
        assert (said.code, said.err.count("\n")) == (2, 1)
        assert said.err.startswith(f"kapelle: {problem}")
        assert Path("there.json").read_text() == "precious"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # in PEFT
class TestAdapterFolders:
    """An adapter as PEFT saves it, in place of a model."""

    def saved(self) -> None:
        """Write a base, an adapter of it by PEFT, and both merged by PEFT."""
        peft = pytest.importorskip("peft")
        save_model(Path("base"), tiny_model())
        base = AutoModelForCausalLM.from_pretrained("base")
        model: Any = peft.get_peft_model(
            base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
        )
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        model.save_pretrained("adapter")
        save_model(Path("merged"), tiny_model())
        model.merge_and_unload().save_pretrained("merged")
        (Path("merged") / CHECKSUMS).unlink()

    def said_by(self, kapelle: Kapelle, *words: str) -> list[str]:
        said = kapelle(
            "eval", *words, "--num-episodes", "4", "--output", "x.json", "team.sampling.max_tokens=6"
        )
        assert said.code == 0, said.err
        kept = json.loads(Path("x.json").read_text())
        Path("x.json").unlink()
        return [turn["text"] for each in kept["episodes"] for turn in each["turns"]]

    def test_it_plays_on_the_base_that_it_names(self, kapelle: Kapelle) -> None:
        self.saved()
        alone = self.said_by(kapelle, "--model", "adapter", "--environment", "arithmetic")
        assert alone == self.said_by(kapelle, "--model", "merged", "--environment", "arithmetic")
        assert alone != self.said_by(kapelle, "--model", "base", "--environment", "arithmetic")
        assert alone == self.said_by(kapelle, "adapter", "--environment", "arithmetic"), (
            "a folder alone is enough"
        )
        team = self.said_by(kapelle, "--model", "adapter", "--environment", "demo")
        assert team == self.said_by(kapelle, "--model", "merged", "--environment", "demo")

    def test_its_base_may_lie_elsewhere(self, kapelle: Kapelle) -> None:
        self.saved()
        file = Path("adapter/adapter_config.json")
        file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "./gone"}))
        said = kapelle("eval", "--model", "adapter", "--environment", "arithmetic")
        assert (said.code, said.err.count("\n")) == (2, 1)
        assert "Model folder './gone' does not exist" in said.err
        there = self.said_by(kapelle, "--model", "adapter", "--environment", "arithmetic", "model.path=base")
        assert there == self.said_by(kapelle, "--model", "merged", "--environment", "arithmetic")
        file.write_text(json.dumps({"peft_type": "LORA"}))
        said = kapelle("eval", "--model", "adapter", "--environment", "arithmetic")
        assert (
            said.err
            == "kapelle: adapter/adapter_config.json names no base model (`base_model_name_or_path`). Add model.path=BASE.\n"
        )


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nowhere"], "There is no kapelle run at nowhere."),
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


def test_damaged_checkpoints_are_an_error(kapelle: Kapelle, run: Path) -> None:
    for state in run.rglob("state.json"):
        state.write_bytes(state.read_bytes()[:-1] + b" ")
    said = kapelle("eval", "run")
    assert said.code == 2
    assert said.err.splitlines()[-1].startswith(
        "kapelle: There is no complete checkpoint in run/checkpoints."
    )
