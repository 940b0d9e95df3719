"""Test each GPU kernel against plain operations before its first use, and decide which kernels are used.

Our own kernels are operations of torch with two implementations: plain operations on a CPU, and one Triton kernel on
CUDA. An emulated CUDA device of a torch without CUDA runs the plain operations as one operation.

This code was written without a GPU. Each kernel of torch and Triton therefore first computes a small problem of the
same kind on the device, forward and backward, and is used only if its results agree with plain operations. If the
results differ, plain operations are used, and one message is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

Trial = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""A function that computes a small problem and returns pairs of results: the result of the kernel and that of plain
operations."""

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}
"""The maximum difference between results by type, relative to the largest number. The values allow a few rounding
errors."""

_found: dict[Hashable, bool] = {}

_LIBRARY = torch.library.Library("kapelle", "DEF")


def operation(schema: str, plain: Callable[..., Any], module: str) -> Callable[..., Any]:
    """Define and return an operation of torch, without derivatives.

    On CUDA, it runs the function of the same name in a module of Triton kernels, which is imported at the first call.
    On other devices, it runs `plain`.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, plain, "CPU")
    if torch.backends.cuda.is_built():

        def on_cuda(*given: Any, **outputs: Any) -> Any:
            return getattr(import_module(module), name)(*given, **outputs)

        _LIBRARY.impl(name, on_cuda, "CUDA")
    made: Callable[..., Any] = getattr(torch.ops.kapelle, name).default
    return made


def runs_operations(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether our operations are single kernels for a type on a device."""
    return device.type == "cuda" and dtype in BOUNDS and (has_triton() or not torch.backends.cuda.is_built())


def holds(kernel: str, where: tuple[Hashable, ...], trial: Trial) -> bool:
    """Return whether the results of a kernel agree with plain operations for the uses that `where` describes.

    The tuple `where` contains values such as the device, the type and sizes. The result is cached, so that a forward
    pass and its backward pass make the same choice.
    """
    key = (kernel, *where)
    if key not in _found:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False  # a graph that is being captured cannot synchronise
        _found[key] = _tried(kernel, where, trial)
    return _found[key]


def _tried(kernel: str, where: tuple[Hashable, ...], trial: Trial) -> bool:
    place = ", ".join(map(str, where))
    try:
        with torch.inference_mode(mode=False), torch.enable_grad(), torch.autocast("cuda", enabled=False):
            for found, expected in trial():
                far = float((found.detach().float() - expected.detach().float()).abs().max())
                bound = _bound(found.dtype) * float(expected.detach().float().abs().max())
                if not far <= bound:  # NaN does not count as close
                    _log.warning(
                        "%s differ from plain operations by %.2g here (%s); the limit is %.2g. They are not used; please "
                        "report it.",
                        kernel, far, place, bound,
                    )  # fmt: skip
                    return False
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 — plain operations are used after any error
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        _log.warning("%s cannot run here (%s): %s. Plain operations are used instead.", kernel, place, reason)
        return False
    return True


def _bound(dtype: torch.dtype) -> float:
    # TF32 multiplies float32 numbers with the precision of float16.
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return BOUNDS[torch.float16 if tf32 else dtype]


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device. The result is cached, because every layer of every pass needs it."""
    return torch.cuda.get_device_capability(device)


@cache
def has_triton() -> bool:
    """Return whether Triton is installed, as it is together with torch for CUDA."""
    return find_spec("triton") is not None


def drawn(*shape: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return normally distributed numbers for a test, without drawing from the random generators of the run."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)
