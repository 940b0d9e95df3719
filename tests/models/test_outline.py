from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import tiny_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kapelle.models.outline import (
    adapter_parameters,
    outline_of,
    outline_of_settings,
    read_outline,
)
from kapelle.models.weights import save_model
from kapelle.settings.schema import EmbeddedConfig
from kapelle.team import Agent, Critic, Lora, Policy, Team


def test_counts_are_those_of_the_model_that_is_loaded(tmp_path: Path) -> None:
    model = tiny_model()
    save_model(tmp_path / "m", model)
    shape = read_outline(str(tmp_path / "m"), EmbeddedConfig())
    assert shape.parameters == sum(p.numel() for p in model.base_parameters().values())
    model.bank.add("a", Lora(rank=2), seed=0)
    assert adapter_parameters(shape, Lora(rank=2)) == sum(
        p.numel() for p in model.bank.parameters("a").values()
    )


def team(policy: Lora, critic: Lora | None = None) -> Team:
    critics = {} if critic is None else {"critic": Critic("critic", lora=critic)}
    return Team((Agent("a"),), {"a": Policy("a", lora=policy)}, {"a": "a"}, critics=critics)


SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"])
@pytest.mark.parametrize(
    "more",
    [
        {"tie_word_embeddings": True, "head_dim": 8},
        {"tie_word_embeddings": False, "head_dim": 6, "attention_bias": True, "mlp_bias": True},
    ],
)
def test_a_known_architecture_has_the_layers_that_transformers_makes(
    family: str, more: dict[str, Any]
) -> None:
    settings = {"model_type": family, **SMALL, **more}
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{**SMALL, **more}))
    found, expected = outline_of_settings(settings), outline_of(made)
    assert found is not None
    assert dict(found.weights) == dict(expected.weights)
    assert found.layers == expected.layers
    assert (found.hidden, found.parameters) == (24, expected.parameters)


@pytest.mark.parametrize("missing", ["num_key_value_heads", "tie_word_embeddings"])
def test_settings_that_leave_something_to_transformers_are_not_guessed(missing: str) -> None:
    whole = {"model_type": "llama", **SMALL, "tie_word_embeddings": True}
    assert outline_of_settings(whole) is not None
    assert outline_of_settings({key: value for key, value in whole.items() if key != missing}) is None
    assert (
        outline_of_settings({**whole, "model_type": "qwen3"}) is None
    )  # its heads have a default width of their own
    assert outline_of_settings({**whole, "model_type": "gpt2"}) is None


def test_an_unknown_architecture_is_made_by_transformers(tmp_path: Path) -> None:
    settings = {
        "model_type": "gpt2",
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "vocab_size": 30,
        "n_positions": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "model.safetensors").write_bytes(b"")
    embeddings, block = (30 + 8) * 16, 16 * 48 + 48 + 16 * 16 + 16 + 2 * 4 * 16 * 16 + 4 * 16 + 16 + 4 * 16
    assert read_outline(str(tmp_path), EmbeddedConfig()).parameters == embeddings + block + 2 * 16
