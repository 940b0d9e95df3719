"""Which layers adapters continue, and that rows keep to their adapters wherever a model puts those layers."""

from __future__ import annotations

import pytest
import torch
from tests.support.families import build, family_model
from tests.support.tiny import stir, tiny_model
from torch import nn

from kapelle.errors import ModelError
from kapelle.models.adapters import adapted_layers, named
from kapelle.models.lora_bank import layers_of
from kapelle.team import Lora

TOKENS = torch.arange(6, 6 + 3 * 7).reshape(3, 7)


def leaves(model: nn.Module, *targets: str) -> set[str]:
    return {path.rpartition(".")[2] for path in adapted_layers(layers_of(model), targets or ("all-linear",))}


class TestAllLinear:
    def test_of_the_embedded_model_these_are_the_seven_layers_of_a_block(self) -> None:
        seven = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        model = tiny_model().model
        assert adapted_layers(layers_of(model), ("all-linear",)) == adapted_layers(layers_of(model), seven)
        assert len(adapted_layers(layers_of(model), seven)) == 2 * 7

    @pytest.mark.parametrize(
        ("family", "layers"),
        [
            ("gpt2", {"c_attn", "c_proj", "c_fc"}),
            ("phi3", {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
            ("falcon", {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}),
            (
                "opt",
                {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"},
            ),  # not project_in and project_out
            ("qwen2_moe", {"q_proj", "k_proj", "v_proj", "o_proj"}),
            ("mamba", {"in_proj"}),
            ("lfm2", {"q_proj", "k_proj", "v_proj", "out_proj", "in_proj", "w1", "w2", "w3"}),
        ],
    )
    def test_architectures_have_their_own(self, family: str, layers: set[str]) -> None:
        assert leaves(build(family)) == layers

    def test_names_shared_with_other_layers_are_extended(self) -> None:
        model = build("qwen2_moe")
        inner = "model.layers.1.mlp.shared_expert"
        model.get_submodule("model.layers.1").o_proj = nn.ReLU()
        lora = named(layers_of(model), Lora())
        assert set(lora.targets) == {"q_proj", "k_proj", "v_proj", "self_attn.o_proj"}
        assert adapted_layers(layers_of(model), lora.targets) == adapted_layers(
            layers_of(model), ("all-linear",)
        )
        assert adapted_layers(layers_of(model), (f"{inner}.down_proj",)) == [f"{inner}.down_proj"]


class TestNames:
    def test_a_similar_name_is_suggested(self) -> None:
        with pytest.raises(ModelError, match=r"Did you mean 'c_attn'\? Known: c_attn, c_fc, c_proj\."):
            adapted_layers(layers_of(build("gpt2")), ("c_att",))

    @pytest.mark.parametrize(
        ("family", "target", "reason"),
        [
            ("mamba", "dt_proj", "reads its weight without calling"),
            ("gpt2", "lm_head", "it is the output head"),
        ],
    )
    def test_a_layer_that_cannot_have_an_adapter_is_explained(
        self, family: str, target: str, reason: str
    ) -> None:
        with pytest.raises(ModelError, match=reason):
            adapted_layers(layers_of(build(family)), (target,))


class TestRows:
    @torch.no_grad()
    @pytest.mark.parametrize(
        ("family", "target"), [("qwen2_moe", "down_proj"), ("opt", "fc1"), ("gpt2", "c_fc")]
    )
    def test_a_layer_over_a_flat_list_of_tokens_separates_rows(self, family: str, target: str) -> None:
        model = family_model(family)
        for seed, name in enumerate("ab"):
            model.bank.add(name, Lora(rank=2, targets=(target,)), seed)
            stir(model.bank.parameters(name), seed)
        with model.bank.routed([("a", 0, 1), (None, 1, 2), ("b", 2, 3)]):
            mixed = model.model(input_ids=TOKENS, use_cache=False).logits
        for row, chosen in enumerate(("a", None, "b")):
            with model.bank.routed([(chosen, 0, 1)]):
                alone = model.model(input_ids=TOKENS[row : row + 1], use_cache=False).logits
            assert float((mixed[row] - alone[0]).abs().max()) < 1e-5
        assert (
            float((mixed[0] - model.model(input_ids=TOKENS[:1], use_cache=False).logits[0]).abs().max())
            > 0.01
        )

    def test_tokens_that_a_model_has_gathered_are_rejected(self) -> None:
        model = family_model("gpt2")
        model.bank.add("a", Lora(rank=2), seed=0)
        layer = model.model.get_submodule("transformer.h.0.mlp.c_fc")
        with model.bank.routed([("a", 0, 3)]), pytest.raises(ModelError, match="gathers tokens"):
            layer(torch.zeros(7, 32))
