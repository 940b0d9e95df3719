"""Run untrusted code through a single function, `run(backend, files, command, stdin, limits) → Result`.

A sandbox protects the host from the hostile programs that `docs/sandbox.md` lists. No sandbox is called secure, because it
shares the kernel with the host. A backend is selected by name, and kapelle never falls back to a weaker backend.
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
