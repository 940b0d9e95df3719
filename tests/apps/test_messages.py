"""Anthropic's client, as it is published, calls a server."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import httpx
import pytest
from tests.support.serving import Reciting

from kapelle.engines.rollout.protocol import Request
from kapelle.environments import Arithmetic
from kapelle.rollout.setup import RolloutSetup
from kapelle.services.binding import Binding
from kapelle.services.policy.recording import read_recorded
from kapelle.services.policy.service import ServingLimits, serve_policy
from kapelle.team import Agent, Policy, Team
from kapelle.workflows import Solo

PYTHON = os.environ.get("KAPELLE_APPS_PYTHON", "")
"""The interpreter of an environment in which `requirements.txt` is installed."""
TOKEN = "0123456789abcdef-of-a-test"  # noqa: S105 - of this test
CALL = '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
pytestmark = pytest.mark.apps


def test_anthropics_client_runs_unchanged(tmp_path: Path) -> None:
    """Whole and streamed messages, its loop over tools, counts of tokens and errors; the recording has the exact tokens."""
    if not PYTHON:
        pytest.skip(
            "needs KAPELLE_APPS_PYTHON, an interpreter with tests/apps/requirements.txt: make test-apps"
        )

    def say(request: Request) -> str:
        return "It is 3." if request.messages[-1].role == "tool" else CALL

    team = Team((Agent("first"),), {"first": Policy("first", base="", trained=False)}, {"first": "first"})
    setup = RolloutSetup(team, Arithmetic(), Solo(), Reciting(say))
    with serve_policy(setup, "duo", Binding(token=TOKEN), ServingLimits(), tmp_path) as server:
        variables = {
            "ANTHROPIC_BASE_URL": f"{server.url}/sessions/s-1",
            "ANTHROPIC_API_KEY": TOKEN,
            "PATH": os.environ["PATH"],
        }
        done = subprocess.run(
            [PYTHON, str(Path(__file__).with_name("anthropic_calls.py"))],
            env=variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        httpx.post(
            f"{server.url}/v1/sessions/s-1/reward", json={"reward": 1.0}, headers={"x-api-key": TOKEN}
        ).raise_for_status()
    [episode] = read_recorded(tmp_path)
    after_tools = [turn for turn in episode.turns if turn.new_messages[-1].role == "tool"]
    assert len(after_tools) == 3
    for turn in after_tools:
        begun = [each for each in episode.turns if turn.prompt_ids[: len(each.prompt_ids)] == each.prompt_ids]
        assert any(
            turn.prompt_ids[: len(each.prompt_ids + each.completion_ids)]
            == each.prompt_ids + each.completion_ids
            for each in begun
            if each is not turn
        )
        assert [message.role for message in turn.new_messages] == ["tool"]
