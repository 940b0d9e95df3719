"""Programs with an `entry`: their packages are imported once, and each episode runs in a fork."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.services.policy.test_programs import echo
from tests.support.serving import Reciting, staged

from kapelle.environments.external import External
from kapelle.environments.programs.processes import ForkServer
from kapelle.errors import ConfigError
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.event_loop import run_async
from kapelle.types import Episode

MODELS = """
import os
from openai import AsyncOpenAI, OpenAI

client, waiting = OpenAI(max_retries=0), AsyncOpenAI(max_retries=0)   # clients of the module, as frameworks make them
state = []
"""
APP = """
import os, sys, time
from models import client, state, waiting

async def episode(task):
    late = "openai.resources.chat.completions" in sys.modules   # which OpenAI's client imports at its first call
    asked = [{"role": "user", "content": f"number {task['index']}"}]
    state.append(task["index"])
    said = await waiting.chat.completions.create(model="team/first", messages=asked)
    said = client.chat.completions.create(model="team/first", messages=asked)
    return {"reward": task["index"] / 8, "info": {
        "state": state, "task": os.environ["KAPELLE_TASK"], "seed": [task["seed"], int(os.environ["KAPELLE_SEED"])],
        "fork": os.getpid(), "imported": os.getppid(), "late": late,
    }}

def fails(task):
    client.chat.completions.create(model="team/first", messages=[{"role": "user", "content": "x"}])
    if task["index"] == 0:
        raise ValueError("no such node")
    if task["index"] == 1:
        os._exit(7)
    if task["index"] == 2:
        return ["a list"]
    if task["index"] == 3:
        return 2.0
    if task["index"] == 4:
        return None
    return 0.5

def silent(task):
    return 0.5

def kills(task):
    client.chat.completions.create(model="team/first", messages=[{"role": "user", "content": "x"}])
    if task["index"] == 0:
        os.kill(os.getppid(), 9)
        time.sleep(600)
    return 0.5

def waits(task):
    with open(task["pipe"], "w") as pipe:
        pipe.write(f"{os.getpid()} {os.getppid()}")
    time.sleep(600)
"""
RUN = """
import asyncio, sys
from kapelle.environments.programs.processes import ForkServer

async def main(forks):
    program = await forks.start(variables, {"pipe": sys.argv[2]})
    await asyncio.sleep(600)

variables = {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_API_KEY": "none"}
with ForkServer(sys.executable, sys.argv[1], variables) as forks:
    asyncio.run(main(forks))
"""


@pytest.fixture
def app(tmp_path: Path) -> str:
    (tmp_path / "models.py").write_text(MODELS, "utf-8")
    (tmp_path / "app.py").write_text(APP, "utf-8")
    return str(tmp_path / "app.py")


def errors(episodes: list[Episode]) -> dict[int, str | None]:
    return {int(episode.task.data["index"]): episode.error for episode in episodes}


def test_each_episode_has_its_own_modules_variables_and_clients(setup: RolloutSetup, app: str) -> None:
    with staged(setup, Reciting(echo), 8, entry=f"{app}:episode", programs=4) as stage:
        pass
    assert errors(stage.episodes) == dict.fromkeys(range(8))
    for episode in stage.episodes:
        index = episode.task.data["index"]
        assert [turn.text for turn in episode.turns] == [f"to number {index}"] * 2
        assert dict(episode.rewards) == {"first": index / 8}
        assert (episode.info["state"], episode.info["task"]) == ([index], episode.task.id)
        assert episode.info["seed"] == [episode.seed, episode.seed]
    assert len({episode.info["fork"] for episode in stage.episodes}) == 8
    assert len({episode.info["imported"] for episode in stage.episodes}) == 1
    assert sum(bool(episode.info["late"]) for episode in stage.episodes) >= 4, "the last four forks have it"


def test_a_failure_is_that_of_one_episode(setup: RolloutSetup, app: str) -> None:
    with staged(setup, Reciting(echo), 6, entry=f"{app}:fails") as stage:
        pass
    found = errors(stage.episodes)
    assert "code 1 and posted no reward: ValueError: no such node. Its output: Traceback" in str(found[0])
    assert "^" not in str(found[0]), "the lines of a traceback that mark columns say nothing on one line"
    assert "code 7 and posted no reward" in str(found[1])
    assert "returned list. Return a reward" in str(found[2])
    assert "`reward` is 2, which is outside the range [0, 1]" in str(found[3])
    assert "Its output: The program's function returned None." in str(found[4])
    assert found[5] is None


def test_a_reward_that_is_rejected_fails_its_episode_even_after_an_answer_that_was_cut(
    setup: RolloutSetup, app: str
) -> None:
    """The function itself is wrong, so that the least reward would hide its fault."""
    with staged(setup, Reciting(echo, is_cut=lambda _: True), 5, entry=f"{app}:fails") as stage:
        pass
    found = errors(stage.episodes)
    assert "returned no valid reward: The program's function returned list" in str(found[2])
    assert "returned no valid reward: The reward was rejected: `reward` is 2" in str(found[3])
    assert (found[0], found[1], found[4]) == (None, None, None), "these may have ended because of the answer"


def test_a_reward_before_the_first_call_of_an_agent_is_rejected_with_the_reason(
    setup: RolloutSetup, app: str
) -> None:
    with staged(setup, Reciting(echo), entry=f"{app}:silent") as stage:
        pass
    assert "A session begins with the first call of an agent." in str(stage.episodes[0].error)


def test_only_running_episodes_fail_with_the_process_of_the_imports(setup: RolloutSetup, app: str) -> None:
    with staged(setup, Reciting(echo), 3, entry=f"{app}:kills", programs=1) as stage:
        pass
    found = errors(stage.episodes)
    assert "lost the process from which it was forked" in str(found.pop(0))
    assert found == {1: None, 2: None}


def test_a_fork_ends_when_its_episode_is_given_up(app: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    variables = {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_API_KEY": "none"}

    async def give_up(forks: ForkServer) -> None:
        program = await forks.start(variables, {"pipe": str(pipe)})
        fork, _ = (await asyncio.to_thread(pipe.read_text)).split()
        watched = os.pidfd_open(int(fork))
        await program.end()
        assert select.select([watched], [], [], 60.0)[0], "it goes on"
        os.close(watched)

    with ForkServer(sys.executable, f"{app}:waits", variables) as forks:
        run_async(lambda: give_up(forks))


def test_forks_end_after_kill_9_of_kapelle(app: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    run = subprocess.Popen([sys.executable, "-c", RUN, f"{app}:waits", str(pipe)])
    watched = [os.pidfd_open(int(number)) for number in pipe.read_text().split()]
    run.kill()
    run.wait()
    for each in watched:
        assert select.select([each], [], [], 60.0)[0], "a process goes on"
        os.close(each)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"entry": "app.py"}, "does not name a function"),
        ({"entry": "none.py:episode"}, "the file 'none.py' does not exist"),
        ({"entry": "app:episode", "command": ["python"]}, "Remove one of them"),
        ({"python": "python3"}, "Set both, or remove"),
    ],
)
def test_wrong_entries_are_reported_before_a_model_loads(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        External.model_validate(settings).check(["first"])


def test_a_failed_import_is_reported_before_the_first_episode(setup: RolloutSetup, tmp_path: Path) -> None:
    file = tmp_path / "app.py"
    file.write_text("import no_such_package", "utf-8")
    with (
        pytest.raises(
            ConfigError, match="cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"
        ),
        staged(setup, Reciting(echo), entry=f"{file}:episode"),
    ):
        pass
