"""The library `bitsandbytes`, an extra: optimisers whose moments take one byte, and frozen bases of four bits a weight.

It is imported where it is used, and needs a CUDA device. What it computes there was not tried in this project: the
tests put a stand-in with the same interface in its place.
"""

from __future__ import annotations

from importlib.util import find_spec

from kapelle.errors import ConfigError


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
