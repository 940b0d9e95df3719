"""Check devices before use, keep freed memory in the process, and check for the library `bitsandbytes`.

bitsandbytes is an optional extra that needs a CUDA device. It provides optimisers with one-byte moments, and frozen bases
with four bits per weight. It is imported where it is used. The tests use a fake with the same interface, so its results on
a GPU are untested here.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from importlib.util import find_spec

from kapelle.errors import AbsentPackage, ConfigError, noting
from kapelle.settings.checks import Check, RunToCheck

KEPT = 1 << 30
"""Maximum free bytes at the end of the heap before they are returned to the system."""

MAPPED = 1 << 25
"""Bytes from which a block is mapped separately; the largest value that every glibc accepts."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def check_device(device: str | None, setting: str) -> None:
    """Raise ConfigError, with the setting's name, if this device cannot be used; None means any device."""
    if device in {None, "cpu"}:
        return  # without importing torch, which takes seconds
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        kinds = ("cuda", "mps", "xpu")  # another machine may have one
        missing = AbsentPackage if str(device).partition(":")[0] in kinds else ConfigError
        raise missing(
            f"`{setting}: {device}` cannot be used: {reason}. Set `cpu`, or an available device."
        ) from error


@functools.cache
def keep_freed_memory() -> bool:
    """Make this process's allocator keep freed memory, once; return False if it is not glibc's or the user configured it.

    glibc returns free memory at the end of the heap to the system and remaps large blocks at every use. The first access to
    each page then causes a page fault, and the system clears the page. Each update needs tensors as large as those of the
    last update, so the process would request the returned memory again within milliseconds.
    """
    if any(os.environ.get(name) for name in _USER_SETTINGS) or os.name != "posix":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # macOS has no mallopt; musl's does nothing and returns 0.
    return mallopt is not None and mallopt(_TRIM_THRESHOLD, KEPT) == 1 == mallopt(_MMAP_THRESHOLD, MAPPED)


def check_bitsandbytes(setting: str, instead: str) -> None:
    """Raise ConfigError, with the setting and an alternative, if bitsandbytes or CUDA is missing."""
    if find_spec("bitsandbytes") is None:
        raise AbsentPackage(
            f"`{setting}` needs bitsandbytes, which is not installed. Run `pip install 'kapelle[quantised]'` on a machine with a "
            f"CUDA device, or set `{instead}`."
        )
    import torch

    if not torch.cuda.is_available():
        raise AbsentPackage(
            f"`{setting}` needs a CUDA device, and torch finds none here (`kapelle info`). Set `{instead}`."
        )


def check_quantization(run: RunToCheck) -> Iterator[str]:
    """Yield why a base cannot have four bits: trained, or not pretrained; AbsentPackage if this machine has no kernels."""
    model, team = run.config.model, run.team
    if model.quantization is None:
        return
    if run.training and not team.bases.keys() - team.trained_bases:
        yield (
            "`model.quantization: nf4` is for frozen models, but all models of this team are trained. Set "
            "`team.sharing: lora`."
        )
    elif model.path == "embedded" and model.path not in run.given:
        yield (
            "`model.quantization: nf4` needs a pretrained model, but `model.path` is `embedded`. Set `model.path` to a "
            "model, or set `model.quantization: null`."
        )
    elif model.path not in run.given and not run.elsewhere:
        with noting(run.absent):
            check_bitsandbytes("model.quantization: nf4", "model.quantization: null")


def check_optimizer(run: RunToCheck) -> None:
    """Raise AbsentPackage if this machine does not support the optimiser."""
    name = run.config.optimizer.name
    if name != "adamw" and not run.elsewhere:
        with noting(run.absent):
            check_bitsandbytes(f"optimizer.name: {name}", "optimizer.name: adamw")


CHECKS: tuple[Check, ...] = (check_quantization,)
TRAINING_CHECKS: tuple[Check, ...] = (check_optimizer,)
