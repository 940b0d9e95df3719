"""Reading safetensors; every way in which a file can be missing, cut off or unreadable becomes one error."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

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


def _reason(error: Exception) -> str:
    # The library maps the file, twice, and tells of the system's refusals in its own words.
    text = " ".join(str(error).split())
    if os.strerror(errno.EIO).lower() in text.lower():
        return (
            "the disk reports a fault (EIO). Check the disk, then try again, or go on elsewhere from a copy."
        )
    return f"{text or type(error).__name__}. Is it cut off? Put it back from a copy."
