"""What a machine without memory says by the mouths of libraries is told as what it is."""

from __future__ import annotations

import pytest

from kapelle.runtime.machine import refusal


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
def test_a_lack_of_memory_is_told_in_words(error: Exception) -> None:
    said = refusal(error)
    assert said is not None
    assert "no memory left. End other programs, or use a smaller model or batch." in said


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), SystemError("bad call"), ValueError("no")])
def test_a_defect_stays_a_defect(error: Exception) -> None:
    assert refusal(error) is None
