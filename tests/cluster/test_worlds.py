"""Environment workers in actors: the same episodes, also after deaths."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import cast

import pytest
from tests.rollout.workers.test_same_episodes import assert_same
from tests.support.cluster import Cluster

from kapelle.cluster.actors import ActorConnection
from kapelle.cluster.worlds import HeldByActor, StateHost
from kapelle.environment import environment_class
from kapelle.settings.schema import Resources


def with_its_process(host: StateHost) -> None:
    held, host.held = host.held, None
    if held is not None:
        held.end()
        held.connection.close()
        held.close()


def check(cluster: Cluster, workers: int) -> None:
    connection = cast("ActorConnection", cluster)
    hold = partial(HeldByActor, connection, range(workers), Resources(), str(Path.cwd()))
    assert_same(environment_class("matrix")(), workers, hold)


def test_episodes_are_the_same() -> None:
    cluster = Cluster(on_end=with_its_process)
    check(cluster, 1)
    assert {method for _, method in cluster.asked} == {"begin", "send", "receive"}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["receive"])
def test_a_dead_actor_is_replaced_and_its_episodes_repeated(method: str) -> None:
    seen: list[str] = []

    def dies(number: int, request: str) -> bool:
        seen.append(request)
        return number == 0 and request == method and seen.count(request) > 3 * (method != "begin")

    cluster = Cluster(dies, with_its_process)
    check(cluster, 2)
    assert cluster.started >= 3
