"""The weights that a model's folder holds, read from the heads of its safetensors files, and whether its settings describe them.

No tensor is read.

A file begins with the length of its head in 8 bytes, then comes the head, a JSON object of name, type, shape and place of
each tensor, then the tensors. A file that was cut off is shorter than its head says.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from kapelle.errors import ModelError
from kapelle.models.outline import Outline, read_settings

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""What transformers reads: one file, or a list of shards."""
LARGEST_HEAD = 100_000_000
"""Bytes; the library reads no longer ones."""
LFS = b"version https://git-lfs"
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Type → bits of one element; a type that is not here is left to the library."""
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


class StoredTensor(NamedTuple):
    """One tensor in a file."""

    dtype: str
    shape: tuple[int, ...]


def stored_weights(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor that a model's folder holds; ModelError for files that are missing, cut off or no weights.

    The error speaks of the model as `it`.
    """
    whole, index = folder / WHOLE, folder / INDEX
    if whole.is_file() or not index.is_file():
        if not whole.exists():
            there = ", ".join(sorted(file.name for file in folder.glob("*.safetensors"))[:3])
            raise ModelError(
                f"It has neither {WHOLE} nor {INDEX}, which transformers reads, but {there or 'no weights'}. Save it again "
                "with `save_pretrained`."
            )
        return read_head(whole)
    found: dict[str, StoredTensor] = {}
    listed = shards_of(index)
    for name in sorted(set(listed.values())):
        if not (folder / name).is_file():
            raise ModelError(f"It has no {name}, which {INDEX} lists. Fetch or save it again.")
        found |= read_head(folder / name)
    for name, file in listed.items():
        if name not in found:
            raise ModelError(f"It has no '{name}' in {file}, where {INDEX} lists it. Fetch or save it again.")
    return found


def read_head(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file by name; ModelError unless its bytes are exactly those that its head promises."""
    try:
        with file.open("rb") as opened:
            size = file.stat().st_size
            start = opened.read(len(LFS))
            if start == LFS:
                raise _broken(file, "is a pointer of Git LFS and no weights. Fetch them with `git lfs pull`")
            if size < 8:
                raise _broken(file, f"has {size} bytes: it is empty or cut off. Fetch or save it again")
            (length,) = struct.unpack("<Q", start[:8])
            if length > min(size - 8, LARGEST_HEAD):
                raise _broken(
                    file, "is cut off in its head, or is no safetensors file. Fetch or save it again"
                )
            opened.seek(8)
            head: Any = json.loads(opened.read(length))
        return _tensors(file, head, size - 8 - length)
    except ModelError:
        raise
    except OSError as error:
        raise _broken(file, f"cannot be read: {error.strerror}. Check the path and the disk") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _broken(file, "has a head that is no list of tensors. Fetch or save it again") from error


def _tensors(file: Path, head: Mapping[str, Any], there: int) -> dict[str, StoredTensor]:
    """Return what a head lists, of a file with so many bytes of tensors."""
    found, taken = {}, 0
    for name, tensor in head.items():
        if name == "__metadata__":
            continue
        start, end = tensor["data_offsets"]
        dtype, shape = str(tensor["dtype"]), tuple(map(int, tensor["shape"]))
        bits = BITS.get(dtype)
        if bits is not None and prod(shape) * bits != 8 * (end - start):
            raise _broken(file, f"gives '{name}' another size than its shape has. Fetch or save it again")
        found[name], taken = StoredTensor(dtype, shape), max(taken, end)
    if taken != there:
        which = "is cut off" if there < taken else "is longer than its head says"
        raise _broken(
            file, f"{which}: it holds {there:,} of {taken:,} bytes of weights. Fetch or save it again"
        )
    return found


def shards_of(index: Path) -> Mapping[str, str]:
    """Return tensor → file as an index lists them; ModelError for none, or for files outside of the folder."""
    try:
        listed = dict(json.loads(index.read_text("utf-8"))["weight_map"])
        if listed and all(isinstance(name, str) and name == Path(name).name for name in listed.values()):
            return listed
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    raise _broken(index, "lists no shards. Fetch or save it again")


def _broken(file: Path, what: str) -> ModelError:
    return ModelError(f"Its file {file.name} {what}.")


def folder_of(path: str) -> Path | None:
    """Return the folder that holds the weights of a model; None for the embedded one and one that was not downloaded."""
    if path == "embedded":
        return None
    if Path(path).expanduser().is_dir():
        return Path(path).expanduser()
    from huggingface_hub import try_to_load_from_cache

    for file in (WHOLE, INDEX):
        found = try_to_load_from_cache(path, file)
        if isinstance(found, str):
            folder = Path(found).parent
            shards = shards_of(Path(found)).values() if file == INDEX else ()
            return folder if all((folder / shard).is_file() for shard in shards) else None
    return None


def check_files(path: str, outline: Outline) -> bool:
    """Raise ModelError for weights that are missing, cut off, or others than the outline's; False where this cannot be told.

    Files that fit by name and shape are enough. Others may be what another version or program has saved under other names,
    which transformers knows. True where nothing was downloaded yet.
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
    coded = read_settings(str(folder)).get(
        "quantization_config"
    )  # needs a library that transformers looks for
    if (
        not coded
        and known
        and fits == outline.weights
        and all(tensor.dtype in FLOATS for tensor in found.values())
    ):
        return True
    from kapelle.models.loading_checks import check_names

    return check_names(path)
