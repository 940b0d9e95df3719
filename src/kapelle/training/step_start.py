"""What a step of training began with, so that one that is broken off leaves no trace.

Playing changes the random generators and what is played ahead. An update that takes one optimiser step is broken off
before it or not at all; where it takes several, the learners are copied first. Copies live in the memory of the
machine, not of the GPU.
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

MOST_HELD = 1 << 30
"""Bytes of weights and moments that are copied at most; above it a step that is broken off late costs the steps since
the last checkpoint."""


class StepStart:
    """The state before a step, as far as the step has changed it."""

    def __init__(self, ahead: Callable[[], None], versions: Mapping[str, int] | None = None) -> None:
        """Begin a step; `ahead` puts back what is played ahead, `versions` are those of the trained policies."""
        self._versions = dict(versions or {})
        self._random = capture_random()
        self._ahead = ahead
        self._learners: Mapping[str, Any] | None = None
        self._memory: Mapping[str, Any] | None = None
        self.lost = False
        """True when learners move without a copy."""

    def hold(self, engine: TrainEngine | None, memory: CreditMemory | None) -> None:
        """Copy what an update changes bit by bit: learners, where there are several optimiser steps, and the memory."""
        if engine is not None:
            state = engine.state()
            if sum(tensor.nbytes for tensor in tensors(state)) <= MOST_HELD:
                self._learners = copied(state)
            else:
                self.lost = True
        if memory is not None:
            self._memory = deepcopy(dict(memory.state()))

    def take_back(self, engine: TrainEngine, memory: CreditMemory | None) -> bool:
        """Put everything back; False where learners have moved that were not copied."""
        # An error may come between the steps of two learners, where a stop does not.
        moved = self._learners is None and dict(engine.versions) != self._versions
        if self.lost or moved:
            return False
        if self._learners is not None:
            engine.load_state(self._learners)
        if self._memory is not None and memory is not None:
            memory.load_state(self._memory)
        self._ahead()
        restore_random(self._random)
        return True


def tensors(tree: object) -> Iterator[Tensor]:
    """Yield the tensors of a tree of mappings, lists and tuples."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for inner in tree.values():
            yield from tensors(inner)
    elif isinstance(tree, list | tuple):
        for inner in tree:
            yield from tensors(inner)


def copied(tree: Any) -> Any:
    """Return a tree with every tensor copied to the CPU."""
    if isinstance(tree, Tensor):
        return torch.empty_like(tree, device="cpu").copy_(tree.detach())
    if isinstance(tree, Mapping):
        return {key: copied(inner) for key, inner in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(copied(inner) for inner in tree)
    return tree
