"""What a CUDA graph is to a GPU, for a CPU: the operations of one step with their arguments as they were, run again.

A graph holds the kernels that a step started, with every number that Python gave them and the addresses of what they
read and wrote. So does a tape: it repeats the very operations on the very tensors, and only what an operation of the
same tape made is made again. What a step computed in Python is not computed again. An operation that waits for a result,
or copies from the machine's memory, ends a recording on a GPU; here it fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from kapelle.engines.rollout.local.step_graphs import GraphRecorder

WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
COPIES = {"aten::lift_fresh", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"}


class UnrecordableError(RuntimeError):
    """A step did what no recording can hold."""


class Tape(TorchDispatchMode):
    """The operations of one step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note it."""
        if waits(func, args) or func._schema.name in COPIES:
            raise UnrecordableError(f"{func} needs the machine's attention")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def play(self, wanted: Tensor) -> Tensor:
        """Run all operations again; return what stands for a tensor that the step made."""
        made: dict[int, Tensor] = {}

        def now(tensor: Tensor) -> Tensor:
            return made.get(id(tensor), tensor)

        for func, args, kwargs, out in self.calls:
            again = func(*tree_map_only(Tensor, now, args), **tree_map_only(Tensor, now, kwargs))
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor):
                    made[id(old)] = new
        return now(wanted)


def waits(func: Any, args: Any) -> bool:
    """Return whether an operation's output has a size that only its result tells."""
    if func._schema.name == "aten::index":  # by places it has not, by a mask it has
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    return bool(WAITS & set(func.tags))


class TapeRecorder(GraphRecorder):
    """Records steps on tapes."""

    def __init__(self) -> None:
        self.warmed = 0
        self.recorded = 0
        self.replayed = 0
        self.forgotten = 0

    def warm(self, step: Callable[[], Tensor]) -> Tensor:
        """Run a step as it is."""
        self.warmed += 1
        return step()

    def forget(self) -> None:
        """Count."""
        self.forgotten += 1

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Run a step and note it; its first run counts as the recording's first."""
        self.recorded += 1
        tape = Tape()
        with tape:
            logits_RV = step()
        fresh = [logits_RV.clone()]

        def replay() -> Tensor:
            self.replayed += 1
            return fresh.pop() if fresh else tape.play(logits_RV)

        return replay


class PlainRecorder(GraphRecorder):
    """Runs a step where another recorder plays it: the same sizes and memory, and Python in each step."""

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return the step itself."""
        return step
