"""The own pass is taken for what it knows, and left for what does more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.families import FAMILIES, tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from kapelle.models.fast.flat import flat_of
from kapelle.models.language_model import LanguageModel

WINDOW = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}


def made(family: str, without: Sequence[str] = (), **settings: Any) -> Any:
    kept = {key: value for key, value in FAMILIES["llama"].items() if key not in without}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**kept, **settings}))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_plain_models_have_it(family: str) -> None:
    assert flat_of(made(family, sliding_window=None)) is not None


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"hidden_act": "gelu"}),
        ("mistral", {"sliding_window": 4}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4}),
        ("qwen3", WINDOW),
        ("olmo2", {}),
    ],
)
def test_a_window_in_any_layer_another_activation_or_another_family_has_not(
    family: str, settings: dict[str, Any]
) -> None:
    assert flat_of(made(family, **settings)) is None


def test_a_model_whose_settings_leave_heads_to_be_derived_has_it_too() -> None:
    model = LanguageModel(made("llama", without=("head_dim", "num_key_value_heads")), tokenizer())
    assert model.flat is not None
    assert (model.flat.head_size, model.flat.key_heads) == (8, 4)
