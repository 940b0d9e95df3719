"""Weights as content: their hash, and adapters and models as folders that others can load."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from kapelle.errors import ModelError
from kapelle.models.language_model import LanguageModel
from kapelle.team import Lora


def weights_hash(tensors: Mapping[str, Tensor]) -> str:
    """Return 16 hex digits that depend on every name, type, shape and byte of the weights."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_adapter(folder: Path, tensors: Mapping[str, Tensor], lora: Lora, base: str) -> None:
    """Write an adapter as a PEFT folder: `adapter_config.json` and `adapter_model.safetensors`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: t.detach().cpu().contiguous() for name, t in tensors.items()},
        folder / "adapter_model.safetensors",
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


_VARIANTS = (
    "use_dora",
    "use_rslora",
    "use_qalora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layers_to_transform",
    "layer_replication",
    "exclude_modules",
    "target_parameters",
    "trainable_token_indices",
    "fan_in_fan_out",
    "lora_bias",
)
"""Settings of PEFT that change what an adapter computes or which layers carry it."""


def read_adapter(folder: Path) -> tuple[dict[str, Tensor], Lora]:
    """Read a PEFT LoRA folder; ModelError when it is none, or of a variant that kapelle does not compute."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    lora = read_lora(folder)
    try:
        return load_file(folder / "adapter_model.safetensors"), lora
    except (OSError, SafetensorError) as error:
        raise ModelError(f"'{folder}' is no PEFT adapter folder: {error!r}.") from error


def read_lora(folder: Path) -> Lora:
    """Read the size of a PEFT LoRA folder's adapter without its weights; ModelError as `read_adapter`."""
    try:
        settings = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        kind, targets = settings["peft_type"], settings["target_modules"]
        size = (int(settings["r"]), float(settings["lora_alpha"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"'{folder}' is no PEFT adapter folder: {error!r}.") from error
    odd = [key for key in _VARIANTS if settings.get(key)]
    odd += ["target_modules as a pattern"] if isinstance(targets, str) else []
    odd += ["bias"] if settings.get("bias", "none") != "none" else []
    if kind != "LORA" or odd:
        raise ModelError(f"Adapter '{folder}' is {kind} with {odd}; kapelle loads plain LoRA.")
    return Lora(*size, targets=tuple(targets), dropout=float(settings.get("lora_dropout", 0.0)))


def save_model(folder: Path, model: LanguageModel) -> None:
    """Write a base and its tokeniser with `save_pretrained`; it must carry no adapters."""
    assert not model.bank.adapters, "a base with adapters is saved as its adapters"
    model.model.save_pretrained(folder, safe_serialization=True)
    model.tokenizer.save_pretrained(folder)
