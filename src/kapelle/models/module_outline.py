"""Outlines of models whose layers exist: in memory, or made by transformers without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kapelle.models.module_layers import layers_of
from kapelle.models.outline import Outline
from kapelle.models.paths import loading, local_only

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def outline_of(model: PreTrainedModel) -> Outline:
    """Return the outline of a model, without the adapters that it may carry."""
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    return Outline(
        {
            _bare(name): tuple(tensor.shape)
            for name, tensor in model.named_parameters()
            if ".adapters." not in name
        },
        frozenset(_bare(name) for name in model.state_dict()),
        layers_of(model),
        int(embedding.shape[1]),
    )


def made_by_transformers(path: str) -> Outline:
    """Return the outline of a model that only transformers knows; ModelError when its settings cannot be read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"), loading(path, "read"):
        settings = AutoConfig.from_pretrained(
            path, trust_remote_code=False, local_files_only=local_only(path)
        )
        return outline_of(AutoModelForCausalLM.from_config(settings, trust_remote_code=False))


def _bare(name: str) -> str:
    """Return a parameter's name without the part that the adapter bank inserts."""
    return name.replace(".base.", ".")
