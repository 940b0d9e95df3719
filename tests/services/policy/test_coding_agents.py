"""A foreign coding agent runs in the sandbox, its calls become turns, and the tests of its task give the reward."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.serving import Reciting

from kapelle.algorithm import Data
from kapelle.engines.rollout.protocol import Request
from kapelle.environments.task_folders.coding_agent import CodingAgent
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.event_loop import run_async
from kapelle.types import Episode
from kapelle.workflows.external import ExternalWorkflow

AGENT = "examples/coding_agent/mini_agent.py"
TASKS = "examples/task_folders"
pytestmark = pytest.mark.usefixtures("sandbox")


def settings(program: str | None = None, tmp_path: Path | None = None, **more: Any) -> CodingAgent:
    """Return an environment with the example's agent, or another program."""
    file = AGENT
    if program is not None:
        assert tmp_path is not None
        (tmp_path / "program.py").write_text(program)
        file = str(tmp_path / "program.py")
    command = ["python3", f"/agent/{Path(file).name}", "{model}", "{instruction}"]
    return CodingAgent.model_validate(
        {
            "path": f"{TASKS}/greeting",
            "test_path": f"{TASKS}/mean",
            "command": command,
            "files": [file],
            "time_limit": 20.0,
            **more,
        }
    )


def played(
    setup: RolloutSetup, environment: CodingAgent, answers: Sequence[str], count: int = 1
) -> tuple[Reciting, list[Episode]]:
    """Roll out episodes of the first task with these answers in turn."""

    def say(request: Request) -> str:
        spoken = sum(message.role == "assistant" for message in request.messages)
        return answers[min(spoken, len(answers) - 1)]

    engine = Reciting(say)
    outside = replace(setup, environment=environment, workflow=ExternalWorkflow(), engine=engine, data=Data())
    environment.check(["first", "second"])
    with environment.serve(outside, lambda _name, _line: None):
        groups = run_async(lambda: rollout(outside, [environment.task("train", 0)], count, 0))
    return engine, [episode for group in groups for episode in group.episodes]


def test_an_unmodified_agent_works_in_the_sandbox_and_its_tests_give_the_reward(setup: RolloutSetup) -> None:
    engine, [good] = played(
        setup, settings(), ["```bash\necho hello > greeting.txt; cat greeting.txt\n```", "Done."]
    )
    assert good.error is None
    assert [turn.agent for turn in good.turns] == ["first", "first"], "the model's name is the first agent's"
    assert (good.rewards, good.success) == ({"first": 1.0}, 1.0)
    assert engine.asked[-1].messages[-1].content == "(exit code 0)\nhello\n"
    _, [idle] = played(setup, settings(), ["I am done."])
    assert (idle.error, idle.rewards, idle.success) == (None, {"first": 0.0}, 0.0)


PROBE = """
import json, os, socket, subprocess, sys, urllib.error, urllib.request
base = os.environ["OPENAI_BASE_URL"]
root = base.split("/sessions/")[0]
name = base.split("/")[-2]
def call(method, url, body=None, **headers):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **headers}, method=method)
    try:
        return urllib.request.urlopen(request, timeout=10).status
    except urllib.error.HTTPError as error:
        return error.code
said = {"messages": [{"role": "user", "content": "x"}], "model": sys.argv[1]}
found = {
    "its own reward": call("POST", base + "/reward", {"reward": 1.0}),
    "its reward elsewhere": call("POST", root + f"/v1/sessions/{name}/reward", {"reward": 1.0}),
    "another task": call("POST", root + "/v1/task", {}),
    "giving up": call("DELETE", root + f"/v1/sessions/{name}"),
    "metrics": call("GET", root + "/metrics"),
    "another session": call("POST", root + "/sessions/e-0000000000000000/v1/chat/completions", said),
    "a hidden path": call("POST", root + f"/sessions/{name}/v1/chat/completions/../../reward", {"reward": 1.0}),
    "its models": call("GET", base + "/models"),
    "a message": call("POST", os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", {**said, "max_tokens": 8}),
    "an answer": call("POST", base + "/chat/completions", said, **{"x-kapelle-session": "e-0000000000000000"}),
}
try:
    socket.create_connection(("1.1.1.1", 80), 2)
    found["the network"] = "reached"
except OSError:
    found["the network"] = "closed"
found["secrets"] = sorted(key for key in os.environ if "TOKEN" in key or "SECRET" in key)
print(json.dumps(found))
"""


def test_a_sandboxed_program_reaches_only_its_model(
    setup: RolloutSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAPELLE_TOKEN", "a token of the server that no program may learn")
    _, [episode] = played(setup, settings(PROBE, tmp_path), ["words"])
    assert episode.error is None
    assert json.loads(episode.info["said"]) == {
        "its own reward": 404,
        "its reward elsewhere": 404,
        "another task": 404,
        "giving up": 404,
        "metrics": 404,
        "another session": 410,
        "a hidden path": 404,
        "its models": 200,
        "a message": 200,
        "an answer": 200,
        "the network": "closed",
        "secrets": [],
    }
    assert episode.rewards == {"first": 0.0}


def test_a_late_agent_is_ended_and_its_work_is_graded(setup: RolloutSetup, tmp_path: Path) -> None:
    program = (
        f"{Path(AGENT).read_text()}\n    import time\n    print('now', flush=True)\n    time.sleep(600)\n"
    )
    made = settings(program, tmp_path, time_limit=1.0)
    _, [episode] = played(setup, made, ["```bash\necho hello > greeting.txt\n```", "Done."])
    assert (episode.error, episode.rewards) == (None, {"first": 1.0})
    assert "ended after 1 s" in str(episode.info["said"])


def test_an_agent_without_a_call_is_explained(setup: RolloutSetup, tmp_path: Path) -> None:
    _, [episode] = played(setup, settings("raise SystemExit('no key')", tmp_path), ["x"])
    assert episode.error is not None
    assert "no key" in episode.error


def test_an_abandoned_episode_ends_the_agent_and_its_sandbox(setup: RolloutSetup, tmp_path: Path) -> None:
    marker = f"given-up-{os.getpid()}"
    program = f"import subprocess, time\nsubprocess.Popen(['bash', '-c', 'exec -a {marker} sleep 300'])\ntime.sleep(300)\n"
    environment = settings(program, tmp_path)

    def running() -> bool:
        return subprocess.run(["pgrep", "-f", marker], check=False, capture_output=True).returncode == 0

    def until_running() -> None:
        while not running():
            time.sleep(0.05)

    async def give_up() -> None:
        world = environment.start(environment.task("train", 0), ["first", "second"], 0)
        waiting = asyncio.ensure_future(world.step({}))
        await asyncio.to_thread(until_running)
        waiting.cancel()
        await asyncio.wait((waiting,))
        await world.close()

    with environment.serve(replace(setup, environment=environment), lambda _name, _line: None):
        run_async(give_up)
    assert not running()
