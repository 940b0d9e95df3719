"""The workflow `tool_use`: an agent acts, reads the result as a message with the role `tool`, and acts again until it has answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kapelle.environment import Environment
from kapelle.settings.base import Settings
from kapelle.team import Agent
from kapelle.types import Message
from kapelle.workflow import Scene, check_template, observation_prompt


class ToolUse(Settings):
    """A workflow in which all agents use tools and work on the question at the same time, independently of each other.

    Each agent acts until the environment has received its answer.

    An agent first reads its prompt, which contains the observation as `{question}`. Later observations are tool results, which the
    chat template of the model marks as tool results.
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
