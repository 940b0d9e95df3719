"""A model held in half precision computes in float32 for a moment, and holds the same memory afterwards."""

from __future__ import annotations

import pytest
import torch
from tests.support.families import build, tokenizer

from kapelle.engines.rollout.local.decode_strategies import decode_strategy
from kapelle.models.language_model import LanguageModel, hold_in, in_float32

TOKENS = torch.arange(6, 18)[None]


def half(family: str) -> LanguageModel:
    model = build(family)
    hold_in(model, torch.bfloat16)
    return LanguageModel(model, tokenizer(), "bfloat16", family)


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt2", "jamba"])
def test_it_computes_with_the_rounded_weights_in_float32(family: str) -> None:
    model = half(family)
    wide = build(family)
    wide.load_state_dict(model.model.state_dict())
    memory = {name: weight.data_ptr() for name, weight in model.model.named_parameters()}
    with in_float32(model), model.computing([(None, 0, 1)]):
        found = model.model(input_ids=TOKENS, use_cache=False).logits
    assert torch.equal(found, wide(input_ids=TOKENS, use_cache=False).logits)
    assert {name: weight.data_ptr() for name, weight in model.model.named_parameters()} == memory
    with model.computing([(None, 0, 1)]):
        after = model.model(input_ids=TOKENS, use_cache=False).logits
    assert not torch.equal(found, after.float())


@torch.no_grad()
def test_a_pass_that_fails_leaves_the_weights_as_they_were() -> None:
    model = half("gpt2")
    with in_float32(model), pytest.raises(IndexError):
        model.model(input_ids=torch.tensor([[10**6]]))
    assert {weight.dtype for weight in model.model.parameters()} == {torch.bfloat16}
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize(("family", "way"), [("mamba2", "cache"), ("recurrent_gemma", "reread")])
def test_a_cache_error_of_rounding_size_is_detected_in_half_precision(family: str, way: str) -> None:
    assert decode_strategy(half(family)).name == way
