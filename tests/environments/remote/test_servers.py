"""Servers that fail, return, disagree or reject a run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("websockets")

from tests.rollout.workers.test_same_episodes import play_of
from tests.services.environments.conftest import eventually
from tests.support.tiny import sections
from tests.support.tls import certificate_here

from kapelle.environment import Environment, environment_class, on_environment_change, task_of
from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.remote import Remote
from kapelle.errors import ConfigError, EngineError
from kapelle.rollout.episodes import rollout
from kapelle.runtime.event_loop import run_async
from kapelle.services.binding import Binding
from kapelle.services.environments.host import SessionLimits
from kapelle.services.environments.service import EnvironmentServer, serve_environments
from kapelle.setup.preparation import connect
from kapelle.training.trainer import Trainer
from kapelle.types import Group
from kapelle.workflow import workflow_class

TOKEN = "the-right-token-0123456789"  # noqa: S105
FAR = 120.0


def serve(environment: Environment, port: int = 0, **given: Any) -> Any:
    return serve_environments({"it": environment}, Binding(port=port), **given)


def debate() -> Any:
    return environment_class("debate_topics")(sides=("A", "B"))


def play(environment: Environment, samples: int = 4) -> list[Group]:
    workflow: Any = workflow_class("debate")(name="debate")
    tasks = [task_of(environment, "train", k) for k in range(4)]
    played = play_of(environment, workflow, ("ann", "ben"))
    return run_async(lambda: asyncio.wait_for(rollout(played, tasks, samples, 3), FAR))


@contextmanager
def dying_after(
    server: EnvironmentServer, sessions: int, then: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Stop a server abruptly when so many sessions are open, and call `then`."""

    def die() -> None:
        eventually(lambda: len(server.host.sessions) >= sessions)
        server.http.close()
        then()

    dying = threading.Thread(target=die)
    dying.start()
    yield
    dying.join()


def test_episodes_of_a_failed_server_restart_on_another() -> None:
    here = play(debate())
    with serve(debate()) as one, serve(debate()) as other:
        remote = Remote(address=(one.address, other.address))
        connect(remote)
        with dying_after(one, 3):
            assert play(remote) == here
        assert len(other.host.sessions) == 0


def test_a_server_that_returns_is_used_again() -> None:
    here = play(debate())
    with ExitStack() as closing, serve(debate()) as first:
        remote = Remote(address=(first.address,))
        connect(remote)
        port = first.http.port

        def come_back() -> None:
            closing.enter_context(serve(debate(), port=port))

        with dying_after(first, 3, come_back):
            assert play(remote) == here


def test_another_server_takes_what_a_full_one_rejects() -> None:
    here = play(debate())
    with serve(debate(), limits=SessionLimits(sessions=1)) as small, serve(debate()) as large:
        remote = Remote(address=(small.address, large.address))
        connect(remote)
        assert play(remote) == here


def test_a_run_stops_if_no_server_answers() -> None:
    with pytest.raises(EngineError, match=r"0\.1 s \(127"):
        connect(Remote(address=("127.0.0.1:1",), retry_seconds=0.1))
    with serve(debate()) as server:
        remote = Remote(address=(server.address,), retry_seconds=0.3)
        connect(remote)
        task = task_of(remote, "train", 0)
        server.http.close()
        played = play_of(remote, workflow_class("debate")(name="debate"), ("ann", "ben"))
        with pytest.raises(EngineError, match="No environment server"):
            run_async(lambda: rollout(played, [task], 1, 0))


def test_servers_with_different_environments_are_rejected() -> None:
    with serve(Arithmetic(digits=2)) as one, serve(Arithmetic(digits=3)) as other:
        with pytest.raises(ConfigError, match="the same 'it'"):
            connect(Remote(address=(one.address, other.address)))
        with pytest.raises(ConfigError, match="sums"):
            connect(Remote(address=(one.address,), serves="sums"))


def test_another_version_is_reported_once() -> None:
    reports: list[str] = []
    with on_environment_change(reports.append), serve(Arithmetic(seed=1)) as server:
        remote = Remote(address=(server.address,))
        connect(remote)
        before = remote.contents()
        task = remote.task("train", 0)
        workflow: Any = workflow_class("solo")(name="solo")
        run_async(lambda: rollout(play_of(remote, workflow, ("ann",)), [task], 2, 0))
        assert reports == []
        server.host.registry.put("it", Arithmetic(seed=2))
        run_async(lambda: rollout(play_of(remote, workflow, ("ann",)), [task], 2, 0))
        assert [each.split("; ")[0] for each in reports] == [
            f"environment 'it' at {server.address} has changed from version 1 to version 2"
        ]
        assert remote.contents() != before


def test_a_part_of_a_mixture_may_be_remote() -> None:
    def mixed(part: Any) -> Any:
        parts = {"far": {"environment": part}, "near": {"environment": {"name": "multi_step"}}}
        made = environment_class("mixture")(parts=parts)
        connect(made)
        return made

    workflow: Any = workflow_class("solo")(name="solo")
    with serve(Arithmetic()) as server:
        found = []
        for part in ({"name": "arithmetic"}, {"name": "remote", "address": server.address}):
            environment = mixed(part)
            environment.check(("ann",))
            tasks = [task_of(environment, "train", k) for k in range(6)]
            played = play_of(environment, workflow, ("ann",))
            found.append(run_async(partial(rollout, played, tasks, 2, 1)))
    assert found[0] == found[1]
    assert {group.task.part for group in found[0]} == {"far", "near"}


@pytest.mark.parametrize("address", ["", "localhost", "localhost:0", "localhost:99999", "http://localhost:1"])
def test_an_invalid_address_is_rejected(address: str) -> None:
    with pytest.raises(ValueError, match="not a host and port"):
        Remote(address=(address,))


def test_other_machines_require_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KAPELLE_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="KAPELLE_TOKEN"):
        connect(Remote(address=("trainer.example:50051",)))


def test_a_token_and_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = certificate_here(tmp_path)
    binding = Binding("localhost", token=TOKEN, certificate=certificate, key=key)
    with serve_environments({"it": Arithmetic()}, binding) as server:
        remote = Remote(
            address=(server.address,),
            certificate=str(certificate),
            token_env="SECRET",  # noqa: S106
        )
        for wrong in ("", "another-token-0123456789"):
            monkeypatch.setenv("SECRET", wrong)
            with pytest.raises(ConfigError, match="token is missing or incorrect"):
                connect(remote)
        monkeypatch.setenv("SECRET", TOKEN)
        connect(remote)
        assert remote.task("train", 0) == Arithmetic().task("train", 0)
        assert TOKEN not in str(remote.model_dump()) + repr(remote)


@pytest.mark.slow
def test_a_server_may_use_several_processes() -> None:
    here = play(debate())
    with serve(debate(), processes=2) as server:
        remote = Remote(address=(server.address,))
        connect(remote)
        assert play(remote) == here


@pytest.mark.long
@pytest.mark.slow
def test_an_episode_that_kills_its_process_is_repeated_a_few_times(tmp_path: Path) -> None:
    deadly: Any = environment_class("tests.support.deadly:Deadly")
    here = play(deadly(way="none"), samples=1)
    with serve(deadly(times=99, folder=str(tmp_path)), processes=1) as server:
        remote = Remote(address=(server.address,))
        connect(remote)
        there = play(remote, samples=1)
    deaths = [each for group in there for each in group.episodes if each.error]
    fatal = [each.seed for group in there for each in group.episodes if each.seed % 3 == 0]
    assert fatal, "some world is deadly"
    assert [each.seed for each in deaths] == fatal
    assert all("while its environment was computing" in (each.error or "") for each in deaths)
    unharmed = [each for group in there for each in group.episodes if not each.error]
    assert unharmed == [each for group in here for each in group.episodes if each.seed not in fatal]


def test_environment_workers_are_rejected() -> None:
    with serve(Arithmetic()) as server:
        far = {"name": "remote", "address": server.address}
        with pytest.raises(ConfigError, match="servers"):
            Trainer(**sections(environment=far, episode={"environment_workers": 1}))
