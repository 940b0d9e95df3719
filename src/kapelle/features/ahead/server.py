"""Run a process that samples for the process that started it (`process.py`).

The process first reads from a socket which team to build, and then reads one request after another. The process ends together with
the process that started it, even during a step.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from kapelle.runtime.foreign_code import sent_error
from kapelle.runtime.interrupts import SIGNALS
from kapelle.runtime.machine import long_lived_apart
from kapelle.runtime.process_tree import SharedStatus, live

if TYPE_CHECKING:
    from kapelle.training.selection import TrainingTasks


def main(descriptor: int, pulse: int, parent: int) -> None:
    """Serve requests until the other side closes the socket or the process `parent` ends, and send heartbeats."""
    for number in SIGNALS:  # the other process handles them and closes the socket
        signal.signal(number, signal.SIG_IGN)
    live(SharedStatus(pulse), parent)
    pipe = Connection(descriptor)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, requests), daemon=True).start()
    built: _Sampler | None = None
    start_with = requests.get()
    apart = ExitStack()
    while True:
        request = requests.get()
        try:
            if built is None:
                built = _Sampler(start_with)
                apart.enter_context(long_lived_apart())
            answer = built.collect(*request)
        except Exception as error:  # noqa: BLE001 - raised in the other process
            answer = {"error": sent_error(error)}
        pipe.send_bytes(json.dumps(answer).encode())


def _listen(pipe: Connection, requests: queue.SimpleQueue[Any]) -> None:
    """Add requests to a queue, and end this process when the other process has closed the socket."""
    while True:
        try:
            requests.put(json.loads(pipe.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)
        except BaseException:  # noqa: BLE001 - an unreadable request: the other process notices the end
            traceback.print_exc()
            os._exit(1)


class _Sampler:
    """A copy of the team with the weights that the other process provides."""

    def __init__(self, start_with: Mapping[str, Any]) -> None:
        """Build the team and its engine from the settings; see `SamplingProcess`."""
        from kapelle.rollout.replica import TeamReplica
        from kapelle.runtime import interrupts
        from kapelle.runtime.ranks import Meeting
        from kapelle.runtime.tensors import SharedTensors

        interrupts.commands.append(self)  # the watchdog may end a call that cannot be interrupted
        self._team = TeamReplica(start_with["config"], start_with["bases"], start_with["threads"])
        self._shared = SharedTensors(start_with["layout"], start_with["descriptor"])
        self._tasks: TrainingTasks | None = None
        self._meeting = Meeting()
        if start_with["meeting"] is not None:
            from kapelle.runtime.rank_group import meeting_from

            self._meeting = meeting_from(start_with["meeting"])

    def collect(
        self,
        number: int,
        versions: Mapping[str, int],
        random: Mapping[str, Any],
        left: str,
        place: int,
        roles: Sequence[Mapping[str, Sequence[str]]] | None,
    ) -> dict[str, Any]:
        """Collect this rank's share of a step and of the unfinished groups (JSON lines).

        The argument `place` is the number of the call in the meeting. For each task, `roles` maps agents to the policy and the name
        of the player that take their role. Returns the share (`dump_share`) and the time in seconds.
        """
        from kapelle.features.ahead.queue import begin_step
        from kapelle.rollout.partial import load_partial
        from kapelle.runs.timeline import Timeline
        from kapelle.runtime.randomness import random_from_lists, restore_random
        from kapelle.training.rollouts import Collector, dump_share
        from kapelle.training.selection import tasks_of
        from kapelle.types import Cast

        started = time.perf_counter()
        team = self._team
        for policy, version in versions.items():
            team.load(policy, lambda name=policy: self._shared[name], version)  # type: ignore[misc]
        restore_random(random_from_lists(random))
        setup = replace(team.setup, data=team.algorithm.data, timeline=Timeline())
        self._tasks = self._tasks or tasks_of(setup, team.config)
        casts = [{agent: Cast(*cast) for agent, cast in each.items()} for each in roles or ()]
        self._tasks.assign = None if roles is None else lambda step, count: casts
        self._meeting.begin(place)
        try:
            collector = Collector(team.config, team.algorithm, setup, self._tasks)
            share = begin_step(collector, number, load_partial(left), self._meeting)()
        except Exception as error:
            self._meeting.fail(error)
            raise
        answer = {
            "hashes": team.hashes,
            "share": dump_share(share).decode("ascii"),
            "seconds": time.perf_counter() - started,
        }
        team.setup.engine.release_caches()
        return answer
