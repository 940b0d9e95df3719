"""A model reads as many tokens as it has positions, whatever its settings call them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.families import CONTEXT, FAMILIES, tokenizer
from transformers import AutoConfig

from kapelle.models.light_tokenizer import context_of

LONG = {"rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_type": "longrope"}
PHI3: dict[str, Any] = {**FAMILIES["phi3"], "original_max_position_embeddings": 32}


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "mpt"])
def test_it_is_the_number_of_positions(family: str) -> None:
    endless = tokenizer().__class__(tokenizer_object=tokenizer().backend_tokenizer)
    assert endless.model_max_length > 10**20
    assert context_of(AutoConfig.for_model(family, **FAMILIES[family]), endless) == CONTEXT


def test_a_model_without_positions_uses_the_context_of_its_tokeniser() -> None:
    assert context_of(AutoConfig.for_model("bloom", **FAMILIES["bloom"]), tokenizer()) == CONTEXT


def test_angles_that_depend_on_the_longest_text_of_a_batch_are_unchanged() -> None:
    assert context_of(AutoConfig.for_model("phi3", **PHI3, rope_parameters=LONG), tokenizer()) == 32
    assert context_of(AutoConfig.for_model("phi3", **PHI3), tokenizer()) == CONTEXT
