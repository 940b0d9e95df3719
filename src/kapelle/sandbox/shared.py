"""The sandboxes that everything in one process shares."""

from __future__ import annotations

import atexit
import functools
import os

from kapelle.sandbox.backends import backend
from kapelle.sandbox.contract import Limits
from kapelle.sandbox.pool import Pool


def shared_pool(name: str, limits: Limits, parallel: int) -> Pool:
    """Return this process's pool of a backend: started at the first call, closed when the process ends.

    Raises SandboxError for an unknown backend.
    """
    # The threads and sandboxes of a pool do not survive a fork.
    return _pool(os.getpid(), name, limits, parallel)


@functools.cache
def _pool(process: int, name: str, limits: Limits, parallel: int) -> Pool:
    pool = Pool(backend(name), limits, parallel=parallel)
    atexit.register(_close, pool, process)
    return pool


def _close(pool: Pool, process: int) -> None:
    if os.getpid() == process:
        pool.close()
