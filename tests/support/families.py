"""Tiny random models of many architectures of `transformers`: two layers each, and the embedded model's tokens."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from kapelle.models.embedded import build_tokenizer
from kapelle.models.language_model import LanguageModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

CONTEXT = 128
_ENDS: dict[str, Any] = {"vocab_size": 262, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
_USUAL: dict[str, Any] = {
    **_ENDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
}
_GPT: dict[str, Any] = {**_ENDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
_MOE: dict[str, Any] = {
    **_USUAL,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": _USUAL,
    "qwen2": _USUAL,
    "qwen3": _USUAL,
    "mistral": {**_USUAL, "sliding_window": 4},
    "mixtral": _MOE,
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 24},
    "qwen3_moe": _MOE,
    "gpt2": _GPT,
    "gptj": {**_GPT, "rotary_dim": 4},
    "gpt_neo": {
        **_ENDS,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
        "max_position_embeddings": CONTEXT,
    },
    "gpt_neox": _USUAL,
    "opt": {**_USUAL, "ffn_dim": 48, "word_embed_proj_dim": 24},
    "bloom": {**_ENDS, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": {**_ENDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "mpt": {**_ENDS, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": CONTEXT},
    "phi": _USUAL,
    "phi3": _USUAL,
    "gemma": _USUAL,
    "gemma2": {**_USUAL, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_USUAL, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "granite": {**_USUAL, "logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "granitemoe": {**_MOE, "logits_scaling": 4.0},
    "cohere": {**_USUAL, "logit_scale": 0.25},
    "cohere2": {**_USUAL, "logit_scale": 0.25, "sliding_window": 4},
    "hyperclovax": {**_USUAL, "logits_scaling": 0.25},
    "olmo2": _USUAL,
    "olmo3": {**_USUAL, "sliding_window": 4},
    "olmoe": _MOE,
    "stablelm": _USUAL,
    "starcoder2": _USUAL,
    "smollm3": _USUAL,
    "gpt_oss": {**_MOE, "sliding_window": 4},
    "deepseek_v3": {
        **_MOE,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "head_dim": 4,
        "num_key_value_heads": 4,
    },
    "glm4": _USUAL,
    "llama4_text": {**_MOE, "intermediate_size_mlp": 48, "attention_chunk_size": CONTEXT},
    "mamba": {**_ENDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "mamba2": {
        **_ENDS,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "falcon_h1": {**_USUAL, **_MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5},
    "bamba": {**_USUAL, **_MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_MOE,
        **_MAMBA,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 24,
        "logits_scaling": 4.0,
    },
    "jamba": {
        **_MOE,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "lfm2": {**_USUAL, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "qwen3_next": {**_MOE, **_DELTA, "shared_expert_intermediate_size": 24},
    "minimax": {**_MOE, "layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    "recurrent_gemma": {
        **_USUAL,
        "lru_width": 32,
        "attention_window_size": 16,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv": {**_ENDS, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2},
    "bert": {**_USUAL, "is_decoder": True},
    "xlstm": {**_ENDS, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4, "chunk_size": 8},
}
"""Model types and the settings that make them tiny; windows are shorter than the sequences that tests read."""


def build(family: str, seed: int = 0) -> PreTrainedModel:
    """Return a bare model of a family, sharper than it starts, so that a wrong position or mask shows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, **FAMILIES[family])
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim >= 2 and "A_log" not in name and "conv" not in name:
                    parameter.copy_(torch.randn(parameter.shape) * 0.12)
    model.eval()
    return model


def family_model(family: str, seed: int = 0) -> LanguageModel:
    """Return a model of a family as the engines use it."""
    return LanguageModel(build(family, seed), tokenizer(), name=family)


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return the embedded model's tokeniser."""
    return build_tokenizer(CONTEXT)
