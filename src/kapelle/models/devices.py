"""Check devices before use, configure the memory of the process, and check whether `bitsandbytes` is available.

The library bitsandbytes is optional and needs a CUDA device. bitsandbytes provides optimisers with one-byte moments,
and frozen base models with four bits per weight. The library bitsandbytes is imported only where it is used. The tests
use a fake with the same interface, so the results of bitsandbytes on a GPU are not covered by these tests.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kapelle.errors import AbsentPackage, ConfigError, noting
from kapelle.settings.checks import Check, RunToCheck

if TYPE_CHECKING:
    import torch

KEPT = 1 << 30
"""The maximum number of free bytes at the end of the heap before they are returned to the operating system."""

MAPPED = 1 << 25
"""The size in bytes from which a block of memory is mapped separately. The value is the largest that every glibc
accepts."""

PRIMITIVES = 256
"""The maximum number of prepared products that oneDNN keeps. By default it keeps 1,024, one for each shape. On Gemma 3 270M
these took 6 GB, and 256 took as much time."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def check_device(device: str | None, setting: str) -> None:
    """Raise ConfigError, which names the setting, if a device cannot be used. None stands for any device."""
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
def configure_memory() -> bool:
    """Configure the allocator of this process to keep freed memory, and limit oneDNN's cache unless the user has set its size.

    Repeated calls have no further effect. The limit of the cache has no effect after oneDNN has computed a product.

    Returns False if the allocator is not that of glibc or if the user has configured it. By default, glibc returns free
    memory at the end of the heap to the operating system and maps large blocks anew at every use. The first access to
    each page then causes a page fault, and the operating system clears the page. Each update needs tensors as large as
    those of the previous update, so the process would request the returned memory again within milliseconds.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(PRIMITIVES))
    if any(os.environ.get(name) for name in _USER_SETTINGS) or os.name != "posix":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # macOS has no mallopt; musl's does nothing and returns 0.
    return mallopt is not None and mallopt(_TRIM_THRESHOLD, KEPT) == 1 == mallopt(_MMAP_THRESHOLD, MAPPED)


@functools.cache
def multiplies(dtype: torch.dtype) -> bool:
    """Return whether oneDNN computes matrix products of a type on this processor. Otherwise, half precision is slower than float32.

    Products in bfloat16 need AVX-512 or, on Arm, its bfloat16 instructions.
    """
    import torch

    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())  # noqa: SLF001 — no public name
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001


def return_freed_memory() -> None:
    """Return the freed memory of this process to the operating system, where the C library can do so (glibc).

    Tensors of many sizes leave holes in the heap, so that the memory of a process grows although its tensors do not. On
    Gemma 3 270M this took 2 GB in 40 steps.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None


def check_bitsandbytes(setting: str, instead: str) -> None:
    """Raise ConfigError, which names the setting and an alternative, if bitsandbytes or a CUDA device is missing."""
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
    """Yield an error message if `model.quantization` cannot be used because the model is trained or is not pretrained.

    Raises AbsentPackage if this machine does not support quantisation.
    """
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
