"""The model families that kapelle's own forward pass supports, and how their layers differ from Llama's layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Family(NamedTuple):
    """A family of models with RMSNorm, rotary attention and a gated MLP. The fields are the differences from Llama."""

    centred: bool = False
    """Whether norms multiply by 1 + weight."""
    sandwiched: bool = False
    """Whether attention and MLP also end with a norm."""
    gelu: bool = False
    """Whether the activation of the gate is GELU (in its tanh approximation) instead of SiLU."""
    capped: bool = False
    """Whether `attn_logit_softcapping` caps attention scores."""
    turned_by_kind: bool = False
    """Whether layers with a sliding window have different rotary angles."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "gemma": Family(centred=True, gelu=True),
    "gemma2": Family(centred=True, sandwiched=True, gelu=True, capped=True),
    "gemma3_text": Family(centred=True, sandwiched=True, gelu=True, turned_by_kind=True),
}
"""Mapping from `model_type` to the supported family."""


def family_of(settings: Mapping[str, Any]) -> Family | None:
    """Return the family of a model with these settings (`config.json`), or None if the layers of the model are not supported."""
    family = FAMILIES.get(settings.get("model_type", ""))
    if family is None:
        return None
    gate = settings.get("hidden_activation" if family.sandwiched else "hidden_act")
    known = (
        gate in (None, "gelu_pytorch_tanh" if family.gelu else "silu")
        and set(settings.get("layer_types") or ()) <= {"full_attention", "sliding_attention"}
        and not settings.get("use_bidirectional_attention")
    )
    return family if known else None
