"""Tool use: an agent acts, reads the result as a message with the role `tool`, and acts again until it has answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kapelle.environment import Environment
from kapelle.settings.base import Settings
from kapelle.team import Agent
from kapelle.types import Message
from kapelle.workflow import Scene, check_template, observation_prompt


class ToolUse(Settings):
    """All agents work on the question at the same time, each by itself, until the environment has received the agent's answer.

    An agent first reads its prompt, with its observation as `{question}`. Later observations are tool results, which its
    model's chat template marks as such.
    """

    name: Literal["tool_use"] = "tool_use"

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError if a prompt uses a field other than `{question}`."""
        for agent in agents:
            check_template(agent, ["question"], "the workflow `tool_use`")

    async def run(self, scene: Scene) -> None:
        """Run one episode."""
        started: set[str] = set()
        while movers := scene.movers():
            prompts: dict[str, Sequence[Message | str]] = {
                name: [Message("tool", scene.observe(name))]
                if name in started
                else [observation_prompt(scene, name)]
                for name in movers
            }
            started.update(movers)
            turns = await scene.together(prompts)
            await scene.step({name: turn.text for name, turn in turns.items()})
