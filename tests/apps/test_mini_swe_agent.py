"""mini-swe-agent, as it is published, works on a task folder in the sandbox."""

from __future__ import annotations

import json
import os

import pytest
from tests.support.serving import Reciting

from kapelle.engines.rollout.protocol import Request
from kapelle.environments.task_folders.coding_agent import CodingAgent
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.event_loop import run_async
from kapelle.team import Agent, Policy, Team
from kapelle.workflows.external import ExternalWorkflow

FOLDER = os.environ.get("KAPELLE_MINI_SWE_AGENT", "")
"""A virtual environment with mini-swe-agent that every user of this machine can read, of an interpreter below /usr."""
pytestmark = [pytest.mark.apps, pytest.mark.usefixtures("sandbox")]


def called(command: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


COMMANDS = ("ls", "echo hello > greeting.txt", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


def test_its_calls_become_turns_and_the_tests_pay() -> None:
    if not FOLDER:
        pytest.skip(
            "needs KAPELLE_MINI_SWE_AGENT: /usr/bin/python3 -m venv DIR && DIR/bin/pip install mini-swe-agent"
        )

    def say(request: Request) -> str:
        return called(COMMANDS[sum(message.role == "assistant" for message in request.messages)])

    environment = CodingAgent.model_validate(
        {
            "path": "examples/task_folders/greeting",
            "test_path": "examples/task_folders/mean",
            "command": [
                *(f"{FOLDER}/bin/python", "-m", "minisweagent.run.mini", "-m", "openai/{model}"),
                *("-t", "{instruction}", "-y", "--exit-immediately", "-l", "0"),
            ],
            "visible": [FOLDER],
            "env": {
                "MSWEA_CONFIGURED": "true",
                "MSWEA_COST_TRACKING": "ignore_errors",
                "LITELLM_LOCAL_MODEL_COST_MAP": "true",
            },
            "memory_mb": 4096,
            "time_limit": 120.0,
        }
    )
    environment.check(["coder"])
    policy = Policy("coder", base="", trained=False)
    team = Team((Agent("coder"),), {"coder": policy}, {"coder": "coder"})
    outside = RolloutSetup(team, environment, ExternalWorkflow(), Reciting(say))
    with environment.serve(outside, lambda _name, _line: None):
        [group] = run_async(lambda: rollout(outside, [environment.task("train", 0)], 1, 0))
    [episode] = group.episodes
    assert episode.error is None
    assert [turn.text for turn in episode.turns] == [called(command) for command in COMMANDS]
    assert episode.rewards == {"coder": 1.0}
