"""Errors of libraries on a machine without memory are reported as missing memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from kapelle.runtime.machine import long_lived_apart, refusal


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("could not create a primitive"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        SystemError("error return without exception set"),
    ],
    ids=["Python", "oneDNN", "torch", "safetensors"],
)
def test_missing_memory_is_reported_in_words(error: Exception) -> None:
    answer = refusal(error)
    assert answer is not None
    assert "no memory left. End other programs, or use a smaller model or batch." in answer


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), SystemError("bad call"), ValueError("no")])
def test_an_unexpected_error_keeps_its_class(error: Exception) -> None:
    assert refusal(error) is None


@pytest.fixture
def thawed() -> Iterator[None]:
    """Unfreeze all objects, as in a user's process; `conftest.py` freezes imported ones."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("thawed")
def test_long_lived_objects_are_frozen_inside_the_block() -> None:
    class Ring:
        def __init__(self) -> None:
            self.own = self

    before = Ring()
    gone = weakref.ref(before)
    with long_lived_apart():
        assert gc.get_freeze_count()
        new = Ring()
        died = weakref.ref(new)
        del before, new
        gc.collect(0)
        assert died() is None, "what came later is collected as ever"
        assert gone() is not None
    assert not gc.get_freeze_count()
    gc.collect()
    assert gone() is None
