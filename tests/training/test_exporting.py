"""What an export holds is what was trained: adapters and merged models compute the same, in other programs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, ModelCardData
from tests.support.five_steps import settings

from kapelle.errors import ModelError
from kapelle.models.adapters import base_and_adapter
from kapelle.runs.findings import keep_evaluation
from kapelle.runs.model_card import Exported, model_card
from kapelle.setup.preparation import PreparedRun
from kapelle.training.exporting import export
from kapelle.training.observer import Silent
from kapelle.training.trainer import Trainer

IDS = torch.tensor([[7, 65, 66, 67, 9, 10, 80]])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("export") / "run"
    own = {**settings(), "name": "two <script> | teams", "optimizer": {"lr": 0.1}}
    with Trainer(**own, run_dir=run, origin={"optimizer.lr": "command line"}) as trainer:
        trainer.evaluate()
        trainer.train(2)
    team = {
        "success": 0.5,
        "interval": [0.25, 0.75],
        "scored": 8,
        "problems": 9,
        "tokens": 21.25,
        "stderr": 0.125,
        "parts": {},
    }
    alone = {"agents": ["agent_0"], "answers": 1, **team, "success": 0.125}
    keep_evaluation(
        run, {"environment": "sums", "steps": 2, "team": team, "baselines": [alone], "sets": []}, []
    )
    return run


def logp(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits.log_softmax(-1)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # inside peft
def test_merged_models_compute_what_the_adapters_do(run: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapters = export(run, tmp_path / "peft", "peft", Silent())
    merged = export(run, tmp_path / "hf", "hf", Silent())
    alone = tmp_path / "alone"
    one = export(run, alone, "hf", Silent(), agents=("agent_1",))
    assert [each.policy for each in adapters] == [each.policy for each in merged] == ["agent_0", "agent_1"]
    found = []
    for each in adapters:
        place = tmp_path / "peft" / each.folder
        assert not (place / "base").exists(), "the adapters share one"
        found_base, adapter = base_and_adapter(str(place))
        assert (Path(found_base).resolve(), adapter) == (tmp_path / "peft" / "base", str(place))
        base = AutoModelForCausalLM.from_pretrained(found_base)
        before = logp(base)
        theirs = logp(peft.PeftModel.from_pretrained(base, place))
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "hf" / each.folder)
        assert (logp(whole) - theirs).abs().max() <= 1e-5
        assert (theirs - before).abs().max() > 1e-3, "the adapter does something"
        assert whole.dtype == torch.float32
        found.append(theirs)
    assert (found[0] - found[1]).abs().max() > 1e-3
    assert [each.folder for each in one] == ["."]
    assert (logp(AutoModelForCausalLM.from_pretrained(alone)) - found[1]).abs().max() <= 1e-5
    assert json.loads((alone / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert AutoTokenizer.from_pretrained(alone)("12").input_ids


def test_what_the_converter_does_not_know_is_said_before_anything_is_loaded(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreparedRun, "load", None)
    with pytest.raises(ModelError, match="embedded"):
        export(run, tmp_path / "gguf", "gguf-ready", Silent())
    assert not (tmp_path / "gguf").exists()


@pytest.mark.slow
def test_the_card_holds_settings_curve_and_evaluation_as_text(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out", "peft", Silent(), licence="apache-2.0")
    card = (tmp_path / "out" / "README.md").read_text()
    data = ModelCardData(**ModelCard(card).data.to_dict())  # as the Hub reads it
    assert (data.library_name, data.pipeline_tag, data.license) == ("peft", "text-generation", "apache-2.0")
    (result,) = data.eval_results or []
    assert (result.dataset_name, result.metric_type, result.metric_value) == ("sums", "success", 0.5)
    assert "# two \\<script\\> \\| teams" in card
    assert "| optimizer.lr | 0.1 |" in card
    assert "| team | 0.500 | \\[0.250, 0.750\\] | 8 of 9 | 21.2 |" in card
    assert "| agent\\_0 alone | 0.125 |" in card
    assert "## Curve" in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize(
    ("base", "name"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("gpt2", "gpt2"),
        ("models/mine", None),
        ("models/mine/model.gguf", None),
        ("missing/mine/model.gguf", None),
        ("modelscope:Qwen/Qwen3-0.6B", None),
    ],
)
def test_the_card_names_a_base_on_the_hub_and_no_local_one(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str, name: str | None
) -> None:
    (tmp_path / "models/mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    card = model_card(run, 2, [Exported("one", ["agent_0"], ".", base, "peft", "float32")])
    assert ModelCard(card).data.to_dict().get("base_model") == name
