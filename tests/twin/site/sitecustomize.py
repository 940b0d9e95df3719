"""Gives every process of Python that finds this folder on its path the twin, as soon as it imports torch."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _TorchFinder(MetaPathFinder):
    """Loads the device before torch asks which ones there are, and tells torch.cuda of it after."""

    def find_spec(self, name: str, _path: Any, _target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name)
        assert spec is not None, "torch is not installed"
        assert spec.loader is not None, "torch is a package with a loader"
        run = spec.loader.exec_module

        def run_with_the_twin(module: ModuleType) -> None:
            from tests.twin import device

            device()
            run(module)
            from tests.twin.cuda import install

            install()

        spec.loader.exec_module = run_with_the_twin  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _TorchFinder())
