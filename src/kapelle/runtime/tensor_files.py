"""Reading safetensors; every way in which a file can be missing, cut off or unreadable becomes one error.

`packed` makes the same form in memory, with plain values beside the tensors, for another process.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kapelle.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor


def load_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, on the CPU; DataError says why it cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise DataError(f"{file} cannot be read: {_reason(error)}") from error


def packed(plain: object, tensors: Mapping[str, Tensor]) -> bytes:
    """Return a JSON value, whose floats may be infinite or NaN, and tensors as bytes that `unpacked` takes apart."""
    import torch
    from safetensors.torch import save

    text = json.dumps(plain).encode()
    held = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    return len(text).to_bytes(8, "little") + text + save(held)


def unpacked(data: bytes) -> tuple[Any, dict[str, Tensor]]:
    """Return what `packed` was given; the tensors are on the CPU."""
    from safetensors.torch import load

    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), load(data[end:])


def _reason(error: Exception) -> str:
    # The library maps the file, twice, and tells of the system's refusals in its own words.
    text = " ".join(str(error).split())
    if os.strerror(errno.EIO).lower() in text.lower():
        return (
            "the disk reports a fault (EIO). Check the disk, then try again, or go on elsewhere from a copy."
        )
    return f"{text or type(error).__name__}. Is it cut off? Put it back from a copy."
