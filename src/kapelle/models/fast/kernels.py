"""Which kernels are used: each is tried where it is to run, before its first use, against plain operations.

Kernels of torch and Triton that a GPU alone can run were written against here without one. So each first computes a small problem of the same kind
on the device, backward too, and is used only if its numbers are those of plain operations. Where it cannot run, or its numbers are
others, the plain operations go on in its place, and a line in the log says so, once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

Trial = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""Computes a small problem, and returns pairs of what the kernel and what plain operations made of it."""

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}
"""Greatest difference, as a share of the largest number: a few roundings, by type."""

_found: dict[Hashable, bool] = {}


def holds(kernel: str, where: tuple[Hashable, ...], trial: Trial) -> bool:
    """Return whether a kernel gives the numbers of plain operations `where` it is to be used (device, type, sizes).

    It is tried once and the answer kept, so that a forward pass and its backward pass choose alike.
    """
    key = (kernel, *where)
    if key not in _found:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False  # a graph being captured could not wait for the answer
        _found[key] = _tried(kernel, where, trial)
    return _found[key]


def _tried(kernel: str, where: tuple[Hashable, ...], trial: Trial) -> bool:
    place = ", ".join(map(str, where))
    try:
        with torch.inference_mode(mode=False), torch.enable_grad(), torch.autocast("cuda", enabled=False):
            for found, expected in trial():
                far = float((found.detach().float() - expected.detach().float()).abs().max())
                bound = _bound(found.dtype) * float(expected.detach().float().abs().max())
                if not far <= bound:  # nor is NaN
                    _log.warning(
                        "%s differ from plain operations by %.2g here (%s), where %.2g is allowed. They are not used; please "
                        "report it.",
                        kernel, far, place, bound,
                    )  # fmt: skip
                    return False
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 — whatever keeps a kernel from running, plain operations take its place
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        _log.warning("%s cannot run here (%s): %s. Plain operations take their place.", kernel, place, reason)
        return False
    return True


def _bound(dtype: torch.dtype) -> float:
    # TF32 rounds what float32 multiplies to the digits of float16.
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return BOUNDS[torch.float16 if tf32 else dtype]


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device; asked for every layer of every pass, so it is kept."""
    return torch.cuda.get_device_capability(device)


@cache
def has_triton() -> bool:
    """Return whether Triton is installed, as it is with torch for CUDA."""
    return find_spec("triton") is not None


def drawn(*shape: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return normal numbers for a trial, without a draw from the run's own generators."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)
