"""Programs in processes of their own, and an event loop that is watched."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


def output_of(program: str) -> str:
    """Return what a Python program prints in a process of its own, which must end well."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@asynccontextmanager
async def ticking(at_least: int) -> AsyncIterator[None]:
    """Assert that the event loop continued inside the block: other tasks had so many turns."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    task = asyncio.create_task(tick())
    try:
        yield
    finally:
        task.cancel()
    assert ticks > at_least, "the event loop stood still"
