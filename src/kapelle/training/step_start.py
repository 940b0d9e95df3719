"""The state before a step of training, so that an interrupted step leaves no trace.

Playing changes the random generators and the queue of played steps. An update of one optimiser step can be interrupted
only before it; before an update of several, the learners are copied. Copies are kept in the machine's memory, not the
GPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from kapelle.algorithm import CreditMemory
from kapelle.engines.train.protocol import TrainEngine
from kapelle.runtime.randomness import capture_random, restore_random
from kapelle.runtime.trees import leaves

MOST_HELD = 1 << 30
"""Most bytes of weights and moments that are copied; above it a step that is interrupted late costs the steps since
the last checkpoint."""


class StepStart:
    """The state before a step, as far as the step has changed it."""

    def __init__(self, restore_queue: Callable[[], None], versions: Mapping[str, int] | None = None) -> None:
        """Begin a step; `restore_queue` restores the queue, `versions` are those of the trained policies."""
        self._versions = dict(versions or {})
        self._random = capture_random()
        self._restore_queue = restore_queue
        self._learners: Mapping[str, Any] | None = None
        self._memory: Mapping[str, Any] | None = None
        self.lost = False
        """True if learners are changed without a copy."""

    def hold(self, engine: TrainEngine | None, memory: CreditMemory | None) -> None:
        """Copy what an update changes: learners, if there are several optimiser steps, and the memory."""
        if engine is not None:
            state = engine.state()
            if sum(tensor.nbytes for tensor in tensors(state)) <= MOST_HELD:
                self._learners = copied(state)
            else:
                self.lost = True
        if memory is not None:
            self._memory = deepcopy(dict(memory.state()))

    def take_back(self, engine: TrainEngine, memory: CreditMemory | None) -> bool:
        """Restore everything; False if learners changed that were not copied."""
        # An error may come between the steps of two learners, where a stop does not.
        moved = self._learners is None and dict(engine.versions) != self._versions
        if self.lost or moved:
            return False
        if self._learners is not None:
            engine.load_state(self._learners)
        if self._memory is not None and memory is not None:
            memory.load_state(self._memory)
        self._restore_queue()
        restore_random(self._random)
        return True


def tensors(tree: object) -> Iterator[Tensor]:
    """Yield the tensors of a tree of mappings, lists and tuples."""
    return (leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor))


def copied(tree: Any) -> Any:
    """Return a tree with every tensor copied to the CPU."""
    if isinstance(tree, Tensor):
        return torch.empty_like(tree, device="cpu").copy_(tree.detach())
    if isinstance(tree, Mapping):
        return {key: copied(inner) for key, inner in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(copied(inner) for inner in tree)
    return tree
