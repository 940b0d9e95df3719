"""The reward server as a whole: a scorer's thread, the routes, and the port.

with serve_reward(scorer, Binding(), RewardLimits()) as server:
    print(server.url)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kapelle.services.binding import Binding
from kapelle.services.http.application import Application
from kapelle.services.http.server import HttpServer
from kapelle.services.reward.batches import Batches
from kapelle.services.reward.scores import Scorer
from kapelle.services.reward.service import RewardService


@dataclass(frozen=True, slots=True)
class RewardLimits:
    """What a reward server takes on."""

    answers: int = 8192
    """Answers held at once, waiting and under way; callers with more are told to come again (429)."""
    batch: int = 64
    """Answers that are scored together."""
    seconds: float = 600.0
    """For which one call may take, its time in the queue included."""


@dataclass(frozen=True, slots=True)
class RewardServer:
    """A reward server that listens."""

    url: str
    service: RewardService
    http: HttpServer

    def drain(self, seconds: float) -> bool:
        """Accept no more calls, answer those that were accepted, and return whether all were within `seconds`."""
        return self.http.drain(seconds)


@contextmanager
def serve_reward(scorer: Scorer, binding: Binding, limits: RewardLimits) -> Iterator[RewardServer]:
    """Serve a scorer while the block runs; raises ConfigError when the port is taken or an extra is missing."""
    with Batches(scorer.score, limits.batch, limits.answers) as batches:
        service = RewardService(scorer.about(), batches, limits.seconds)
        with HttpServer(binding, Application(binding, service.routes())) as http:
            yield RewardServer(http.url, service, http)
