"""Run a second process that samples continuously (`training.asynchronous`).

The process builds the same team from the same settings and reads the base models from disk. Adapters and trained weights are in
shared memory. If the process dies, a new process rolls out its groups again. If the new process also dies before it returns an
answer, the run stops.

The module `server.py` contains the code of the second process.
"""

from __future__ import annotations

import json
import logging
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor, get_num_threads

from kapelle.engines.train.protocol import TrainEngine
from kapelle.errors import EngineError
from kapelle.models.lora_bank import copy_weights
from kapelle.rollout.partial import Exchange, Wanted, dump_wanted, load_wanted
from kapelle.rollout.replica import moves
from kapelle.runtime.foreign_code import received_error
from kapelle.runtime.process_tree import LifeSigns, SharedStatus, how_it_ended, start_server
from kapelle.runtime.tensors import SharedTensors, layout_of
from kapelle.settings.schema import RunConfig
from kapelle.team import Team

SERVER = "kapelle.features.ahead.server"
"""Name of the module that the second process runs."""
LOOK = 0.2
"""Time in seconds between two checks while this process waits."""
CLOSING = 2.0
"""Time in seconds after which the second process is killed if it has not exited."""


class SamplingProcess:
    """Rolls out groups in another process."""

    def __init__(
        self,
        config: RunConfig,
        team: Team,
        bases: Mapping[str, str],
        hashes: Mapping[str, str],
        engine: TrainEngine,
    ) -> None:
        """Start the process, which loads its models in the background.

        The argument `bases` contains the paths of the team's base models by name, and `hashes` contains the hashes of their weights.
        The argument `engine` holds all policies.
        """
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
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.pipe: Connection | None = None
        self._pulse: SharedStatus | None = None
        self._still: str | None = None
        """How long the process has given no sign of life, or None if this time is not too long."""
        self._busy = False
        self._start()

    @property
    def weights(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The weights of the second process, by policy and tensor name."""
        return {name: self._shared[name] for name in self._versions}

    def load(self, policy: str, weights: Mapping[str, Tensor], version: int) -> None:
        """Load new weights of a policy, with which the process samples after the next call of `exchange`."""
        copy_weights(self._shared[policy], weights, f"'{policy}'")
        self._versions[policy] = version

    def exchange(self, wanted: Wanted, *, unfinished: bool = False, seconds: float = 0.0) -> Exchange:
        """Let the process roll out groups, and return those that are finished; see `ContinuousRollouts.exchange`.

        The process first loads the weights of the last calls of `load`. Raises EngineError if the process is lost twice, or if it has
        read different base weights from disk than this process.
        """
        request = {
            "versions": self._versions,
            "wanted": dump_wanted(wanted),
            "unfinished": unfinished,
            "seconds": seconds,
        }
        self._send(request)
        answer = self._answer()
        if answer is None:
            how = self._died()
            logging.getLogger(__name__).warning(
                "kapelle: The sampling process has ended: %s. If you did not end it, check whether the machine ran out of memory. "
                "Another process samples %d unfinished groups again.",
                how,
                len(wanted),
            )
            self._send(request)
            answer = self._answer()
            if answer is None:
                raise EngineError(
                    f"The sampling process was lost twice: {how}, then {self._died()}. See its output above, check the machine's memory, "
                    "or set `training.asynchronous: false`."
                )
        for base, found in answer["hashes"].items():
            if found != self._hashes[base]:
                raise EngineError(
                    f"The weights in '{self._bases[base]}' have changed: the sampling process read {found}, but this process read "
                    f"{self._hashes[base]}. Resume the run, or set `training.asynchronous: false`."
                )
        return Exchange(load_wanted(answer["finished"]), load_wanted(answer["unfinished"]))

    def _send(self, request: Mapping[str, object]) -> None:
        """Send a request. If the process has died, `_answer` notices it."""
        if self._busy:  # the answer to an interrupted request is not needed
            self._end()
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
