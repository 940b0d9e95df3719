"""Check, before loading a model, that its files are complete and that kapelle computes the logits of its architecture.

The names and shapes of weights are read from the headers of the safetensors files, and no tensor is read. For
architectures without an outline in kapelle, transformers reads the headers on torch's meta device. A small random model
with the same settings shows whether kapelle can compute the logits of the architecture.

A safetensors file begins with the length of its header in 8 bytes. The header is a JSON object with the name, type,
shape and position of each tensor, and the tensors follow. A truncated file is shorter than its header states.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kapelle.errors import KapelleError, ModelError
from kapelle.models.outline import Outline, read_settings
from kapelle.models.paths import loading
from kapelle.models.pretrained import load_pretrained, located, read_config, read_tokenizer
from kapelle.models.vision import auto_class
from kapelle.runtime.hub import MODELSCOPE, is_of_modelscope, modelscope_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from kapelle.models.language_model import LanguageModel

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The names of the files that transformers reads: one file with all weights, or an index that lists the shards."""
LARGEST_HEAD = 100_000_000
"""The maximum size in bytes of a header that the safetensors library reads."""
LFS = b"version https://git-lfs"
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Mapping from a tensor type to the number of bits per element. For types not listed, only the safetensors library
checks tensor sizes."""
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


MOST = 100_000_000
"""The maximum number of parameters of a model that is built for a check. Such a model takes 400 MB and about a second."""
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Settings of transformers that contain the number of layers."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
HEADS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
"""Settings that are divided by the same number in reduced models, so that attention heads keep their width."""
WORDS = 512
"""The vocabulary size of a reduced model."""


class StoredTensor(NamedTuple):
    """The type and the shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]


def stored_weights(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor in the folder of a model. Raises ModelError if files are missing, truncated or not weights.

    The message of the error refers to the model as `It`.
    """
    whole, index = folder / WHOLE, folder / INDEX
    if whole.is_file() or not index.is_file():
        if not whole.exists():
            there = ", ".join(sorted(file.name for file in folder.glob("*.safetensors"))[:3])
            raise ModelError(
                f"It has neither {WHOLE} nor {INDEX}; it contains {there or 'no weights'}. Save the model again with "
                "`save_pretrained`."
            )
        return read_head(whole)
    found: dict[str, StoredTensor] = {}
    listed = shards_of(index)
    for name in sorted(set(listed.values())):
        if not (folder / name).is_file():
            raise ModelError(f"It has no {name}, which {INDEX} lists. Download or save the model again.")
        found |= read_head(folder / name)
    for name, file in listed.items():
        if name not in found:
            raise ModelError(
                f"It has no '{name}' in {file}, where {INDEX} lists it. Download or save the model again."
            )
    return found


def read_head(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file by name. Raises ModelError if the file size differs from the size that its header states."""
    found: dict[str, StoredTensor] = {}
    try:
        with file.open("rb") as opened:
            size = file.stat().st_size
            start = opened.read(len(LFS))
            if start == LFS:
                raise _broken(
                    file, "is a Git LFS pointer, not weights. Download the weights with `git lfs pull`"
                )
            if size < 8:
                raise _broken(
                    file, f"has {size} bytes: it is empty or truncated. Download or save the model again"
                )
            (length,) = struct.unpack("<Q", start[:8])
            if length > min(size - 8, LARGEST_HEAD):
                raise _broken(
                    file,
                    "is truncated in its header, or is not a safetensors file. Download or save the model again",
                )
            opened.seek(8)
            head: Any = json.loads(opened.read(length))
        taken, there = 0, size - 8 - length
        for name, tensor in head.items():
            if name == "__metadata__":
                continue
            first, last = tensor["data_offsets"]
            dtype, shape = str(tensor["dtype"]), tuple(map(int, tensor["shape"]))
            bits = BITS.get(dtype)
            if bits is not None and prod(shape) * bits != 8 * (last - first):
                raise _broken(
                    file,
                    f"contains '{name}' with a size that does not match its shape. Download or save the model again",
                )
            found[name], taken = StoredTensor(dtype, shape), max(taken, last)
        if taken != there:
            which = "is truncated" if there < taken else "is longer than its header states"
            raise _broken(
                file,
                (
                    f"{which}: it contains {there:,} bytes of weights instead of {taken:,}. Download or save the model "
                    "again"
                ),
            )
    except ModelError:
        raise
    except OSError as error:
        raise _broken(file, f"cannot be read: {error.strerror}. Check the path and the disk") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _broken(
            file, "has a header that is not a list of tensors. Download or save the model again"
        ) from error
    return found


def shards_of(index: Path) -> Mapping[str, str]:
    """Return the mapping from tensors to files of an index. Raises ModelError if it lists no files or files outside its folder."""
    try:
        listed = dict(json.loads(index.read_text("utf-8"))["weight_map"])
        if listed and all(isinstance(name, str) and name == Path(name).name for name in listed.values()):
            return listed
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    raise _broken(index, "lists no shards. Download or save the model again")


def _broken(file: Path, what: str) -> ModelError:
    return ModelError(f"Its file {file.name} {what}.")


def folder_of(path: str) -> Path | None:
    """Return the folder with the weights of a model, or None for the embedded model and for models that were not downloaded."""
    if path == "embedded":
        return None
    if is_of_modelscope(path):
        known = modelscope_folder(path.removeprefix(MODELSCOPE))
        return known if known is not None and any(known.glob("*.safetensors")) else None
    folder = Path(located(path)).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache

    for file in (WHOLE, INDEX):
        found = try_to_load_from_cache(path, file)
        if isinstance(found, str):
            folder = Path(found).parent
            shards = shards_of(Path(found)).values() if file == INDEX else ()
            return folder if all((folder / shard).is_file() for shard in shards) else None
    return None


def check_files(path: str, outline: Outline) -> bool:
    """Raise ModelError if weights are missing or truncated or do not match the outline, and return whether this could be checked.

    If names or shapes differ, transformers decides, because it maps the weight names of other versions and programs.
    Also returns True if nothing has been downloaded yet.
    """
    folder = folder_of(path)
    if folder is None:
        return True
    try:
        found = stored_weights(folder)
    except ModelError as error:
        raise ModelError(f"Model '{path}' cannot be loaded. {error}") from None
    fits = {name: tensor.shape for name, tensor in found.items() if name in outline.weights}
    known = found.keys() <= outline.weights.keys() | outline.spare
    # Quantised weights need a library that transformers looks for.
    coded = read_settings(str(folder)).get("quantization_config")
    if (
        not coded
        and known
        and fits == outline.weights
        and all(tensor.dtype in FLOATS for tensor in found.values())
    ):
        return True
    if find_spec("accelerate") is None:  # it reads only the headers
        return False
    path = located(path)
    with loading(path):
        load_pretrained(auto_class(read_config(path)), path, device_map="meta")
    return True


def check_architecture(path: str, *, replays_routing: bool = False) -> LanguageModel | None:
    """Return a small random model with the settings of a model, or None if no such model can be built.

    Raises ModelError if kapelle cannot compute the logits of the model, or if `replays_routing` is set and the choices
    of the model's routers cannot be recorded.
    """
    path = located(path)
    with loading(path, "read"):
        settings, tokenizer = read_config(path), read_tokenizer(path)

    def make(small: PretrainedConfig) -> PreTrainedModel:
        made: PreTrainedModel = auto_class(small).from_config(small, trust_remote_code=False)
        return made

    return small_model(settings, make, tokenizer, name=path, replays_routing=replays_routing)


def small_model(
    settings: PretrainedConfig,
    make: Callable[[PretrainedConfig], PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    most: int = MOST,
    **options: Any,
) -> LanguageModel | None:
    """Return a random model with at most `most` parameters and the same kinds of layers, or None if none can be built.

    The function `make` builds a model from the given settings. The tokeniser belongs to the unchanged settings. The
    options are passed to LanguageModel. Raises ModelError if kapelle cannot compute the logits.
    """
    import torch

    from kapelle.models.embedded import build_tokenizer
    from kapelle.models.language_model import CHECKED, LanguageModel

    for small in _smaller(settings):
        try:
            with torch.device("meta"):
                outline = make(copy.deepcopy(small))
            if sum(parameter.numel() for parameter in outline.parameters()) > most:
                continue
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = make(small).float()
        except Exception:  # noqa: BLE001, S112 - inconsistent settings raise anything
            continue
        try:
            own = tokenizer if small is settings else build_tokenizer(CHECKED)
            made = LanguageModel(model, own, **options)
        except KapelleError:
            raise
        except Exception:  # noqa: BLE001, S112 - reduced settings may not fit the model's code
            continue
        return made
    return None


def _smaller(settings: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield the unchanged settings, followed by smaller and smaller settings with the same kinds of layers."""
    yield settings
    few = _with_few_layers(settings)
    yield few
    for share in (1, 8, 4, 2):
        small = copy.deepcopy(few)
        inner = small.get_text_config()
        for key in EXPERTS:
            if isinstance(getattr(inner, key, None), int):
                setattr(inner, key, max(4, int(getattr(inner, "num_experts_per_tok", None) or 0)))
        heads = [getattr(inner, key, None) for key in HEADS]
        if all(isinstance(size, int) and size % share == 0 for size in heads if size is not None):
            for key, size in zip(HEADS, heads, strict=True):
                if size is not None:
                    setattr(inner, key, size // share)
            yield small


def _with_few_layers(settings: PretrainedConfig) -> PretrainedConfig:
    """Return the settings with a short vocabulary and the smallest number of layers that includes every kind of layer."""
    small = copy.deepcopy(settings)
    inner = small.get_text_config()
    count = next(key for key in (*LAYERS, "") if not key or isinstance(getattr(inner, key, None), int))
    layers = getattr(inner, count) if count else 0
    kinds = {
        key: value
        for key, value in inner.to_dict().items()
        if isinstance(value, list) and len(value) == layers and all(isinstance(kind, str) for kind in value)
    }
    enough = max([2, *(max(map(kind.index, kind)) + 1 for kind in kinds.values() if kind)])
    if enough < layers:
        for key, kind in kinds.items():
            setattr(inner, key, kind[:enough])
        setattr(inner, count, enough)
    if inner.vocab_size > WORDS:
        inner.vocab_size = WORDS
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(inner, name, None)
    return small
