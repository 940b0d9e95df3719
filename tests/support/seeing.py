"""Tiny models that see, and pictures for them."""

from __future__ import annotations

import io
from typing import Any

import torch
from PIL import Image as Pillow

from kapelle.models.embedded import EYES, SPECIAL, build_tokenizer, image_processor
from kapelle.models.language_model import LanguageModel
from kapelle.types import Image

VOCABULARY = len(SPECIAL) + 256 + len(EYES)
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]},
}
_EYES: dict[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 1,
    "spatial_merge_size": 2,
    "initializer_range": 0.2,
}
SEEING: dict[str, dict[str, Any]] = {
    "qwen2_vl": {**_EYES, "embed_dim": 16, "hidden_size": 32},
    "qwen2_5_vl": {
        **_EYES,
        "hidden_size": 16,
        "out_hidden_size": 32,
        "intermediate_size": 32,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        **_EYES,
        "hidden_size": 16,
        "out_hidden_size": 32,
        "intermediate_size": 32,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 64,
    },
}
"""Model type → settings of its vision tower."""


def seeing_model(family: str = "qwen2_5_vl", seed: int = 0) -> LanguageModel:
    """Return a tiny random model that sees, with a language side sharper than it starts."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    begin = VOCABULARY - len(EYES)
    config = AutoConfig.for_model(
        family,
        text_config=_TEXT if family == "qwen3_vl" else {k: v for k, v in _TEXT.items() if k != "head_dim"},
        vision_config=SEEING[family],
        image_token_id=begin + 1,
        video_token_id=begin + 3,
        vision_start_token_id=begin,
        vision_end_token_id=begin + 2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 2 and "visual" not in name:
                    parameter.copy_(torch.randn(parameter.shape) * 0.12)
    own = build_tokenizer(256, sees=True)
    return LanguageModel(model, own, name=family, image_processor=image_processor())


def picture(colour: str, width: int = 16, height: int = 16, kind: str = "PNG") -> Image:
    """Return a picture of one colour."""
    written = io.BytesIO()
    Pillow.new("RGB", (width, height), colour).save(written, kind)
    return Image.of(written.getvalue())
