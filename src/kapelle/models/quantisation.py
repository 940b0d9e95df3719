"""The library `bitsandbytes`, an extra: optimisers whose moments take one byte, and frozen bases of four bits a weight.

It is imported where it is used, and needs a CUDA device. What it computes there was not tried in this project: the
tests put a stand-in with the same interface in its place.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kapelle.errors import ConfigError

if TYPE_CHECKING:
    import torch


def check_bitsandbytes(setting: str, instead: str) -> None:
    """Raise ConfigError, which names the setting and what to set instead, where bitsandbytes or CUDA is missing."""
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"`{setting}` needs bitsandbytes, which is not installed in this environment. pip install 'kapelle[quantised]' on "
            f"a machine with a CUDA device, or set `{instead}`."
        )
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"`{setting}` needs a CUDA device, and there is none here (`kapelle info` shows what torch sees). Set `{instead}`."
        )


def check_four_bit(path: str, *, here: bool = True) -> None:
    """Raise ConfigError where `model.quantization` cannot work with the model at a path, or, if it runs `here`, on this machine."""
    if path == "embedded":
        raise ConfigError(
            "`model.quantization: nf4` reads a pretrained model, but `model.path` is `embedded`. Name a model, or set "
            "`model.quantization: null`."
        )
    if here:
        check_bitsandbytes("model.quantization: nf4", "model.quantization: null")


def four_bit(dtype: torch.dtype, device: str | None) -> dict[str, Any]:
    """Return what `from_pretrained` needs to load linear layers as nf4 codes (2305.14314), with scales of one byte."""
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": settings, "device_map": {"": device or "cuda"}}
