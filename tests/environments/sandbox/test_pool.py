from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from typing import Any

import pytest

from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.sandbox.contract import Limits
from kapelle.environments.sandbox.pool import Pool
from kapelle.errors import SandboxError

LIMITS = Limits(wall_s=10.0)
PATIENT = Limits(wall_s=60.0)


async def test_runs_go_side_by_side(sandbox: Bubblewrap) -> None:
    all_run = threading.Barrier(4)

    def echo() -> bytes:
        session = pool.prepare(PATIENT).start({}, ["cat"])
        all_run.wait(timeout=30.0)
        session.send(b"here")
        return session.finish().stdout

    with Pool(sandbox, PATIENT, parallel=4) as pool:
        said = await asyncio.gather(*(pool.call(echo) for _ in range(4)))
    assert said == [b"here"] * 4


async def test_results_belong_to_their_runs(sandbox: Bubblewrap) -> None:
    with Pool(sandbox, LIMITS, parallel=3) as pool:
        results = await asyncio.gather(
            *(pool.run({"n": b"%d" % n}, ["cat", "n", "-"], b"/%d" % n) for n in range(24))
        )
    assert [result.stdout for result in results] == [b"%d/%d" % (n, n) for n in range(24)]


def test_closing_frees_every_sandbox_that_waits(sandbox: Bubblewrap, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Remembered(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    assert sandbox.layers(), "looked at before, because looking starts programs too"
    monkeypatch.setattr(subprocess, "Popen", Remembered)
    pool = Pool(sandbox, LIMITS, parallel=1, warm=3)
    assert pool.wait_until_warm()
    assert len(started) == 3
    for process in started:
        os.kill(process.pid, 0)
    pool.close()
    pool.close()
    for process in started:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)
    with pytest.raises(SandboxError, match="closed"):
        pool.prepare(LIMITS)
