"""Imports do not change the random generators of a process."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kapelle.runs.checkpoint import load, save
from kapelle.runtime.randomness import capture_random, restore_random


@pytest.fixture
def finders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the finders of this process as they were; begin without the guard, which an earlier trainer has set."""
    guarded = [finder for finder in sys.meta_path if type(finder).__name__ != "_Guard"]
    monkeypatch.setattr(sys, "meta_path", guarded)


def test_the_random_generators_continue_where_they_were(tmp_path: Path) -> None:
    own = torch.Generator().manual_seed(5)

    def draw() -> list[object]:
        return [
            random.random(),
            random.gauss(0, 1),
            np.random.normal(),
            np.random.randint(2**32),
            torch.rand(3).tolist(),
            torch.rand(3, generator=own).tolist(),
        ]

    random.seed(1)
    torch.manual_seed(1)
    np.random.seed(1)
    random.gauss(0, 1)  # the second half of its pair is part of the state
    np.random.normal()  # and of this one's
    folder = save(tmp_path, 0, {"random": capture_random(), "own": own.get_state()})
    ahead = draw()
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    state = load(folder)
    restore_random(state["random"])
    own.set_state(state["own"])
    assert draw() == ahead
