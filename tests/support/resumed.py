"""Runs that are trained to their end, in one go or broken off between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kapelle.training.trainer import Trainer


def trained(settings: dict[str, Any], run: Path) -> Path:
    """Train to the end; return the run."""
    with Trainer(**settings, run_dir=run) as trainer:
        trainer.train()
    return run


@contextmanager
def resumed(settings: dict[str, Any], run: Path, *, after: int) -> Iterator[Trainer]:
    """Train some steps, and in another trainer the others: that one is given, at its end."""
    with Trainer(**settings, run_dir=run) as first:
        first.train(after)
    with Trainer(**settings, run_dir=run, resume=True) as second:
        second.train()
        yield second
