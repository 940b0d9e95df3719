"""Run a process that samples for the process that started it (`process.py`).

The process first reads from a socket which team to build, and then reads one request after another. Between two requests, it
continues to roll out the groups of the last request. The process ends together with the process that started it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from kapelle.runtime.event_loop import run_async
from kapelle.runtime.foreign_code import sent_error
from kapelle.runtime.interrupts import SIGNALS
from kapelle.runtime.machine import long_lived_apart
from kapelle.runtime.process_tree import SharedStatus, live


def main(descriptor: int, pulse: int, parent: int) -> None:
    """Serve requests until the other side closes the socket or the process `parent` ends, and send heartbeats."""
    for number in SIGNALS:  # the other process handles them and closes the socket
        signal.signal(number, signal.SIG_IGN)
    live(SharedStatus(pulse), parent)
    run_async(partial(_serve, Connection(descriptor)))


async def _serve(pipe: Connection) -> None:
    loop, requests = asyncio.get_running_loop(), asyncio.Queue[Any]()

    def arrived(request: Any) -> None:
        loop.call_soon_threadsafe(requests.put_nowait, request)

    threading.Thread(target=_listen, args=(pipe, arrived), daemon=True).start()
    built: _Sampler | None = None
    start_with = await requests.get()
    with ExitStack() as apart:
        while True:
            request = await requests.get()
            try:
                if built is None:
                    built = _Sampler(start_with)
                    apart.enter_context(long_lived_apart())
                answer = await built.exchange(**request)
            except Exception as error:  # noqa: BLE001 - raised in the other process
                answer = {"error": sent_error(error)}
            pipe.send_bytes(json.dumps(answer).encode())


def _listen(pipe: Connection, arrived: Callable[[Any], None]) -> None:
    """Pass requests on, and end this process when the other process has closed the socket."""
    while True:
        try:
            arrived(json.loads(pipe.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)
        except BaseException:  # noqa: BLE001 - an unreadable request: the other process notices the end
            traceback.print_exc()
            os._exit(1)


class _Sampler:
    """A copy of the team with the weights that the other process provides."""

    def __init__(self, start_with: Mapping[str, Any]) -> None:
        """Build the team and its engine from the settings; see `SamplingProcess`."""
        from kapelle.rollout.continuous import ContinuousRollouts
        from kapelle.rollout.replica import TeamReplica
        from kapelle.runtime import interrupts
        from kapelle.runtime.tensors import SharedTensors

        interrupts.commands.append(self)  # the watchdog may end a call that cannot be interrupted
        self._team = TeamReplica(start_with["config"], start_with["bases"], start_with["threads"])
        self._shared = SharedTensors(start_with["layout"], start_with["descriptor"])
        self._rollouts = ContinuousRollouts(
            self._team.continuous_setup, self._team.config.training.tasks_per_step
        )
        self._versions: Mapping[str, int] = {}

    async def exchange(
        self, versions: Mapping[str, int], wanted: str, unfinished: bool, seconds: float
    ) -> dict[str, Any]:
        """Load the weights with these versions, and exchange groups; see `ContinuousRollouts.exchange`."""
        from kapelle.rollout.partial import dump_wanted, load_wanted

        load = partial(self._load, versions) if versions != self._versions else None
        found = await self._rollouts.exchange(
            load_wanted(wanted), load, unfinished=unfinished, seconds=seconds
        )
        return {
            "hashes": self._team.hashes,
            "finished": dump_wanted(found.finished),
            "unfinished": dump_wanted(found.unfinished),
        }

    def _load(self, versions: Mapping[str, int]) -> None:
        for policy, version in versions.items():
            self._team.load(policy, lambda name=policy: self._shared[name], version)  # type: ignore[misc]
        self._versions = versions
