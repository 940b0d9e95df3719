from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from tests.cli.conftest import TINY, Kapelle

from kapelle.environments.data import source as data_source
from kapelle.runs.reader import read_config, read_metrics, read_provenance


@pytest.mark.usefixtures("no_model")
def test_a_dry_run_shows_the_weights_and_where_settings_come_from(kapelle: Kapelle) -> None:
    Path("more.yaml").write_text("optimizer: {lr: 0.5}\n")
    said = kapelle(
        "train", "demo", "more.yaml", *TINY, "algorithm.name=mappo", "algorithm.group_size=1", "--dry-run"
    )
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert [line.split()[1] for line in lines[2:6]] == ["reasoner", "actor", "critic:reasoner", "base"]
    # Rank 2 on the seven linear layers of one block of 16 → 32: 2 · 256; the critic has rank 16: 8 · 512 + 17.
    assert [line.split("on base")[1].split() for line in lines[2:5]] == [
        ["512", "trains", "reasoner"],
        ["512", "trains", "actor"],
        ["4.11", "k", "trains", "reasoner,", "actor"],
    ]
    assert "  lr: 0.5   # more.yaml" in lines
    assert "  name: mappo   # command line" in lines
    assert "  name: chain   # demo" in lines
    assert "  weight_decay: 0.0" in lines
    shown = yaml.safe_load(said.out)
    assert (shown["optimizer"]["lr"], shown["training"]["steps"]) == (0.5, 2)
    assert not Path("runs").exists()


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    "words",
    [
        ["train", "demo", "--start-from", "missing", "--dry-run"],
        ["train", "demo", "--start-from", "actor=missing", "--dry-run"],
        ["validate", "demo", "start_from=missing"],
        ["compare", "demo", "--algorithms", "grpo,rloo", "--seeds", "1", "start_from=missing"],
    ],
)
def test_missing_weights_to_start_from_are_an_error_before_a_model_loads(
    kapelle: Kapelle, tmp_path: Path, words: list[str]
) -> None:
    said = kapelle(*words)
    assert said.code == 2
    assert f"`start_from` is 'missing', but {tmp_path / 'missing'} does not exist." in said.err


def test_validation_prints_doubts(kapelle: Kapelle) -> None:
    said = kapelle("validate", "demo", "team.sampling.max_tokens=100000", "optimizer.warmup_steps=60")
    assert said.code == 0
    doubts = [line for line in said.out.splitlines() if line.startswith("-   ")]
    assert len(doubts) == 2, "two agents' lengths"
    assert "fit, because the model's context has" in "".join(doubts)
    for name, meant in (("sucess", "success"), ("rewrd/actor", "reward/actor")):
        best = kapelle("validate", "demo", f"checkpoint.best={name}").out
        assert (
            f"`checkpoint.best` is '{name}', which is not a metric of kapelle. Did you mean '{meant}'?\n"
            in best
        )
    for name in ("success", "return/actor", "custom/mine", "info/carry"):
        assert "\n-   " not in kapelle("validate", "demo", f"checkpoint.best={name}").out
    alone = kapelle("validate", "demo", "workflow.name=solo").out
    assert "-   Agent 'actor' is trained, but the workflow `solo` gives it no turn.\n" in alone
    assert not [line for line in kapelle("validate", "demo").out.splitlines() if line.startswith("-   ")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["--resume", "run", "training.steps=3"],
    ],
)
def test_a_run_continues_after_its_last_step(kapelle: Kapelle, run: Path, words: list[str]) -> None:
    origin = read_provenance(run)
    said = kapelle("train", *words, "--json")
    assert said.code == 0, said.err
    assert said.json["steps"] == 3
    assert said.json["accuracy_before"] is not None, "what an earlier process measured is known"
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3]
    assert yaml.safe_load(read_config(run))["training"]["steps"] == 3
    if "run/config.yaml" not in words:
        assert read_provenance(run) == origin
    again = kapelle("train", "--resume", "run")
    assert again.code == 0, again.err
    assert "] training: all 3 steps are done; to continue, raise `training.steps`\n" in again.out


@pytest.mark.slow
@pytest.mark.usefixtures("run")
def test_a_new_run_in_the_folder_of_a_run_does_not_claim_to_be_saved(kapelle: Kapelle) -> None:
    said = kapelle("train", "demo", *TINY, "--run-dir", "run")
    assert said.code == 2
    assert "run already contains a run. Continue it with --resume" in said.err
    assert "The run is saved in" not in said.out


def test_a_resumed_run_reports_changed_data(kapelle: Kapelle) -> None:
    folder = Path("data")
    folder.mkdir()
    for split, start in (("train", 0), ("test", 50)):
        rows = ({"question": f"{k} + 1?", "answer": str(k + 1)} for k in range(start, start + 6))
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ("warmup=null", "workflow.name=parallel", "environment={name: math, path: data}")
    said = kapelle("train", "demo", *TINY, *own, "team.agents=2", "--run-dir", "run")
    assert said.code == 0, said.err
    assert "changed" not in said.out
    (folder / "train.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    data_source.raw_rows.cache_clear()  # as a process that has read nothing yet
    again = kapelle("train", "--resume", "run", "training.steps=3")
    assert again.code == 0, again.err
    line = r"data/train\.jsonl was content [0-9a-f]{12}, is content [0-9a-f]{12}: from step 3 on, this run learns"
    assert re.search(rf"\] resume: {line}", again.out)
    assert len(re.findall(line, again.out)) == 2, "when it goes on, and in the summary"


GPU = """environment: {name: rewarded, path: nowhere.jsonl, rewards: [{function: "mine:exact"}]}
workflow: {name: solo}
algorithm: {name: grpo}
model: {path: ./nowhere, device: cuda}
engine: {name: vllm}
"""


def test_a_dry_run_lists_what_it_lacks_and_finds_what_is_wrong_all_the_same(
    kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kapelle.engines.rollout.vllm.settings.installed", lambda: None)
    Path("gpu.yaml").write_text(GPU)
    said = kapelle("train", "gpu.yaml", "--dry-run", "learning_rate=2e-5")
    assert said.code == 0, said.err
    head, _, settings = said.out.partition("# settings")
    for lacking in ("no file or folder 'nowhere.jsonl'", "needs vLLM", "'./nowhere' does not exist"):
        assert lacking in head
    assert "  lr: 2.0e-05   # command line" in settings
    assert "# learning_rate is read as optimizer.lr" in head
    assert len(kapelle("train", "gpu.yaml", "--dry-run", "--json").json["not_looked_at"]) >= 3
    for wrong, why in {
        "training.tasks_per_step=100000000": "results in 800,000,000 episodes per step",
        "workflow.name=debate": "the team has only 'agent_0'",
        "evaluation.prices={x: [1, 1]}": "'x', which is not an agent",
        "optimizer.lr=-1": "'optimizer.lr' cannot be -1",
    }.items():
        refused = kapelle("train", "gpu.yaml", "--dry-run", wrong)
        assert (refused.code, why in refused.err) == (2, True), refused.err
    assert kapelle("train", "gpu.yaml").code == 2
