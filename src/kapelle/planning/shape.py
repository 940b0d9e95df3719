"""What memory depends on in a model: its widths and heads, from the settings in its `config.json` alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kapelle.models.outline import Outline

FLAT = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Values of `model_type` that kapelle's own pass reads (`models/fast/flat.py`), if nothing else is set."""

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """The widths of a decoder."""

    hidden: int
    """D."""
    inner: int
    """F: features between up and down projection; of the experts that one token visits, together."""
    depth: int
    """Blocks."""
    heads: int
    """H: query heads."""
    key_heads: int
    """J."""
    head_size: int
    """E."""
    vocabulary: int
    """V."""
    context: int
    """Most positions."""
    normed: bool
    """Whether queries and keys are normalised per head."""
    flat: bool
    """Whether kapelle's own pass reads it; else that of `transformers`."""
    tied: bool
    """Whether the output head is the embedding."""
    block: int
    """Parameters of all blocks."""
    head: int
    """Parameters of the output head."""


def shape_of(settings: Mapping[str, Any], outline: Outline, *, codes: bool = False) -> Shape:
    """Return the shape of a model with these settings; `codes` says that its weights are held in four bits.

    Where an architecture has other names for its widths, they are read from the outline.
    """
    hidden = outline.hidden
    heads = int(_first(settings, "num_attention_heads", "n_head", "num_heads") or 1)
    vocabulary = int(settings.get("vocab_size") or max(shape[0] for shape in outline.weights.values()))
    blocks = sum(_count(shape) for name, shape in outline.weights.items() if _in_block(name))
    head_size = int(settings.get("head_dim") or hidden // heads)
    return Shape(
        hidden,
        _inner(settings, hidden),
        int(_first(settings, "num_hidden_layers", "n_layer", "num_layers") or 1),
        heads,
        int(_first(settings, "num_key_value_heads", "n_head", "num_heads", "num_attention_heads") or heads),
        head_size,
        vocabulary,
        int(_first(settings, "max_position_embeddings", "n_positions", "max_seq_len") or 2048),
        any(name.endswith("q_norm.weight") for name in outline.weights),
        not codes and reads_flat(settings),
        not any(name == "lm_head.weight" for name in outline.weights),
        blocks,
        vocabulary * hidden,
    )


def reads_flat(settings: Mapping[str, Any]) -> bool:
    """Return whether kapelle's own pass reads a model with these settings; see `models/fast/flat.py`."""
    kind = settings.get("model_type")
    layers = set(settings.get("layer_types") or ["full_attention"])
    return (
        kind in FLAT
        and not settings.get("final_logit_softcapping")
        and settings.get("hidden_act", "silu") == "silu"
        and not settings.get("use_sliding_window", False)
        and layers == {"full_attention"}
        and (kind != "mistral" or settings.get("sliding_window", 4096) is None)
    )


def _inner(settings: Mapping[str, Any], hidden: int) -> int:
    visited = int(_first(settings, "num_experts_per_tok", "num_experts_per_token") or 0)
    wide = int(_first(settings, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden)
    if not visited:
        return wide
    expert = int(settings.get("moe_intermediate_size") or wide)
    return visited * expert + int(settings.get("shared_expert_intermediate_size") or 0)


def _first(settings: Mapping[str, Any], *names: str) -> Any:
    return next((settings[name] for name in names if settings.get(name) is not None), None)


def _in_block(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count
