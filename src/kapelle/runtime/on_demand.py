"""Import torch when it is first used.

    from kapelle.runtime.on_demand import Tensor, torch

Importing torch takes several seconds, and settings can be read and checked without torch. The name `Tensor` can be used only in
annotations; use `torch.Tensor` for `isinstance`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

__all__ = ["Tensor", "torch"]


class _OnDemand(ModuleType):
    """A module that is imported when one of its names is used."""

    def __getattr__(self, name: str) -> Any:
        # Keep the value, so that each name is looked up once.
        found = self.__dict__[name] = getattr(import_module(self.__name__), name)
        return found


if TYPE_CHECKING:
    import torch
else:
    torch = _OnDemand("torch")

Tensor: TypeAlias = "torch.Tensor"
