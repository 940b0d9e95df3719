"""Hash weights, and save and read adapters and models as folders that other programs can load."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from kapelle.errors import DataError, ModelError
from kapelle.models.adapters import ADAPTER, of_experts, read_lora
from kapelle.models.checksums import verify_folder, write_checksums
from kapelle.models.language_model import LanguageModel
from kapelle.models.paths import loading
from kapelle.models.pretrained import load_pretrained, read_config
from kapelle.models.vision import auto_class
from kapelle.runtime.tensors import copy_together, load_tensors
from kapelle.team import ALL_LINEAR, Lora


def weights_hash(tensors: Mapping[str, Tensor]) -> str:
    """Return a string of `v2-` and 64 bits that depend on every name, type, shape and byte of the weights.

    Each device hashes its own tensors with one synchronisation, and all devices give the same result. Two different
    sets of weights have the same hash by accident with probability 2⁻⁶⁴. The hash does not protect against deliberate
    collisions. The files of folders and checkpoints are compared by BLAKE2 and SHA-256 (`hash_of_base`, `checksums`).
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
    """Return the number of words that are mixed at a time: words that fit a CPU's cache, or copies of 128 MiB on a GPU."""
    return 1 << 17 if device.type == "cpu" else 1 << 24


def _words(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the bytes of all tensors as int64, with each tensor padded with zeros. Small adjacent tensors are joined."""
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
    """Return words mixed with their positions by MurmurHash3's `fmix64` and its constants. The first position is `place`.

    A changed bit changes each bit of its word with probability one half. Integers wrap around on every device, so the
    sum of mixed words is independent of the order of addition.
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
    """Return a hash of 16 hexadecimal digits of a base model's weights as float32, independent of the type in which they are stored.

    Adapters and checkpoints record this hash, and it is compared across runs and machines.
    """
    digest = hashlib.blake2b(digest_size=8)
    weights = base.base_parameters()
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous().reshape(-1)
        kind = torch.promote_types(tensor.dtype, torch.float32)
        digest.update(f"{name}{kind}{tuple(weights[name].shape)}".encode())
        # Copies are hashed, because memory that NumPy has accessed cannot be freed, but FSDP frees gathered weights.
        for part in tensor.split(_words_at_once(tensor.device)):
            digest.update(part.to("cpu", kind, copy=True).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_adapter(
    folder: Path, tensors: Mapping[str, Tensor], lora: Lora, base: str, base_hash: str | None = None
) -> None:
    """Write an adapter as a PEFT folder with `adapter_config.json` and `adapter_model.safetensors`.

    If the hash of the base model is given, kapelle can later reject a different base model. Checksums are added to the
    folder.
    """
    from safetensors.torch import save_file

    assert ALL_LINEAR not in lora.targets, "a folder lists its layers by name: see `adapters.named`"
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
    """Read a PEFT LoRA folder. Raises ModelError if the folder is damaged or does not contain plain LoRA."""
    lora = read_lora(folder)
    verify_folder(folder)
    try:
        return load_tensors(folder / ADAPTER), lora
    except DataError as error:
        raise ModelError(f"'{folder}' is not a PEFT adapter folder: {error}") from error


def save_model(folder: Path, model: LanguageModel, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write a base model without adapters and its tokeniser with `save_pretrained`, and add checksums.

    If `weights` are given by name, they are written instead of the model's own weights.
    """
    assert not model.bank.adapters, "a base with adapters is saved as adapters"
    # Calling `state_dict` on the model would make FSDP reshard the weights.
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
    """Read the weights in a folder written by `save_pretrained`, which must include the weights with these names.

    If names differ, `transformers` converts them, because it saves the experts of a mixture one by one. Raises
    ModelError if the folder is damaged.
    """
    verify_folder(folder)
    try:
        files = sorted(folder.glob("*.safetensors"))
        found = {key: tensor for file in files for key, tensor in load_tensors(file).items()}
    except DataError as error:
        raise ModelError(f"The weights in '{folder}' cannot be read: {error}") from error
    if found.keys() >= set(names):
        return found
    with loading(str(folder)):
        model = load_pretrained(auto_class(read_config(str(folder))), str(folder), dtype="auto")
        return {name: weight.detach() for name, weight in model.named_parameters()}


class RoundedWeights:
    """Half-precision copies of the weights of linear layers, which replace the float32 weights while a model samples.

    Autocast would round each weight to the same values again for every product: it would read four bytes per weight,
    write two bytes and read these two bytes again. The copies are made once and take two bytes per weight until they
    are dropped.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Round the weights that layers store in another type to `dtype`."""
        self._rounded = [
            (layer, nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False))
            for layer in model.modules()
            if isinstance(layer, nn.Linear)
            and layer.weight.is_floating_point()
            and layer.weight.dtype != dtype
        ]

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Make layers use the rounded weights in this context."""
        whole = [layer.weight for layer, _ in self._rounded]
        for layer, rounded in self._rounded:
            layer.weight = rounded
        try:
            yield
        finally:
            for (layer, _), weight in zip(self._rounded, whole, strict=True):
                layer.weight = weight
