"""Weights: their hash, and adapters and models as folders that other programs can load."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kapelle.errors import DataError, ModelError
from kapelle.functional.masking import as_float
from kapelle.models.adapters import ADAPTER, of_experts, read_lora
from kapelle.models.checksums import verify_folder, write_checksums
from kapelle.models.language_model import LanguageModel
from kapelle.models.paths import check_loaded, loading
from kapelle.models.vision import auto_class
from kapelle.runtime.tensors import copy_together, load_tensors
from kapelle.team import ALL_LINEAR, Lora


def weights_hash(tensors: Mapping[str, Tensor]) -> str:
    """Return 16 characters, `v2-` and 64 bits, that depend on every name, type, shape and byte of the weights.

    It is computed where the tensors lie, with one wait for each device, and every device computes the same. Two sets of
    weights that differ by accident share it with a probability of 2⁻⁶⁴; nobody may rely on it against intent. What files of
    folders and checkpoints are compared by is BLAKE2 and SHA-256 (`hash_of_base`, `checksums`). Hashes without `v2-` in older
    episodes are BLAKE2 too.
    """
    digest = hashlib.blake2b(digest_size=8)
    names = sorted(tensors)
    for name in names:
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}\n".encode())
    sums: dict[torch.device, list[Tensor]] = {}
    place = 0
    for words in _words([tensors[name] for name in names]):
        for part in words.split(_words_at_once(words.device)):
            sums.setdefault(part.device, []).append(_mixed(part, place).sum())
            place += len(part)
    total = sum(int(torch.stack(found).sum()) for found in sums.values())
    digest.update((total % 2**64).to_bytes(8, "little"))
    return f"v2-{base64.b32encode(digest.digest()).decode().lower().rstrip('=')}"


def _words_at_once(device: torch.device) -> int:
    """Return how many words are mixed at once: what fits into a CPU's cache, or 128 MiB, of which another one is made."""
    return 1 << 17 if device.type == "cpu" else 1 << 24


def _words(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the bytes of all tensors as int64, each tensor filled up with zeros; small neighbours come as one."""
    waiting: list[Tensor] = []
    held = 0
    for tensor in tensors:
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        size, room = content.shape[0], 8 * _words_at_once(content.device)
        if waiting and (waiting[0].device != content.device or held + size > room):
            yield _joined(waiting)
            waiting, held = [], 0
        waiting.append(content)
        if size % 8:
            waiting.append(torch.zeros(-size % 8, dtype=torch.uint8, device=content.device))
        held += size
    if waiting:
        yield _joined(waiting)


def _joined(contents: Sequence[Tensor]) -> Tensor:
    alone = len(contents) == 1 and contents[0].storage_offset() % 8 == 0
    return (contents[0] if alone else torch.cat(list(contents))).view(torch.int64)


def _mixed(words: Tensor, place: int) -> Tensor:
    """Return words mixed with their places, from `place` on: a bit that changes changes each bit of its word half of the time.

    As MurmurHash3's `fmix64` does, with its constants. Integers wrap around alike on every device, and a sum of mixed words
    does not depend on the order in which a device adds them.
    """
    mixed = torch.arange(place, place + len(words), device=words.device).mul_(-0x61C8864680B583EB)
    mixed.bitwise_xor_(words)
    low, high = mixed.view(torch.int32).view(-1, 2).unbind(1)
    low.bitwise_xor_(high)
    mixed.mul_(-0x00AE502812AA7333)
    low.bitwise_xor_(high)
    mixed.mul_(-0x3B314601E57A13AD)
    low.bitwise_xor_(high)
    return mixed


def hash_of_base(base: LanguageModel) -> str:
    """Return 16 hex digits of a base's own weights as float32, which do not depend on the type that holds them.

    They are compared across runs and machines, and stand in adapters and checkpoints.
    """
    digest = hashlib.blake2b(digest_size=8)
    weights = base.base_parameters()
    for name in sorted(weights):
        tensor = as_float(weights[name].detach().cpu().contiguous())
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        # Of a copy: memory that NumPy has seen cannot be given back, as FSDP does with gathered weights.
        digest.update(tensor.reshape(-1).view(torch.uint8).clone().numpy().data)
    return digest.hexdigest()


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
    save_file(copy_together(tensors), folder / ADAPTER)
    settings: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(target for target in lora.targets if not of_experts(target)),
        "bias": "none",
        "fan_in_fan_out": lora.fan_in_fan_out,
        "inference_mode": True,
    }
    if experts := sorted(filter(of_experts, lora.targets)):
        settings["target_parameters"] = experts
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
    sharded = model.computes_on is not None
    held: dict[str, Tensor] | None = dict(model.model.named_parameters()) if sharded else None
    if weights is not None:
        tied = {name for name, _ in model.model.named_parameters(remove_duplicate=False)}
        buffers = {} if sharded else model.model.state_dict()
        held = {**{name: t for name, t in buffers.items() if name not in tied}, **weights}
    model.model.save_pretrained(folder, state_dict=held, safe_serialization=True)
    model.tokenizer.save_pretrained(folder)
    if model.vision is not None:
        model.vision.processor.save_pretrained(folder)
    write_checksums(folder)


def read_model(folder: Path, names: Collection[str]) -> dict[str, Tensor]:
    """Read a folder of `save_pretrained` with at least the weights of these names; ModelError where it is damaged.

    `transformers` reads it where files have other names for them: it saves the experts of a mixture one by one.
    """
    verify_folder(folder)
    try:
        files = sorted(folder.glob("*.safetensors"))
        found = {key: tensor for file in files for key, tensor in load_tensors(file).items()}
    except DataError as error:
        raise ModelError(f"The weights in '{folder}' cannot be read: {error}") from error
    if found.keys() >= set(names):
        return found
    from transformers import AutoConfig

    with loading(str(folder)):
        made: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        loaded: Any = auto_class(made).from_pretrained(
            folder,
            dtype="auto",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
        )
        model, info = loaded
        check_loaded(str(folder), type(model).__name__, info)
        return {name: weight.detach() for name, weight in model.named_parameters()}


class RoundedWeights:
    """Weights of linear layers in half precision, which stand in for those in float32 while a model samples.

    Autocast rounds a weight for each product, to the same numbers: for every token it reads four bytes of each and writes two
    that it reads again. These are made once, and take two bytes of each until they are dropped.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Round to `dtype` what layers hold in another type."""
        self._rounded = [
            (layer, nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False))
            for layer in model.modules()
            if isinstance(layer, nn.Linear)
            and layer.weight.is_floating_point()
            and layer.weight.dtype != dtype
        ]

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Let layers read the rounded weights."""
        whole = [layer.weight for layer, _ in self._rounded]
        for layer, rounded in self._rounded:
            layer.weight = rounded
        try:
            yield
        finally:
            for (layer, _), weight in zip(self._rounded, whole, strict=True):
                layer.weight = weight
