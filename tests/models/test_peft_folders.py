"""Every field of PEFT's settings, at another value than its default: read as PEFT computes it, or rejected by name.

What decides is PEFT's own forward pass on the same tiny model: log-probs agree to 1e-5, or the folder is rejected.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import tiny_model
from torch import Tensor

pytest.importorskip("peft")

import peft

from kapelle.errors import ModelError
from kapelle.models.adapters import HARMLESS, TAKEN, read_lora
from kapelle.models.language_model import LanguageModel
from kapelle.models.outline import check_saved, outline_of
from kapelle.models.weights import read_adapter
from kapelle.team import Lora

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = torch.arange(6, 26).reshape(2, 10)
TARGETS = ["q_proj", "v_proj", "down_proj"]
FIELDS = {field.name: field for field in dataclasses.fields(peft.LoraConfig)}

MADE: dict[str, list[Any]] = {
    "r": [3],
    "lora_alpha": [5],
    "lora_dropout": [0.3],
    "target_modules": [["q_proj"], ["k_proj", "gate_proj", "o_proj"], r".*\.(q|v)_proj", "all-linear"],
    "use_rslora": [True],
    "inference_mode": [True],
    "revision": ["main"],
    "base_model_name_or_path": ["somewhere/else"],
    "task_type": ["CAUSAL_LM"],
    "init_lora_weights": [False, "gaussian", "orthogonal", "pissa", "pissa_niter_2", "olora", "mica"],
    "rank_pattern": [{"q_proj": 2}],
    "alpha_pattern": [{"q_proj": 32}],
    "exclude_modules": [["v_proj"]],
    "layers_to_transform": [[1]],
    "layer_replication": [[(0, 1), (1, 2)]],
    "bias": ["all", "lora_only"],
    "use_dora": [True],
    "lora_bias": [True],
    "modules_to_save": [["norm"], ["lm_head"]],
    "trainable_token_indices": [[7, 8]],
    "target_parameters": [["mlp.gate_proj.weight"]],
    "alora_invocation_tokens": [[10, 11]],
    "fan_in_fan_out": [True],
    "qalora_group_size": [8],
    "megatron_core": ["somewhere.core"],
}
"""Values with which PEFT itself makes and saves an adapter here."""
WRITTEN: dict[str, list[Any]] = {
    "peft_type": ["IA3", "LOHA", "LOKR", "ADALORA", "PREFIX_TUNING", "VERA", "OFT"],
    "task_type": ["SEQ_CLS", "TOKEN_CLS", "SEQ_2_SEQ_LM"],
    "init_lora_weights": ["loftq", "corda", "eva", "lora_ga", "pissa_niter_16", "of tomorrow", 1],
    "bias": [True],
    "use_dora": [1],
}
"""Values that stand in a file alone, because PEFT would need data or a GPU to make them."""
EXACT = {
    **{key: MADE[key] for key in ("r", "lora_alpha", "lora_dropout", "use_rslora")},
    **{key: MADE[key] for key in ("inference_mode", "revision", "base_model_name_or_path")},
    "target_modules": [MADE["target_modules"][0], MADE["target_modules"][1], "all-linear"],
    "init_lora_weights": [False, "gaussian", "orthogonal"],
    "task_type": ["CAUSAL_LM"],
}
"""What must be read, and not only be rejected: a plain adapter says these."""


def stir_all(module: torch.nn.Module) -> None:
    """Give everything that PEFT trains other values, as training would."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)


def made_by_peft(folder: Path, **settings: Any) -> Tensor:
    """Save an adapter as PEFT does and return the log-probs of PEFT's own forward pass after loading it."""
    base = tiny_model()
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": TARGETS, **settings})
    training = dataclasses.replace(config, inference_mode=False) if config.inference_mode else config
    model: Any = peft.get_peft_model(copy.deepcopy(base.model), training)
    stir_all(model)
    model.save_pretrained(str(folder))
    if config.inference_mode:
        rewrite(folder, inference_mode=True)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base.model), str(folder)).eval()
    with torch.no_grad():
        return torch.log_softmax(again(input_ids=TOKENS, use_cache=False).logits, -1)


def rewrite(folder: Path, **settings: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def ours(folder: Path) -> Tensor:
    """Return the log-probs that kapelle computes with a folder's adapter; ModelError when it rejects it."""
    model = tiny_model()
    check_saved("'a'", folder, read_lora(folder), outline_of(model.model))
    tensors, lora = read_adapter(folder)
    model.bank.add("a", lora, seed=0)
    model.bank.fill("a", tensors)
    with torch.no_grad(), model.bank.routed([("a", 0, 2)]):
        return torch.log_softmax(model.model(input_ids=TOKENS, use_cache=False).logits, -1)


@pytest.mark.sample(5)
@pytest.mark.slow
@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in MADE.items() for v in values], ids=repr)
def test_peft_adapters_have_peft_outputs_or_are_rejected_by_name(
    field: str, value: Any, tmp_path: Path
) -> None:
    expected = made_by_peft(tmp_path, **{field: value})
    refused, found = "", expected
    try:
        found = ours(tmp_path)
    except ModelError as error:
        refused = str(error)
    if refused:
        assert value not in EXACT.get(field, []), refused
        assert field in refused
        assert "merge_and_unload" in refused
    else:
        assert float((found - expected).abs().max()) < 1e-5
        plain = torch.log_softmax(tiny_model().model(input_ids=TOKENS).logits, -1)
        assert float((found - plain).abs().max()) > 0.01, "an adapter that changes nothing shows nothing"


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("field", sorted({*FIELDS} - {*TAKEN, *HARMLESS}))
def test_any_other_value_of_any_other_field_is_rejected_by_name(field: str, tmp_path: Path) -> None:
    made_by_peft(tmp_path)
    ours(tmp_path)
    for value in [*WRITTEN.get(field, []), "odd", {"odd": 1}, ["odd"], 99]:
        rewrite(tmp_path, **{field: value})
        with pytest.raises(ModelError, match=f"{field}: .*merge_and_unload"):
            read_lora(tmp_path)


def test_an_unknown_field_is_accepted_only_if_unused(tmp_path: Path) -> None:
    made_by_peft(tmp_path)
    nothing: list[Any] = [None, False, {}, []]
    for unused in nothing:
        rewrite(tmp_path, use_of_tomorrow=unused)
        ours(tmp_path)
    for used in (True, 0.5, "on", {"a": 1}, 0):
        rewrite(tmp_path, use_of_tomorrow=used)
        with pytest.raises(ModelError, match=r"use_of_tomorrow: "):
            read_lora(tmp_path)


def test_layers_of_peft_in_a_model_in_memory_are_rejected() -> None:
    base = tiny_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        carrying: Any = peft.get_peft_model(base.model, peft.LoraConfig(target_modules=TARGETS))
    for model in (carrying, carrying.get_base_model()):
        with pytest.raises(ModelError, match="merge_and_unload"):
            LanguageModel(model, base.tokenizer)
    assert LanguageModel(carrying.merge_and_unload(), base.tokenizer).bank.adapters == {}


def test_root_r_scaling_is_taken_as_an_alpha(tmp_path: Path) -> None:
    made_by_peft(tmp_path, use_rslora=True)
    assert read_lora(tmp_path) == Lora(4, 16.0, tuple(read_lora(tmp_path).targets))
