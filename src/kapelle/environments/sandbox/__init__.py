"""Runs untrusted code through a single function, `run(backend, files, command, stdin, limits) → Result`.

A sandbox contains the hostile programs listed in `docs/sandbox.md`. It is never called secure, because it shares the kernel with
the host. A backend is chosen by name, and kapelle never falls back to a weaker one.
"""

from kapelle.environments.sandbox.contract import Layer, Limits, Result
from kapelle.environments.sandbox.pool import BACKENDS, Pool, backend, layers, require
from kapelle.environments.sandbox.session import Backend, Prepared, Session, run

__all__ = [
    "BACKENDS",
    "Backend",
    "Layer",
    "Limits",
    "Pool",
    "Prepared",
    "Result",
    "Session",
    "backend",
    "layers",
    "require",
    "run",
]
