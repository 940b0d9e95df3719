"""Derive seeds, and save and restore the global random generators of a process (Python's `random`, NumPy and torch).

After a run is resumed, the random generators must continue where they stopped, so their states are part of a checkpoint. If a module
draws random numbers during its import, the states of the generators are restored after the import. Otherwise, a resumed run, which
imports modules at different times than an uninterrupted run, would draw different numbers.
"""

from __future__ import annotations

import hashlib
import random
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from kapelle.runtime.on_demand import torch


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on all parts and on their order. The seed is the same in every process."""
    text = "\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def capture_random() -> dict[str, object]:
    """Return the states of the global random generators: Python's `random`, NumPy, and torch on every device."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {**_host_states(), "cuda": devices}


def restore_random(state: Mapping[str, Any]) -> None:
    """Set the global random generators to the states that `capture_random` returned.

    If there are fewer devices than before, the states of the missing devices are ignored.
    """
    _set_host_states(state)
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, generator in zip(range(devices), state["cuda"], strict=False):
        torch.cuda.set_rng_state(generator, device)


def random_as_lists(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the states that `capture_random` returned to JSON values."""
    plain = {**state, "torch": state["torch"].tolist(), "cuda": [each.tolist() for each in state["cuda"]]}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


def random_from_lists(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the JSON values that `random_as_lists` returned back to states."""
    version, numbers, gauss = plain["python"]
    return {
        "python": (version, tuple(numbers), gauss),
        "numpy": tuple(plain["numpy"]),
        "torch": torch.tensor(plain["torch"], dtype=torch.uint8),
        "cuda": [torch.tensor(each, dtype=torch.uint8) for each in plain["cuda"]],
    }


def keep_imports_from_drawing() -> None:
    """Restore the global random generators after every further import. Further calls of this function have no effect.

    Imports outside the main thread are not affected, because the main thread may draw random numbers at the same time.
    """
    _host_states()  # imports numpy and torch before imports are guarded
    if not any(isinstance(finder, _Guard) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Guard())


class _Guard(MetaPathFinder):
    """An import hook that finds modules with the other finders, and restores the random generators after a module was executed."""

    _executing = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Inner imports are a part of the outer one.
        if self._executing or threading.current_thread() is not threading.main_thread():
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(fullname, path, target)
            if spec is not None:
                loader = spec.loader
                # Built-in and frozen modules share their loader classes, and draw nothing.
                if loader is not None and not isinstance(loader, type) and "exec_module" not in vars(loader):
                    # Change this one loader object only.
                    loader.exec_module = partial(self._execute_unseen, loader.exec_module)
                return spec  # type: ignore[no-any-return]  # finders have no more precise type
        return None

    def _execute_unseen(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        if self._executing:
            execute(module)
            return
        before = _host_states()
        self._executing = True
        try:
            execute(module)
        finally:
            self._executing = False
            _set_host_states(before)


def _host_states() -> dict[str, object]:
    import numpy as np

    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    drawn = (str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(gauss))
    return {"python": random.getstate(), "numpy": drawn, "torch": torch.get_rng_state()}


def _set_host_states(state: Mapping[str, Any]) -> None:
    import numpy as np

    random.setstate(state["python"])
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
