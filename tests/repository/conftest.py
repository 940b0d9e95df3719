"""What all tests of the repository share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Let the collector rest: it would look through the syntax trees of all sources again and again while they are made."""
    gc.disable()
    yield
    gc.enable()
