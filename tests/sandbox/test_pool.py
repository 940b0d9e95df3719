from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kapelle.errors import SandboxError
from kapelle.sandbox.bubblewrap import Bubblewrap
from kapelle.sandbox.contract import Limits
from kapelle.sandbox.pool import Pool

LIMITS = Limits(wall_s=10.0)


def sandboxes() -> set[str]:
    """Return the bubblewrap processes that have this process as their parent."""
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        # A thread or a child of earlier tests may end while it is looked at.
        with suppress(FileNotFoundError, ProcessLookupError):
            for pid in (thread / "children").read_text().split():
                # The command that drops privileges names it too, until it becomes it.
                if b"bwrap" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.add(pid)
    return found


async def test_runs_go_side_by_side(sandbox: Bubblewrap) -> None:
    with Pool(sandbox, LIMITS, parallel=4) as pool:
        assert pool.wait_until_warm()
        started = time.monotonic()
        results = await asyncio.gather(*(pool.run({}, ["sleep", "0.5"]) for _ in range(4)))
        assert all(result.ok for result in results)
        assert time.monotonic() - started < 1.5


async def test_results_belong_to_their_runs(sandbox: Bubblewrap) -> None:
    with Pool(sandbox, LIMITS, parallel=3) as pool:
        results = await asyncio.gather(
            *(pool.run({"n": b"%d" % n}, ["cat", "n", "-"], b"/%d" % n) for n in range(24))
        )
    assert [result.stdout for result in results] == [b"%d/%d" % (n, n) for n in range(24)]


def test_closing_frees_every_sandbox_that_waits(sandbox: Bubblewrap) -> None:
    before = sandboxes()
    pool = Pool(sandbox, LIMITS, parallel=1, warm=3)
    assert pool.wait_until_warm()
    own = sandboxes() - before
    assert len(own) == 3
    pool.close()
    pool.close()
    assert not own & sandboxes()
    with pytest.raises(SandboxError, match="closed"):
        pool.prepare(LIMITS)


async def test_other_limits_get_a_sandbox_of_their_own(sandbox: Bubblewrap) -> None:
    with Pool(sandbox, LIMITS, parallel=1) as pool:
        assert pool.wait_until_warm()
        result = await pool.run({}, ["sleep", "60"], limits=Limits(wall_s=0.3))
    assert result.limit == "wall"


async def test_the_event_loop_goes_on_while_programs_run(sandbox: Bubblewrap) -> None:
    with Pool(sandbox, LIMITS, parallel=1) as pool:
        running = asyncio.ensure_future(pool.run({}, ["sleep", "0.3"]))
        turns = 0
        while not running.done():
            await asyncio.sleep(0.005)
            turns += 1
    assert turns > 10


def test_a_pool_without_room_is_refused(sandbox: Bubblewrap) -> None:
    with pytest.raises(SandboxError, match="at least 1"):
        Pool(sandbox, LIMITS, parallel=0)
