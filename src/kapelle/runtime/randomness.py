"""Seeds by what they are for, and the random generators that a whole process shares: Python's `random`, NumPy's, torch's.

What draws from them must go on after a resume where it stopped. Their states are part of a checkpoint, and what a
module draws while it is imported does not count: a resumed process imports it at another moment than one that was never
stopped (lazily, at the first use after the states were restored), and all draws after it would differ.
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
    """Return a 63-bit seed that depends on every part and on their order; it is the same in every process."""
    text = "\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def capture_random() -> dict[str, object]:
    """Return the states of the global generators: Python's `random`, NumPy's, and torch's on every device."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {**_host_states(), "cuda": devices}


def restore_random(state: Mapping[str, Any]) -> None:
    """Set the global generators to what `capture_random` returned; one that it does not hold stays as it is.

    Where there are fewer devices than there were, the states of the missing ones are left out.
    """
    _set_host_states(state)
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, generator in zip(range(devices), state["cuda"], strict=False):
        torch.cuda.set_rng_state(generator, device)


def random_as_lists(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `capture_random` returned as values that JSON can hold."""
    plain = {**state, "torch": state["torch"].tolist(), "cuda": [each.tolist() for each in state["cuda"]]}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


def random_from_lists(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states that `random_as_lists` was given."""
    version, numbers, gauss = plain["python"]
    return {
        "python": (version, tuple(numbers), gauss),
        "numpy": tuple(plain["numpy"]),
        "torch": torch.tensor(plain["torch"], dtype=torch.uint8),
        "cuda": [torch.tensor(each, dtype=torch.uint8) for each in plain["cuda"]],
    }


def keep_imports_from_drawing() -> None:
    """Let every import from now on leave the global generators as it found them; a second call does nothing.

    Imports in threads other than the main one are left alone, because the main thread may draw at the same time.
    """
    _host_states()  # imports what it needs, before imports are guarded
    if not any(isinstance(finder, _Guard) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Guard())


class _Guard(MetaPathFinder):
    """Finds what the other finders find, and has it executed between two looks at the generators."""

    _executing = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # What a module imports in turn is inside it.
        if self._executing or threading.current_thread() is not threading.main_thread():
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(fullname, path, target)
            if spec is not None:
                loader = spec.loader
                # Loaders of built-in and frozen modules are classes that all share; those modules draw nothing.
                if loader is not None and not isinstance(loader, type) and "exec_module" not in vars(loader):
                    # Set on this one loader, which stays the same object for all other callers.
                    loader.exec_module = partial(self._execute_unseen, loader.exec_module)
                return spec  # type: ignore[no-any-return]  # finders are not typed more closely
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
    if "numpy" in state:  # a checkpoint of before holds none
        np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
