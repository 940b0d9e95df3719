"""torch, imported by its first use instead of by the modules that name it.

    from kapelle.runtime.on_demand import Tensor, torch

Mathematics, algorithms and signals name torch like this, so that settings can be read and a run can be checked and
described without it: importing torch takes seconds. `Tensor` stands for `torch.Tensor` in annotations alone;
`isinstance` takes `torch.Tensor`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

__all__ = ["Tensor", "torch"]


class _OnDemand(ModuleType):
    """Stands for a module until something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        # Kept, so that a name is looked up by its first use alone.
        found = self.__dict__[name] = getattr(import_module(self.__name__), name)
        return found


if TYPE_CHECKING:
    import torch
else:
    torch = _OnDemand("torch")

Tensor: TypeAlias = "torch.Tensor"
