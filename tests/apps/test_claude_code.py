"""Claude Code, as it is published, works on a task folder in the sandbox by Anthropic's API."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.support.serving import Reciting

from kapelle.engines.rollout.protocol import Request
from kapelle.environments.task_folders.coding_agent import CodingAgent
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.event_loop import run_async
from kapelle.team import Agent, Policy, Team
from kapelle.workflows.external import ExternalWorkflow

PROGRAM = os.environ.get("KAPELLE_CLAUDE_CODE", "")
"""The program `claude` of the npm package `@anthropic-ai/claude-code-linux-x64`, which every user of this machine can read."""
pytestmark = [pytest.mark.apps, pytest.mark.usefixtures("sandbox")]
CALL = {"name": "Bash", "arguments": {"command": "echo hello > greeting.txt", "description": "Write it"}}
ANSWERS = (f"I write it.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>", "It is written.")


def test_its_calls_become_turns_and_the_tests_reward_them() -> None:
    if not PROGRAM:
        pytest.skip(
            "needs KAPELLE_CLAUDE_CODE, the program of `npm install @anthropic-ai/claude-code-linux-x64`"
        )

    def say(request: Request) -> str:
        return ANSWERS[min(1, sum(message.role == "assistant" for message in request.messages))]

    environment = CodingAgent.model_validate(
        {
            "path": "examples/task_folders/greeting",
            "test_path": "examples/task_folders/mean",
            "command": [PROGRAM, "-p", "{instruction}", "--model", "{model}", "--allowedTools", "Bash"],
            "visible": [str(Path(PROGRAM).parent)],
            "env": {
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "ENABLE_TOOL_SEARCH": "false",
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": "team/coder",
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
    assert [turn.text for turn in episode.turns] == list(ANSWERS), episode.info
    first, second = episode.turns
    past = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(past)] == past
    assert "restarts" not in episode.info
    assert episode.rewards == {"coder": 1.0}
