"""The reward server as a whole: a scorer's thread, the routes over HTTP and gRPC, and their ports.

with serve_reward(scorer, Binding(), RewardLimits()) as server:
    print(server.url)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kapelle.services.binding import Binding
from kapelle.services.http.application import MOST_BYTES, Application
from kapelle.services.http.server import HttpServer
from kapelle.services.reward.scores import Scorer
from kapelle.services.reward.service import Batches, RewardService
from kapelle.types import Json

if TYPE_CHECKING:
    from kapelle.services.grpc.server import GrpcServer


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
    grpc: GrpcServer | None

    def drain(self, seconds: float) -> bool:
        """Accept no more calls, answer those that were accepted, and return whether all were within `seconds`."""
        servers = [each for each in (self.http, self.grpc) if each is not None]
        with ThreadPoolExecutor(len(servers)) as both:
            return all(list(both.map(lambda server: server.drain(seconds), servers)))


@contextmanager
def serve_reward(
    scorer: Scorer, binding: Binding, limits: RewardLimits, grpc_port: int | None = None
) -> Iterator[RewardServer]:
    """Serve a scorer while the block runs, over gRPC too where it is given a port (0 takes a free one).

    Raises ConfigError when a port is taken or an extra is missing.
    """
    with ExitStack() as closing:
        batches = closing.enter_context(Batches(scorer.score, limits.batch, limits.answers))
        about = scorer.about()
        service = RewardService(about, batches, limits.seconds)
        http = closing.enter_context(HttpServer(binding, Application(binding, service.routes())))
        grpc = None
        if grpc_port is not None:
            beside = replace(binding, port=grpc_port)
            grpc = closing.enter_context(_grpc(beside, about, batches, limits.seconds))
        yield RewardServer(http.url, service, http, grpc)


def _grpc(binding: Binding, about: Mapping[str, Json], batches: Batches, seconds: float) -> GrpcServer:
    from kapelle.services.grpc.installed import check_installed

    check_installed()
    from kapelle.services.grpc.server import Caps, GrpcServer
    from kapelle.services.reward.grpc_service import GrpcReward

    return GrpcServer(binding, [GrpcReward(about, batches, seconds)], Caps(message_bytes=MOST_BYTES))
