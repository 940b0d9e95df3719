"""Worker processes that die, stop or cannot begin: their episodes are played again, or say why not, and nothing hangs or stays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from tests.rollout.workers.test_same_episodes import FAR, play_of
from tests.support.deadly import Deadly, Rude
from tests.support.patience import grown_since
from tests.support.plugins import Digest, Echo
from tests.support.stuck import Stuck

from kapelle.engines.rollout.protocol import Completion, Request
from kapelle.environment import Environment
from kapelle.errors import EngineError
from kapelle.rollout.episodes import rollout
from kapelle.rollout.workers.pool import EnvironmentWorkers, HeldHere
from kapelle.runtime.deadlines import Patience
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.process_tree import is_stopped
from kapelle.types import Episode, Task
from kapelle.workflow import Workflow

TASKS = [Task(f"train-{k}", f"{k}?") for k in range(16)]
NAMES = ("ann", "ben")


def played(
    environment: Environment, pool: EnvironmentWorkers | None, tasks: Sequence[Task] = TASKS
) -> list[Episode]:
    setup = play_of(environment, cast("Workflow", Echo()), NAMES, workers=pool)
    groups = run_async(lambda: asyncio.wait_for(rollout(setup, tasks, 1, 5), FAR))
    return [episode for group in groups for episode in group.episodes]


def pool_for(environment: Any, size: int = 1, patience: float = FAR) -> EnvironmentWorkers:
    return EnvironmentWorkers(cast("Environment", environment), size, Patience(environment=patience))


@pytest.mark.slow
def test_whatever_an_environment_does_reads_the_same() -> None:
    rude = cast("Environment", Rude())
    with pool_for(rude) as pool:
        there = played(rude, pool)
    here = played(rude, None)
    assert sum(episode.error is not None for episode in here) >= 12, "it is rude indeed"
    for one, other in zip(there, here, strict=True):
        assert (one.task.id, one.error) == (other.task.id, other.error)
        assert repr(one) == repr(other)  # values that are no numbers do not equal themselves


@pytest.mark.slow
class TestDeath:
    @pytest.mark.parametrize(
        ("way", "place"), [("kill", "step"), pytest.param("exit", "start", marks=pytest.mark.long)]
    )
    def test_episodes_of_a_worker_that_dies_are_played_again(
        self, way: Any, place: Any, tmp_path: Path
    ) -> None:
        deadly = Deadly(way=way, place=place, one_in=5, folder=str(tmp_path))
        with pool_for(deadly) as pool:
            found = played(cast("Environment", deadly), pool)
        assert list(tmp_path.iterdir()), "some worlds have killed their process"
        assert found == played(cast("Environment", Deadly(way="none")), None)

    def test_what_was_sampled_is_not_sampled_again(self, tmp_path: Path) -> None:
        deadly = cast("Environment", Deadly(one_in=5, folder=str(tmp_path)))
        with pool_for(deadly) as pool:
            setup = play_of(deadly, cast("Workflow", Echo()), NAMES, workers=pool)
            asked: Counter[int] = Counter()
            generate = setup.engine.generate

            def counting(request: Request) -> Coroutine[Any, Any, Completion]:
                asked[request.seed] += 1
                return generate(request)

            setup.engine.generate = counting  # type: ignore[method-assign]
            run_async(lambda: asyncio.wait_for(rollout(setup, TASKS, 1, 5), FAR))
        assert list(tmp_path.iterdir())
        assert set(asked.values()) == {1}

    def test_one_that_always_kills_is_an_error_and_the_others_are_not(self, tmp_path: Path) -> None:
        deadly = Deadly(one_in=7, times=99, folder=str(tmp_path))
        with pool_for(deadly) as pool:
            found = played(cast("Environment", deadly), pool)
        killers = {int(path.name): path.stat().st_size for path in tmp_path.iterdir()}
        assert killers
        assert set(killers.values()) == {3}
        for episode in found:
            if episode.seed in killers:
                assert episode.error is not None
                assert "SIGKILL, 3 times while its environment was computing" in episode.error
            else:
                assert episode.error is None


@pytest.mark.slow
def test_a_call_that_takes_too_long_is_given_up_in_the_worker() -> None:
    stuck = Stuck(way="sleep", one_in=2)
    with pool_for(stuck, patience=1.0) as pool:
        found = played(cast("Environment", stuck), pool, TASKS[:4])
    assert {episode.error for episode in found if episode.seed % 2 == 0} == {
        "DeadlineExceeded: `step` of environment 'tests.support.stuck:Stuck' took more than 1 s (`environment.timeout`)."
    }
    assert {episode.error for episode in found if episode.seed % 2} == {None}


def open_descriptors() -> Counter[str]:
    kinds: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            kinds[str(link.readlink()).split(":")[0]] += 1
    return kinds


async def all_wait(pool: EnvironmentWorkers) -> None:
    """Wait until every world is in a call that does not end."""

    def waiting() -> int:
        return sum(len(worker.waiting) for worker in pool.workers if worker is not None)

    while waiting() < len(TASKS):  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)


@pytest.mark.slow
def test_nothing_stays_when_a_pool_is_closed_amid_play() -> None:
    run_async(lambda: asyncio.sleep(0))  # what the first event loop keeps
    before = open_descriptors()
    stuck = cast("Environment", Stuck(way="await"))
    pool = pool_for(stuck, 2)

    async def interrupted() -> None:
        setup = play_of(stuck, cast("Workflow", Echo()), NAMES, workers=pool)
        playing = asyncio.create_task(rollout(setup, TASKS, 1, 5))
        await all_wait(pool)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    run_async(lambda: asyncio.wait_for(interrupted(), FAR))
    workers = [
        held.process for worker in pool.workers if worker and isinstance(held := worker.holder, HeldHere)
    ]
    assert len(workers) == 2
    pool.close()
    assert [worker.poll() is not None for worker in workers] == [True, True]
    assert not grown_since(before, open_descriptors)


PLAYER = """
import asyncio, sys
from tests.rollout.workers.test_lost_workers import *
pool = pool_for(Stuck(way="await"), 2)
async def watch():
    playing = asyncio.create_task(rollout(play_of(Stuck(way="await"), Echo(), NAMES, workers=pool), TASKS, 1, 5))
    await all_wait(pool)
    print(*(worker.holder.pid for worker in pool.workers), flush=True)
    await playing
run_async(watch)
"""


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("stopped", [False, True])
def test_workers_end_with_a_player_that_is_killed(stopped: bool) -> None:
    player = subprocess.Popen(
        [sys.executable, "-c", PLAYER],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert player.stdout is not None
    workers = [int(word) for word in player.stdout.readline().split()]
    assert len(workers) == 2
    if stopped:
        os.kill(workers[0], signal.SIGSTOP)
        while not is_stopped(workers[0]):
            time.sleep(0.01)
    player.send_signal(signal.SIGKILL)
    player.wait()
    player.stdout.close()
    until = time.monotonic() + FAR
    while any(map(lives, workers)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(lives, workers))


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class TestRefused:
    @pytest.mark.slow
    def test_one_that_does_not_begin_stops_the_run(self) -> None:
        pool = pool_for(Digest())
        pool._begin = pool._begin.replace(b'"version":1', b'"version":9')
        with pool, pytest.raises(EngineError, match=r"could not start: .*version"):
            played(cast("Environment", Digest()), pool)
