"""The layers of common architectures, from the settings in a model's `config.json` alone.

Qwen 2 and 3, Llama and Mistral differ in three places: biases of the attention, norms of queries and keys, tied
embeddings. Names are those of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kapelle.models.outline import Outline, Shape
from kapelle.models.paths import loading
from kapelle.models.targets import Layers

HEAD = "lm_head"

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)
"""Settings that must be written; where one is not, transformers has a default of its own for each architecture."""

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""`model_type` → class of transformers."""

BODY = ("", "model", "model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", HEAD)
"""Modules outside the blocks."""
BLOCK = ("self_attn", "mlp", "mlp.act_fn")
"""Modules of a block beside its linear layers and norms."""


def read_settings(path: str) -> Mapping[str, Any]:
    """Return the content of a model's `config.json`, empty where `path` is no folder; ModelError if it cannot be read."""
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        return {}
    with loading(path, "read"):
        settings = json.loads(file.read_text("utf-8"))
        return settings if isinstance(settings, dict) else {}


def known(settings: Mapping[str, Any]) -> Outline | None:
    """Return the outline that a model's settings describe; None where only transformers can tell."""
    family = settings.get("model_type")
    if family not in FAMILIES or any(settings.get(key) is None for key in SIZES):
        return None
    if family == "qwen3" and settings.get("head_dim") is None:
        return None
    hidden, vocabulary = settings["hidden_size"], settings["vocab_size"]
    weights: dict[str, Shape] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    linear: dict[str, tuple[int, int]] = {}
    modules = set(BODY)
    for k in range(settings["num_hidden_layers"]):
        block = f"model.layers.{k}"
        modules |= {block, *(f"{block}.{name}" for name in BLOCK)}
        for name, (wide, out, bias) in _linear_layers(settings).items():
            linear[f"{block}.{name}"] = wide, out
            weights[f"{block}.{name}.weight"] = out, wide
            if bias:
                weights[f"{block}.{name}.bias"] = (out,)
        for name, width in _norms(settings).items():
            modules.add(f"{block}.{name}")
            weights[f"{block}.{name}.weight"] = (width,)
    weights["model.norm.weight"] = (hidden,)
    linear[HEAD] = hidden, vocabulary
    if not settings["tie_word_embeddings"]:
        weights[f"{HEAD}.weight"] = vocabulary, hidden
    layers = Layers(FAMILIES[family], frozenset({*modules, *linear}), linear, HEAD)
    return Outline(weights, frozenset({*weights, f"{HEAD}.weight"}), layers, hidden)


def _linear_layers(settings: Mapping[str, Any]) -> dict[str, tuple[int, int, bool]]:
    """Return a block's linear layers: features in, features out, and whether there is a bias."""
    hidden, wide, family = settings["hidden_size"], settings["intermediate_size"], settings["model_type"]
    head = settings.get("head_dim") or hidden // settings["num_attention_heads"]
    queries, keys = head * settings["num_attention_heads"], head * settings["num_key_value_heads"]
    biased = family in {"llama", "qwen3"} and bool(settings.get("attention_bias", False))
    read = biased or family == "qwen2"
    up = family == "llama" and bool(settings.get("mlp_bias", False))
    return {
        "self_attn.q_proj": (hidden, queries, read),
        "self_attn.k_proj": (hidden, keys, read),
        "self_attn.v_proj": (hidden, keys, read),
        "self_attn.o_proj": (queries, hidden, biased),
        "mlp.gate_proj": (hidden, wide, up),
        "mlp.up_proj": (hidden, wide, up),
        "mlp.down_proj": (wide, hidden, up),
    }


def _norms(settings: Mapping[str, Any]) -> dict[str, int]:
    hidden = settings["hidden_size"]
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if settings["model_type"] == "qwen3":
        head = settings.get("head_dim") or hidden // settings["num_attention_heads"]
        norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head}
    return norms
