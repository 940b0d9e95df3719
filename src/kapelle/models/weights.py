"""Weights: their hash, and adapters and models as folders that other programs can load."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from kapelle.errors import DataError, ModelError
from kapelle.functional.masking import as_float
from kapelle.models.adapters import ADAPTER, read_lora
from kapelle.models.checksums import verify_folder, write_checksums
from kapelle.models.language_model import LanguageModel
from kapelle.runtime.tensors import load_tensors
from kapelle.team import ALL_LINEAR, Lora


def weights_hash(tensors: Mapping[str, Tensor], *, widened: bool = False) -> str:
    """Return 16 hex digits that depend on every name, type, shape and byte of the weights.

    `widened` weights are hashed as float32, one after another.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        tensor = as_float(tensor) if widened else tensor
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        # Of a copy: memory that NumPy has seen cannot be given back, as FSDP does with gathered weights.
        digest.update(tensor.reshape(-1).view(torch.uint8).clone().numpy().data)
    return digest.hexdigest()


def hash_of_base(base: LanguageModel) -> str:
    """Return the hash of a base's own weights as float32, which does not depend on the type that holds them."""
    return weights_hash(base.base_parameters(), widened=True)


def copy_weights(own: Mapping[str, Tensor], weights: Mapping[str, Tensor], whose: str) -> None:
    """Copy weights into the tensors `own` of the same names, except where they share memory.

    Raises ModelError, which says `whose` they are, if names or shapes do not fit.
    """
    if own.keys() != weights.keys():
        odd = min(own.keys() ^ weights.keys())
        raise ModelError(f"The weights of {whose} do not fit: '{odd}' is on one side only.")
    for key, tensor in own.items():
        if tensor.shape != weights[key].shape:
            raise ModelError(
                f"The weights of {whose} do not fit: '{key}' is {tuple(weights[key].shape)}, and {tuple(tensor.shape)} "
                "here. Set `lora.rank` and the model as they were."
            )
    with torch.no_grad():
        for key, tensor in own.items():
            if tensor.data_ptr() != weights[key].data_ptr():
                tensor.copy_(weights[key])


def save_adapter(
    folder: Path, tensors: Mapping[str, Tensor], lora: Lora, base: str, base_hash: str | None = None
) -> None:
    """Write an adapter as a PEFT folder: `adapter_config.json` and `adapter_model.safetensors`.

    With the hash of its base, kapelle refuses to use it on another base. The folder gets its checksums.
    """
    from safetensors.torch import save_file

    assert ALL_LINEAR not in lora.targets, "a folder names its layers: see `adapters.named`"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: t.detach().cpu().contiguous() for name, t in tensors.items()},
        folder / ADAPTER,
    )
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(lora.targets),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
    write_checksums(folder, base_hash)


def read_adapter(folder: Path) -> tuple[dict[str, Tensor], Lora]:
    """Read a PEFT LoRA folder; ModelError if it is none, of a variant that kapelle does not compute, or damaged."""
    lora = read_lora(folder)
    verify_folder(folder)
    try:
        return load_tensors(folder / ADAPTER), lora
    except DataError as error:
        raise ModelError(f"'{folder}' is no PEFT adapter folder: {error}") from error


def save_model(folder: Path, model: LanguageModel, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write a base and its tokeniser with `save_pretrained` and their checksums; it must have no adapters.

    `weights`, by name, are written in place of those that the model has.
    """
    assert not model.bank.adapters, "a base with adapters is saved as its adapters"
    # Its own way to its weights would have FSDP share them out.
    held: dict[str, Tensor] | None = dict(model.model.named_parameters()) if model.sharded else None
    if weights is not None:
        tied = {name for name, _ in model.model.named_parameters(remove_duplicate=False)}
        buffers = {} if model.sharded else model.model.state_dict()
        held = {**{name: t for name, t in buffers.items() if name not in tied}, **weights}
    model.model.save_pretrained(folder, state_dict=held, safe_serialization=True)
    model.tokenizer.save_pretrained(folder)
    write_checksums(folder)
