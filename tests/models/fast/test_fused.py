"""The pass for sampling says what `transformers` says, whatever a model's layers have beside their matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kapelle.models.fast import fused
from kapelle.models.fast.flat import FlatModel, flat_of
from kapelle.models.fast.fused import FusedPass, fused_of
from kapelle.models.fast.kv_cache import KVCache, PromptBlock
from kapelle.models.lora_bank import LoraBank
from kapelle.team import Lora

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama() -> Any:
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    return LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, rope_parameters=scaled))


def qwen2() -> Any:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES))


def qwen3() -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16))


@pytest.fixture(params=[llama, qwen2, qwen3])
def model(request: pytest.FixtureRequest) -> Any:
    """A model whose norms scale and whose biases are not zero."""
    build: Callable[[], Any] = request.param
    torch.manual_seed(0)
    model = build().eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


@pytest.fixture(params=["plain", "packed"], autouse=True)
def _products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "packed":
        monkeypatch.setattr(fused, "LARGE", 0)


def by_the_book(model: Any, tokens: list[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def flat_pass(model: Any) -> FlatModel:
    known = flat_of(model)
    assert known is not None
    return known


def test_prompts_and_completions_are_read_as_in_transformers(model: Any) -> None:
    own = flat_pass(model)
    small = FusedPass(own, torch.float32)
    texts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]]
    prompts = PromptBlock(own, [5, 5], torch.device("cpu"), torch.float32)
    flat = torch.tensor([token for text in texts for token in text[:5]])
    place = torch.arange(5).repeat(2)
    last_Q = torch.tensor([4, 9])
    with torch.inference_mode():
        read = small.logits(flat, place, [(None, 0, 10)], prompts.attention([(0, 2, 5)]), last_Q)
        for row, text in zip(read, texts, strict=True):
            torch.testing.assert_close(row, by_the_book(model, text)[4], atol=2e-5, rtol=1e-5)
        cache = KVCache(own, torch.device("cpu"), torch.float32)
        cache.join(prompts, [0, 1])
        for step in (5, 6, 7):
            tokens_R = torch.tensor([text[step] for text in texts])
            cache.open()
            read = small.logits(tokens_R, cache.advance(), [(None, 0, 2)], cache.attend)
            for row, text in zip(read, texts, strict=True):
                torch.testing.assert_close(row, by_the_book(model, text)[step], atol=2e-5, rtol=1e-5)


def test_each_span_of_rows_uses_its_adapter(model: Any) -> None:
    bank = LoraBank(model)
    for seed, adapter in enumerate(("left", "right")):
        bank.add(adapter, Lora(rank=2, targets=("q_proj", "k_proj", "o_proj", "down_proj")), seed)
        for parameter in bank.parameters(adapter).values():
            parameter.data.add_(0.1 * torch.randn(parameter.shape))
    own = flat_pass(model)
    small = FusedPass(own, torch.float32)
    text = [3, 1, 4, 1, 5]
    names = ["left", None, "right"]
    prompts = PromptBlock(own, [5] * 3, torch.device("cpu"), torch.float32)
    route = [(name, 5 * row, 5 * row + 5) for row, name in enumerate(names)]
    with torch.inference_mode():
        read_ND = small.logits(
            torch.tensor(text * 3), torch.arange(5).repeat(3), route, prompts.attention([(0, 3, 5)])
        )
        for row, name in enumerate(names):
            with bank.routed([(name, 0, 1)]):
                expected = by_the_book(model, text)
            torch.testing.assert_close(read_ND[5 * row : 5 * row + 5], expected, atol=1e-4, rtol=1e-5)


def test_large_models_get_no_copies(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fused_of(flat_pass(model), 1, torch.float32) is not None
    monkeypatch.setattr(fused, "LARGEST", 1000)
    assert fused_of(flat_pass(model), 1, torch.float32) is None


def test_new_weights_of_the_base_are_read_once_the_old_ones_are_forgotten(model: Any) -> None:
    own = flat_pass(model)
    small = FusedPass(own, torch.float32)
    text = [3, 1, 4, 1, 5]

    def read() -> Tensor:
        prompt = PromptBlock(own, [5], torch.device("cpu"), torch.float32)
        return small.logits(
            torch.tensor(text), torch.arange(5), [(None, 0, 5)], prompt.attention([(0, 1, 5)])
        )

    with torch.inference_mode():
        read()
        for part in (model.base_model.layers[1].mlp.down_proj, model.lm_head):
            part.weight.mul_(1.5)
            small.forget(None)
            torch.testing.assert_close(read(), by_the_book(model, text), atol=1e-4, rtol=1e-5)
