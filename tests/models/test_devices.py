"""Freed memory stays with the process, unless its environment says something of the allocator itself."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from kapelle.models.devices import keep_freed_memory
told = "ask" in sys.argv and keep_freed_memory()
def fill():
    blocks = [bytearray(20_000_000) for _ in range(10)]
fill(), fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
fill()
touched = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(told, touched * resource.getpagesize() // 20_000_000)
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this machine has no glibc")


def told_and_faults(*arguments: str, **environment: str) -> tuple[str, int]:
    """Return what the call says, and how many of ten blocks were touched again, in a process of its own."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=plain | environment,
    )
    told, blocks = done.stdout.split()
    return told, int(blocks)


@pytest.mark.slow
def test_what_was_freed_is_used_again_without_asking_the_system() -> None:
    told, blocks = told_and_faults("ask")
    assert (told, blocks) == ("True", 0)
    told, blocks = told_and_faults()
    assert told == "False"
    assert blocks > 5, "this is what it is for"
