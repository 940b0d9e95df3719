"""Whether a device exists, checked before anything is put on it."""

from __future__ import annotations

from kapelle.errors import ConfigError


def check_device(device: str | None, setting: str) -> None:
    """Raise ConfigError, which names the setting, when nothing can be put on this device; None is any that is there."""
    if device in {None, "cpu"}:
        return  # without torch, so that a recipe is read in no time
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"`{setting}: {device}` cannot be used: {reason}. Set `cpu`, or a device that is there."
        ) from error
