"""Episodes on an environment server equal local episodes in every field."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("websockets")

from tests.environments.test_conformance import READY
from tests.rollout.workers.test_same_episodes import episodes

from kapelle.environment import Answerable, Environment, Mixed, Recorded, Scripted, environment_class, offers
from kapelle.environments.remote import Remote
from kapelle.services.binding import Binding
from kapelle.services.environments.service import serve_environments
from kapelle.setup.preparation import connect


def assert_same(environment: Environment, **settings: Any) -> None:
    here = episodes(environment, 0)
    with serve_environments({"it": environment}, Binding(), **settings) as server:
        remote = Remote(address=(server.address,), serves="it")
        connect(remote)
        for kind in (Answerable, Scripted, Recorded, Mixed):
            assert offers(remote, kind) is offers(environment, kind)
        there = episodes(remote, 0)
        assert len(server.host.sessions) == 0, "every session is closed"
    assert here, "some workflow fits"
    assert there == here


def test_a_game_is_the_same() -> None:
    assert_same(environment_class("matrix")())


@pytest.mark.sample(5)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["arithmetic", "debate_topics", "mixture", "tools", "tool_tasks"])
def test_a_built_in_environment_is_the_same(name: str) -> None:
    assert_same(environment_class(name)(**READY[name]))


@pytest.mark.slow
def test_openspiel_is_the_same() -> None:
    pytest.importorskip("pyspiel")
    assert_same(environment_class("openspiel")())
