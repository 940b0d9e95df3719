"""Run a second process that samples during the update (`training.overlap`).

The process builds the same team from the same settings and reads the base models from disk. Adapters and trained weights are in
shared memory. The samples depend only on the settings, the number of the step and the weights, so the results of a run are bitwise
identical to those without this process. If the process dies, a new process repeats the step. If the new process also dies, the run
stops.

The module `server.py` contains the code of the second process.
"""

from __future__ import annotations

import json
import logging
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import astuple, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor, get_num_threads

from kapelle.engines.rollout.protocol import Interruptible
from kapelle.engines.train.protocol import TrainEngine
from kapelle.errors import ConfigError, EngineError
from kapelle.features.ahead.queue import Pending, RolloutsAhead, Sampler, begin_step
from kapelle.models.lora_bank import copy_weights
from kapelle.rollout.episodes import CollectsGroups
from kapelle.rollout.partial import PartialGroup, dump_partial
from kapelle.rollout.replica import moves
from kapelle.rollout.setup import RolloutSetup
from kapelle.runs.timeline import Timeline
from kapelle.runtime.foreign_code import received_error
from kapelle.runtime.process_tree import LifeSigns, SharedStatus, how_it_ended, start_server
from kapelle.runtime.randomness import capture_random, random_as_lists
from kapelle.runtime.ranks import ALONE, Ranks
from kapelle.runtime.tensors import SharedTensors, layout_of
from kapelle.settings.schema import RunConfig
from kapelle.setup.preparation import PreparedRun
from kapelle.team import Team
from kapelle.training.feature import StartedRun
from kapelle.training.rollouts import Collector, CurrentRollouts, Rollouts, StepShare, together
from kapelle.training.selection import Roles, tasks_of

SERVER = "kapelle.features.ahead.server"
"""Name of the module that the second process runs."""
LOOK = 0.2
"""Time in seconds between two checks while this process waits."""
CLOSING = 2.0
"""Time in seconds after which the second process is killed if it has not exited."""


class SamplingProcess:
    """Collects the episodes of steps in another process, one step at a time."""

    def __init__(
        self,
        config: RunConfig,
        team: Team,
        bases: Mapping[str, str],
        hashes: Mapping[str, str],
        engine: TrainEngine,
        ranks: Ranks = ALONE,
    ) -> None:
        """Start the process, which loads its models in the background.

        The argument `bases` contains the paths of the team's base models by name, and `hashes` contains the hashes of their weights.
        The argument `engine` holds all policies. Each of the `ranks` has a process for its share of the work.
        """
        self._ranks, self._meeting = ranks, ranks.meeting()
        own = {name: engine.weights(name) for name, policy in team.policies.items() if moves(policy)}
        layout = layout_of(own)
        self._shared = SharedTensors(layout)
        self._versions: dict[str, int] = {}
        for name, tensors in own.items():
            self.load(name, tensors, 0)
        self._bases, self._hashes = dict(bases), dict(hashes)
        self._start_with: dict[str, Any] = {
            "config": config.model_dump(mode="json"),
            "bases": self._bases,
            "layout": layout,
            "descriptor": self._shared.descriptor,
            "threads": get_num_threads(),
            "meeting": self._meeting.form,
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.pipe: Connection | None = None
        self._pulse: SharedStatus | None = None
        self._still: str | None = None
        """How long the process has given no sign of life, or None if this time is not too long."""
        self._busy = False
        self.seconds = 0.0
        """Duration of the last step in seconds."""
        self._start()

    @property
    def weights(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The weights of the second process, by policy and tensor name."""
        return {name: self._shared[name] for name in self._versions}

    def load(self, policy: str, weights: Mapping[str, Tensor], version: int) -> None:
        """Load new weights of a policy for the next steps."""
        copy_weights(self._shared[policy], weights, f"'{policy}'")
        self._versions[policy] = version

    def begin(self, number: int, left: Sequence[PartialGroup] = (), roles: Roles | None = None) -> Pending:
        """Start to collect the episodes of step `number`; see `Sampler`.

        The returned function sets the global random generators to the same states as if this process had collected the episodes. The
        returned function raises EngineError if the second process is lost twice, or if it has read different base weights from disk
        than this process.
        """
        if self._busy:  # its step was interrupted and is not needed
            self._end()
        place = self._meeting.begin()
        random = random_as_lists(capture_random())
        casts = (
            None
            if roles is None
            else [{agent: astuple(cast) for agent, cast in each.items()} for each in roles]
        )
        request = (number, dict(self._versions), random, dump_partial(left), place, casts)
        self.send(request)
        return partial(together, self._ranks, self._meeting, partial(self._share, request))

    def _share(self, request: tuple[object, ...]) -> bytes:
        answer = self._answer()
        if answer is None:
            how = self._died()
            logging.getLogger(__name__).warning(
                "kapelle: The sampling process has ended: %s. If you did not end it, check whether the machine ran out of memory. "
                "Another process collects step %d.",
                how,
                request[0],
            )
            self.send(request)
            answer = self._answer()
            if answer is None:
                raise EngineError(
                    f"The sampling process was lost twice at step {request[0]}: {how}, then {self._died()}. See its output "
                    "above, check the machine's memory, or set `training.overlap: false`."
                )
        for base, found in answer["hashes"].items():
            if found != self._hashes[base]:
                raise EngineError(
                    f"The weights in '{self._bases[base]}' have changed: the sampling process read {found}, but this process read "
                    f"{self._hashes[base]}. Resume the run, or set `training.overlap: false`."
                )
        self.seconds = answer["seconds"]
        return bytes(answer["share"], "ascii")

    def send(self, request: tuple[object, ...]) -> None:
        """Send a request. If the process has died, `_answer` notices it."""
        if self.process is None:
            self._start()
        assert self.pipe is not None
        self._busy = True
        with suppress(OSError):
            self.pipe.send_bytes(json.dumps(request).encode())

    def _answer(self) -> dict[str, Any] | None:
        """Wait for the response and return it, or raise the error that the process reports.

        The result is None if the process has died or gives no sign of life.
        """
        assert self.pipe is not None
        assert self.process is not None
        assert self._pulse is not None
        pulse, looked = self._pulse, time.monotonic()
        signs = LifeSigns(self.process.pid, lambda: pulse.beats)
        try:
            while not self.pipe.poll(LOOK):
                now = time.monotonic()
                self._still = signs.look(min(now - looked, 5 * LOOK))
                looked = now
                if self._still is not None:
                    return None
            answer: dict[str, Any] = json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            return None
        self._busy = False
        if "error" in answer:
            raise received_error(answer["error"], "The sampling process")
        return answer

    def _died(self) -> str:
        """Return a description of how the process ended. The next request starts a new process."""
        process, still = self.process, self._still
        assert process is not None
        self._end()
        how = how_it_ended(process.returncode) if still is None else f"stopped responding: {still}"
        return f"process {process.pid} {how}"

    def _start(self) -> None:
        self._pulse, self._still = SharedStatus(), None
        self.process, ours = start_server(SERVER, self._pulse, self._shared.descriptor)
        self.pipe = Connection(ours.detach())
        self._busy = False
        with suppress(OSError):
            self.pipe.send_bytes(json.dumps(self._start_with).encode())

    def _end(self) -> None:
        if self.pipe is not None:
            self.pipe.close()  # the process then ends
        if self.process is not None:
            if self._busy or self._still is not None:
                self.process.kill()
            try:
                self.process.wait(CLOSING)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self._pulse is not None:
            self._pulse.close()
        self.process, self.pipe, self._pulse, self._busy = None, None, None, False

    def close(self) -> None:
        """End the second process."""
        self._end()
        self._shared.close()


class SamplingWorkers:
    """Lets the rollout workers of a cluster collect the episodes of steps during the update."""

    def __init__(self, run: StartedRun, engine: CollectsGroups) -> None:
        """Set the run, whose rollout engine consists of these workers."""
        setup, self._engine = replace(run.setup, data=run.algorithm.data), engine
        self._collector = Collector(run.config, run.algorithm, setup, tasks_of(run.setup, run.config))
        self._busy = False

    @property
    def weights(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The weights of the workers, by policy and tensor name."""
        return self._engine.weights

    def load(self, policy: str, weights: Mapping[str, Tensor], version: int) -> None:
        """Do nothing, because the workers are the rollout engine of the run and already have the weights."""

    def begin(self, number: int, left: Sequence[PartialGroup] = (), roles: Roles | None = None) -> Pending:
        """Let the workers start step `number`; see `Sampler`."""
        setup = replace(self._collector.setup, timeline=Timeline())
        collector, meeting = replace(self._collector, setup=setup), setup.ranks.meeting()
        meeting.begin()
        if self._busy:  # their step was interrupted
            self._engine.abandon()
        collector.tasks.assign = None if roles is None else lambda step, count: roles
        rest = begin_step(collector, number, left, meeting)
        self._busy = True

        def wait() -> StepShare:
            groups = together(setup.ranks, meeting, rest)
            self._busy = False
            return groups

        return wait


def rollouts_ahead(
    run: StartedRun, acting: RolloutSetup, loaded: PreparedRun, closing: ExitStack, *, own_engine: bool
) -> Rollouts:
    """Return the object that collects the episodes of a run ahead of its updates.

    The arguments are the same as those of `make_rollouts`. Raises ConfigError if the engine must return unfinished completions but
    cannot, or if another process cannot create the engine.
    """
    config, bases, player = run.config, loaded.team.bases, run.setup.engine
    if not run.algorithm.collects_episodes:
        return CurrentRollouts(run, acting)
    if config.training.partial_rollouts and not isinstance(player, Interruptible | CollectsGroups):
        raise ConfigError(
            f"`training.partial_rollouts` leaves episodes unfinished, but the engine {type(player).__name__} cannot return "
            "unfinished completions. Make it inherit from `Interruptible`, or set `training.partial_rollouts: 0`."
        )
    sampler: Sampler | None = None
    if config.training.overlap:
        if isinstance(player, CollectsGroups):
            sampler = SamplingWorkers(run, player)
        else:
            passed = [path for path in bases.values() if path in loaded.given]
            if passed:
                raise ConfigError(
                    f"`training.overlap` samples in another process, which reads models from the disk, but the model "
                    f"'{passed[0]}' is in this process's memory. Save it and set `model.path` to its folder, or set "
                    "`training.overlap: false`."
                )
            if own_engine:
                raise ConfigError(
                    "`training.overlap` samples in another process, which cannot use the rollout engine that was passed. Set the engine in the "
                    "recipe (`engine`), or set `training.overlap: false`."
                )
            ranks = run.setup.ranks
            sampler = SamplingProcess(config, run.team, bases, run.base_hashes, run.engine, ranks)
            closing.callback(sampler.close)
    return RolloutsAhead(run, acting, sampler)
