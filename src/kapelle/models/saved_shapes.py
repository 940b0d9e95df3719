"""What folders of weights hold, by their settings and the heads of their files: no tensor is read."""

from __future__ import annotations

import json
from pathlib import Path

from kapelle.errors import ModelError
from kapelle.models.peft_settings import lora_of
from kapelle.team import Lora

ADAPTER = "adapter_model.safetensors"
"""The file in which PEFT keeps an adapter's tensors."""


def read_lora(folder: Path) -> Lora:
    """Read the size of a PEFT LoRA folder's adapter without its weights; ModelError as `read_adapter`."""
    try:
        settings = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        return lora_of(settings, folder)
    except ModelError:
        raise
    except OSError as error:
        raise ModelError(
            f"'{folder}' is no PEFT adapter folder: adapter_config.json cannot be read ({error.strerror}). Name a "
            "run (RUN, RUN@best, RUN@STEP), or a folder that one has saved, such as RUN/checkpoints/STEP/policies/NAME."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"'{folder}' is no PEFT adapter folder: {error!r}.") from error


def shapes_of(folder: Path, files: str = "*.safetensors") -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in some safetensors files of a folder, without reading the tensors.

    Raises ModelError when there are none, or when they cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[int, ...]] = {}
    try:
        for file in sorted(folder.glob(files)):
            with safe_open(file, "np") as tensors:
                found |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"The weights in '{folder}' cannot be read: {error}.") from error
    if not found:
        raise ModelError(
            f"'{folder}' holds no weights ({files}). Save it again as safetensors: kapelle loads nothing else."
        )
    return found
