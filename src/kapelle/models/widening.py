"""A model that computes in float32 for a moment, whatever its weights are held in, without a second copy of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kapelle.models.language_model import LanguageModel


@contextmanager
def in_float32(model: LanguageModel) -> Iterator[None]:
    """Inside, passes compute in float32: a module's half-precision weights are widened while it runs, one at a time.

    Afterwards every weight is the tensor that it was, in the same memory.
    """
    dtype, model.dtype = model.dtype, torch.float32
    hooks = [
        hook
        for module in model.model.modules()
        if any(_is_half(weight) for weight in module.parameters(recurse=False))
        for hook in _hooks(module)
    ]
    try:
        yield
    finally:
        model.dtype = dtype
        for hook in hooks:
            hook.remove()


def _hooks(module: nn.Module) -> Iterator[torch.utils.hooks.RemovableHandle]:
    """Widen a module's weights before its pass, and put them back after it, even if it fails."""
    held: list[tuple[nn.Parameter, Tensor]] = []

    def widen(_module: nn.Module, _inputs: object) -> None:
        for (
            weight
        ) in module.parameters():  # also those below it: a state-space mixer reads its layers' weights itself
            if _is_half(weight):
                held.append((weight, weight.data))
                weight.data = weight.data.float()

    def put_back(_module: nn.Module, _inputs: object, _output: object) -> None:
        while held:
            weight, data = held.pop()
            weight.data = data

    yield module.register_forward_pre_hook(widen)
    yield module.register_forward_hook(put_back, always_call=True)


def _is_half(weight: Tensor) -> bool:
    return weight.dtype in (torch.bfloat16, torch.float16)
