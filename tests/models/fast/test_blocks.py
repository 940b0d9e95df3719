"""The flat pass by hand: numbers and gradients of `transformers`, in double precision, for each family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.tiny import LORA, stir
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from kapelle.models.fast.attention import AttentionPlan, plan_sequences
from kapelle.models.fast.flat import FlatModel, flat_of
from kapelle.models.lora_bank import BankedLinear, LoraBank
from kapelle.team import Lora

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"]
"""The windows of those with windows are shorter than the longer text."""
LENGTHS = (7, 3)
TOKENS = torch.tensor([5, 9, 2, 7, 7, 1, 30, 4, 8, 11])
NORMS = 1e-5
"""Their norms and softmax compute in float32, whatever the model's type."""
POSITIONS = torch.tensor([0, 1, 2, 3, 4, 5, 6, 0, 1, 2])


def family(name: str, **settings: Any) -> Any:
    """A model of two layers whose norms and biases are not at their start, in double precision."""
    config = AutoConfig.for_model(
        name,
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        tie_word_embeddings=False,
        **{"sliding_window": 3, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0, **settings},
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64) * 0.3)
    return model


def flat(model: Any) -> FlatModel:
    found = flat_of(model)
    assert found is not None
    return found


def hidden(model: Any, plan: AttentionPlan) -> Tensor:
    pass_ = flat(model)
    return pass_.hidden(TOKENS, POSITIONS, pass_.by_plan(plan))


def theirs(model: Any) -> Tensor:
    rows = [model.base_model(input_ids=part[None]).last_hidden_state[0] for part in TOKENS.split(LENGTHS)]
    return torch.cat(rows)


def weighed(states_ND: Tensor) -> Tensor:
    """Return a sum in which every state counts differently."""
    return (
        states_ND * torch.linspace(-1, 1, states_ND.numel(), dtype=states_ND.dtype).view_as(states_ND)
    ).sum()


@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states_and_all_gradients_are_those_of_transformers(name: str) -> None:
    model = family(name)
    expected = theirs(model)
    weighed(expected).backward()
    gradients = {key: p.grad for key, p in model.base_model.named_parameters()}
    model.zero_grad()
    states = hidden(model, plan_sequences(LENGTHS))
    assert float((states - expected).detach().abs().max()) < NORMS
    weighed(states).backward()
    for key, parameter in model.base_model.named_parameters():
        assert parameter.grad is not None, key
        assert float((parameter.grad - gradients[key]).abs().max()) < NORMS * float(
            gradients[key].abs().max()
        ), key


def test_layers_unlike_those_of_a_known_family_are_left_to_transformers() -> None:
    assert flat_of(family("gemma3_text", use_bidirectional_attention=True)) is None
    assert flat_of(family("gemma2", hidden_activation="relu")) is None


class TestAdapters:
    @pytest.mark.slow
    def test_their_gradients_are_those_of_finite_differences(self) -> None:
        bank = LoraBank(model := family("qwen2").requires_grad_(False))
        for number, (name, lora) in enumerate({"a": LORA, "b": Lora(rank=3, alpha=1.5, dropout=0.4)}.items()):
            bank.add(name, lora, seed=number)
            stir(bank.parameters(name), number)
        model.double()
        bank.train(on=True)
        layer = model.model.layers[0].mlp.down_proj
        assert isinstance(layer, BankedLinear)
        inputs = torch.randn(6, 24, dtype=torch.float64, requires_grad=True)
        factors = [p for key, p in layer.named_parameters() if "adapters" in key]
        assert len(factors) == 4

        def apply(x_NI: Tensor, *_: Tensor) -> Tensor:
            torch.manual_seed(3)  # the same tokens are dropped every time
            with bank.routed([("a", 0, 2), (None, 2, 3), ("b", 3, 5), ("a", 5, 6)]):
                dropped: Tensor = layer(x_NI)
                return dropped

        assert torch.autograd.gradcheck(apply, (inputs, *factors))

    def test_no_gradient_crosses_from_one_to_another_through_a_whole_pass(self) -> None:
        bank = LoraBank(model := family("qwen3").requires_grad_(False))
        for name in ("a", "b"):
            bank.add(name, LORA, seed=0)
            stir(bank.parameters(name), sum(name.encode()))
        model.double()
        with bank.routed([("a", 0, 7), ("b", 7, 10)]):
            states = hidden(model, plan_sequences(LENGTHS))
        states[7:].square().sum().backward()
        assert all(p.grad is not None and p.grad.any() for p in bank.parameters("b").values())
        assert not any(p.grad is not None and p.grad.any() for p in bank.parameters("a").values())
