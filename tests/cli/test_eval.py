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


def test_a_swap_is_reported_beside_the_team_on_the_same_problems(
    kapelle: Kapelle, finished: tuple[Path, Said]
) -> None:
    words = ("eval", str(finished[0]), "--swap", "--no-baselines", "evaluation.problems=6")
    said = kapelle(*words, "--json")
    assert said.code == 0, said.err
    team, swap = said.json["team"], said.json["swap"]
    assert swap["acts_with"] == {"reasoner": "actor", "actor": "reasoner"}
    assert swap["problems"] == team["problems"] == 6
    assert swap["change"] == pytest.approx(swap["success"] - team["success"])
    assert swap["change_interval"][0] <= swap["change"] <= swap["change_interval"][1]
    assert kapelle(*words[:2], "--no-baselines", "evaluation.problems=6", "--json").json["team"] == team
    shown = kapelle(*words).out
    assert "exchanged weights" in shown
    assert "weights of actor" in shown


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


def test_damaged_checkpoints_are_an_error(kapelle: Kapelle, run: Path) -> None:
    for state in run.rglob("state.json"):
        state.write_bytes(state.read_bytes()[:-1] + b" ")
    said = kapelle("eval", "run")
    assert said.code == 2
    assert said.err.splitlines()[-1].startswith(
        "kapelle: There is no complete checkpoint in run/checkpoints."
    )
