"""The policy server as a whole: an engine's thread, the routes, and the port.

with serve_policy(play, "demo", Binding(), Limits()) as server:
    print(server.url)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kapelle.engines.rollout.protocol import ServesCallers
from kapelle.rollout.play import Play
from kapelle.services.binding import Binding
from kapelle.services.http.application import Application
from kapelle.services.http.server import HttpServer
from kapelle.services.policy.admission import Limits
from kapelle.services.policy.agents import Agents
from kapelle.services.policy.engine_thread import EngineThread
from kapelle.services.policy.recording import EpisodeFile, Recorder
from kapelle.services.policy.service import PolicyService

__all__ = ["Limits", "PolicyServer", "serve_policy"]


@dataclass(frozen=True, slots=True)
class PolicyServer:
    """A policy server that listens."""

    url: str
    models: Sequence[str]
    """What clients may name as `model`."""
    service: PolicyService
    http: HttpServer

    def drain(self, seconds: float) -> bool:
        """Accept no more calls, answer those that were accepted, and return whether all were within `seconds`."""
        return self.http.drain(seconds)


@contextmanager
def serve_policy(
    play: Play, name: str, binding: Binding, limits: Limits, record: Path | None = None
) -> Iterator[PolicyServer]:
    """Serve a team while the block runs; `record` is the folder of rewarded episodes, None to record nothing.

    Raises ConfigError when the port is taken or an extra is missing, OutputError for a folder that cannot be written.
    """
    if isinstance(play.engine, ServesCallers):
        play.engine.serve()
    with ExitStack() as closing:
        agents = Agents(play, closing.enter_context(EngineThread()))
        recorder = None
        if record is not None:
            file = EpisodeFile(record, play.team.names)
            closing.callback(file.close)
            recorder = Recorder(file, agents, limits.idle)
        service = PolicyService(name, agents, limits, int(time.time()), recorder)
        with HttpServer(binding, Application(binding, service.routes())) as http:
            yield PolicyServer(http.url, service.names, service, http)
