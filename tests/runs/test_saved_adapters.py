"""Loaded weights compute the same as when they were saved, or an error says why not.

Covers starting weights, stages, past selves, resumed checkpoints, verifiers and models in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tests.cli.conftest import call
from tests.support.tiny import SIZE, draw_samples, sections, stir, tiny_model
from torch import Tensor

from kapelle import Trainer
from kapelle.errors import CheckpointError, ModelError
from kapelle.models.checksums import base_of, write_checksums

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

SAVED = {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "v_proj", "down_proj"]}
OTHERS = [
    ({"alpha": 8.0}, "alpha is 4.0 in the folder, but 8.0 in this team"),
    ({"targets": [*SAVED["targets"], "k_proj"]}, "targets"),  # type: ignore[misc]
]


def team(lora: Mapping[str, Any] = SAVED, **agent: Any) -> dict[str, Any]:
    agents = [{"name": "ada", "lora": dict(lora), **agent}, {"name": "ben", "lora": dict(SAVED)}]
    return {"agents": agents, "sampling": {"max_tokens": 4}}


def by_peft(folder: Path, **settings: Any) -> Tensor:
    """Save an adapter as PEFT does and return PEFT's log-probs of the samples' tokens."""
    peft = pytest.importorskip("peft")
    base = tiny_model()
    config = peft.LoraConfig(
        **{"r": 2, "lora_alpha": 4, "target_modules": SAVED["targets"], "task_type": "CAUSAL_LM", **settings}
    )
    model: Any = peft.get_peft_model(copy.deepcopy(base.model), config).eval()
    stir({name: p for name, p in model.named_parameters() if "lora_" in name}, 7)
    model.save_pretrained(str(folder))
    return scored(model)


def scored(model: Any) -> Tensor:
    """Return a transformers model's log-probs of the samples' tokens."""
    found = []
    with torch.no_grad():
        for sample in draw_samples(["ada"], [(5, 4), (3, 6)]):
            logp = torch.log_softmax(model(input_ids=torch.tensor([sample.tokens])).logits[0].float(), -1)
            found.append(torch.stack([logp[t - 1, sample.tokens[t]] for t in sample.targets]))
    return torch.cat(found)


def by_kapelle(trainer: Trainer) -> Tensor:
    return torch.cat(trainer.engine.score(draw_samples(["ada"], [(5, 4), (3, 6)])))


@pytest.fixture
def loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def loading(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("kapelle.setup.model_loading.load_models", loading)


@pytest.mark.parametrize(("how", "root"), [("start_from", True), ("past", False)])
def test_an_adapter_of_peft_keeps_its_log_probs(how: str, root: bool, tmp_path: Path) -> None:
    expected = by_peft(tmp_path, use_rslora=root)
    lora = {**SAVED, "alpha": 4.0 * 2**0.5 if root else 4.0}
    past = {"weights": {"past": str(tmp_path)}} if how == "past" else {}
    start = {"ada": tmp_path} if how == "start_from" else {}
    # A past self does not use the alpha, rank and layers of the team.
    own = team({"rank": 4, "alpha": 9.0} if past else lora, **past)
    with Trainer(**sections(team=own, model=tiny_model()), start_from=start) as trainer:
        assert float((by_kapelle(trainer) - expected).abs().max()) < 1e-5


def test_peft_computes_what_a_trained_policy_computes(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    plain = copy.deepcopy(tiny_model().model)
    own = team({**SAVED, "alpha": 5.0})
    with Trainer(**sections(team=own, model=tiny_model(), optimizer={"lr": 0.1})) as trainer:
        for _ in trainer.steps(2):
            pass
        trainer.save_policies(tmp_path)
        expected = by_kapelle(trainer)
    assert float((scored(plain) - expected).abs().max()) > 0.01
    theirs = peft.PeftModel.from_pretrained(plain, str(tmp_path / "policies" / "ada")).eval()
    assert float((scored(theirs) - expected).abs().max()) < 1e-5


@pytest.mark.usefixtures("loads_nothing")
class TestStartFrom:
    @pytest.mark.parametrize(("over", "told"), OTHERS)
    def test_an_adapter_with_other_settings_raises(
        self, over: dict[str, Any], told: str, tmp_path: Path
    ) -> None:
        by_peft(tmp_path)
        with pytest.raises(ModelError, match=rf"'ada' .*{told}"):
            Trainer(**sections(team=team({**SAVED, **over})), start_from={"ada": tmp_path})

    def test_additional_tensors_raise(self, tmp_path: Path) -> None:
        by_peft(tmp_path)
        file = tmp_path / "adapter_model.safetensors"
        save_file({**load_file(file), "base_model.model.model.norm.weight": torch.ones(16)}, file)
        with pytest.raises(ModelError, match=r"norm\.weight' is \(16,\) in the folder"):
            Trainer(**sections(team=team()), start_from={"ada": tmp_path})
        with pytest.raises(ModelError, match=r"Agent 'ada' .*norm\.weight'"):
            Trainer(**sections(team=team(weights={"past": str(tmp_path)})))


@pytest.mark.parametrize("how", ["start_from", "past"])
def test_an_adapter_on_another_base_raises(how: str, tmp_path: Path) -> None:
    with Trainer(**sections(team=team())) as first:
        first.save_policies(tmp_path)
    folder = tmp_path / "policies" / "ada"
    assert base_of(folder) == first.base_hashes["base"]
    past = {"weights": {"past": str(folder)}} if how == "past" else {}
    start = {"ada": folder} if how == "start_from" else {}
    Trainer(**sections(team=team(**past)), start_from=start).close()
    with pytest.raises(ModelError, match="base weights that differ"):
        Trainer(**sections(team=team(**past), model={"embedded": {**SIZE, "seed": 5}}), start_from=start)


def test_a_run_with_another_alpha_raises(tmp_path: Path) -> None:
    with Trainer(**sections(training={"steps": 1, "tasks_per_step": 2}), run_dir=tmp_path / "run") as trainer:
        trainer.train()
    Trainer.from_run(tmp_path / "run").close()
    with pytest.raises(CheckpointError, match=r"'agent_0'.*'alpha': 4\.0.*'alpha': 8\.0"):
        Trainer.from_run(tmp_path / "run", "team.lora.alpha=8")


class TestVerifiers:
    @pytest.fixture
    def verifier(self, tmp_path: Path) -> Path:
        own = {"sharing": "frozen", "agents": 1, "critic_lora": {"rank": 2, "alpha": 4.0}}
        settings = {"name": "verifier", "data": "recorded"}
        copies = {"name": "tests.support.copies:Copies"}
        with Trainer(
            **sections(environment=copies, workflow={"name": "solo"}, algorithm=settings, team=own)
        ) as judge:
            judge.save_policies(tmp_path)
        return tmp_path / "verifier"

    def run(self, verifier: Path) -> Trainer:
        pays = {"name": "maporl", "verifier": str(verifier), "least_auc": None, "group_size": 2}
        return Trainer(**sections(algorithm=pays))

    def test_a_head_of_another_size_raises(self, verifier: Path) -> None:
        save_file({"weight": torch.ones(1, 8), "bias": torch.ones(1)}, verifier / "value_head.safetensors")
        write_checksums(verifier)
        with pytest.raises(ModelError, match="value head"):
            self.run(verifier)


class TestStages:
    def recipe(self, folder: Path, second: Mapping[str, Any], **first: Any) -> str:
        values = sections(environment={"name": "arithmetic"}, workflow={"name": "parallel"})
        values["stages"] = [{"name": "one", **first}, {"name": "two", **second}]
        del values["evaluation"]["problems"]
        (folder / "two.yaml").write_text(yaml.safe_dump(values))
        return str(folder / "two.yaml")

    @pytest.mark.parametrize(
        ("second", "told"),
        [
            ({"team": {"lora": {"alpha": 8.0}}}, "lora.alpha is 4.0 there and 8.0 here"),
            ({"warmup": {"steps": 2}}, "what made the base is nothing there"),
        ],
    )
    def test_a_stage_with_other_settings_raises_before_the_first_one_runs(
        self, second: Mapping[str, Any], told: str, tmp_path: Path
    ) -> None:
        said = call("train", self.recipe(tmp_path, second), "--run-dir", str(tmp_path / "run"))
        assert said.code == 2
        assert "'two'" in said.err
        assert told in said.err
        assert not (tmp_path / "run").exists()
