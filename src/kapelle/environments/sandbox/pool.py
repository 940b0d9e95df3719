"""Run many programs concurrently, each in a sandbox that was prepared in advance.

A sandbox is used once. A warm sandbox has no program yet, but its namespaces and mounts already exist, so a run takes only the
time to unpack its files and run its program.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar

from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.sandbox.contract import Layer, Limits, Result
from kapelle.environments.sandbox.docker import Docker
from kapelle.environments.sandbox.session import Backend, Prepared, run
from kapelle.environments.sandbox.unsafe_subprocess import UnsafeSubprocess
from kapelle.errors import SandboxError, did_you_mean
from kapelle.runtime.deadlines import pause_deadline

T = TypeVar("T")


class Pool(AbstractContextManager["Pool"]):
    """A backend that keeps sandboxes of another backend ready and runs blocking work with these sandboxes from asyncio.

    The warm sandboxes have the limits `limits`; a run with other limits gets a new sandbox. `parallel` is the maximum number of
    concurrent calls, and `warm` is the number of sandboxes that are kept ready. Use the pool as a context manager, or close it
    with `close`.
    """

    def __init__(
        self, backend: Backend, limits: Limits, *, parallel: int = 4, warm: int | None = None
    ) -> None:
        if parallel < 1:
            raise SandboxError(
                f"`parallel` is {parallel}, but a sandbox pool must allow at least 1 call at a time."
            )
        self._backend = backend
        self.name = backend.name
        """The name of the underlying backend."""
        self._limits = limits
        self.parallel = parallel
        """The maximum number of concurrent calls."""
        self._wanted = parallel if warm is None else warm
        self._ready: collections.deque[Prepared] = collections.deque()
        self._change = threading.Condition()
        self._closed = False
        self._calls = ThreadPoolExecutor(parallel, thread_name_prefix="kapelle-sandbox")
        # The kernel kills a sandbox when the thread that started it ends, so this thread lives as long as the pool.
        self._filler = threading.Thread(target=self._fill, name="kapelle-sandbox-filler", daemon=True)
        self._filler.start()

    @property
    def python(self) -> str:
        """The path of the Python interpreter of the underlying backend."""
        return self._backend.python

    def layers(self) -> tuple[Layer, ...]:
        """Return the layers of protection of the underlying backend."""
        return self._backend.layers()

    def prepare(self, limits: Limits) -> Prepared:
        """Return a warm sandbox with the given limits if one is ready, otherwise a new sandbox."""
        with self._change:
            if self._closed:
                raise SandboxError("The sandbox pool is closed and cannot run any more programs.")
            if limits == self._limits and self._ready:
                taken = self._ready.popleft()
                self._change.notify_all()
                return taken
        return self._backend.prepare(limits)

    async def run(
        self,
        files: Mapping[str, bytes],
        command: Sequence[str],
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> Result:
        """Run a command like `kapelle.environments.sandbox.run`, but without blocking the event loop."""
        return await self.call(functools.partial(run, self, files, command, stdin, limits or self._limits))

    async def call(self, work: Callable[[], T]) -> T:
        """Run blocking work that uses this pool in one of the threads of the pool; the sandboxes limit the duration of the work."""
        loop, turn = asyncio.get_running_loop(), pause_deadline()

        def begin() -> T:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and no call waits any more
                loop.call_soon_threadsafe(turn)
            return work()

        return await loop.run_in_executor(self._calls, begin)

    def wait_until_warm(self, timeout_s: float = 10.0) -> bool:
        """Wait until all warm sandboxes are ready; return False if they are not ready within `timeout_s` seconds."""
        with self._change:
            return self._change.wait_for(lambda: len(self._ready) >= self._wanted, timeout_s)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the running calls and free the waiting sandboxes; this method may be called more than once."""
        self._calls.shutdown(wait=True, cancel_futures=True)
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._filler.join()

    def _fill(self) -> None:
        with contextlib.suppress(SandboxError):
            while True:
                with self._change:
                    self._change.wait_for(lambda: self._closed or len(self._ready) < self._wanted)
                    if self._closed:
                        break
                # If this fails, the next call prepares its own sandbox and raises the error where the caller sees it.
                prepared = self._backend.prepare(self._limits)
                with self._change:
                    self._ready.append(prepared)
                    self._change.notify_all()
        while self._ready:
            self._ready.popleft().discard()


# -------- Finds a sandbox by name. There is no fallback: the chosen backend works, or it raises an error with the reason

DEFAULT = "bubblewrap"
BACKENDS: Mapping[str, Callable[[], Backend]] = {
    "bubblewrap": Bubblewrap,
    "docker": Docker,
    "unsafe_subprocess": UnsafeSubprocess,
}


def backend(name: str = DEFAULT) -> Backend:
    """Return the sandbox backend with the given name; raise SandboxError for an unknown name.

    `require` checks that the backend works on this machine.
    """
    if name not in BACKENDS:
        raise SandboxError(f"Unknown sandbox '{name}'.{did_you_mean(name, BACKENDS)}")
    return BACKENDS[name]()


def layers(name: str = DEFAULT) -> tuple[Layer, ...]:
    """Return the layers of protection of a sandbox and whether this machine provides each layer, for `kapelle info`."""
    return backend(name).layers()


def require(chosen: Backend) -> None:
    """Raise SandboxError if this machine lacks a required layer of protection of the sandbox."""
    missing = [layer for layer in chosen.layers() if layer.required and not layer.present]
    if missing:
        named = "; ".join(f"{layer.name}: {layer.detail}" for layer in missing)
        raise SandboxError(
            f"The sandbox `{chosen.name}` cannot be used on this machine ({named}), "
            "and kapelle never falls back to a weaker sandbox. To run programs without isolation, set `unsafe_subprocess`."
        )
    _required.add(chosen.name)


def modes_required() -> tuple[str, ...]:
    """Return a line for each sandbox that this process has required, which describes how the total resources of a run are limited."""
    return tuple(
        f"{name}: {layer.detail}"
        for name in sorted(_required)
        for layer in layers(name)
        if layer.name == "mode"
    )


_required: set[str] = set()


# -------- The sandbox pools that all parts of a process share


def shared_pool(name: str, limits: Limits, parallel: int) -> Pool:
    """Return the pool of a backend that is shared within this process.

    The pool starts at the first call and is closed when the process exits. Raises SandboxError for an unknown backend.
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
