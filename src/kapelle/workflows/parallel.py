"""The workflow `parallel`: in each round, all agents that may move act at the same time, until the episode ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kapelle.environment import Environment
from kapelle.settings.base import Settings
from kapelle.team import Agent
from kapelle.workflow import Scene, check_template, observation_prompt


class Parallel(Settings):
    """A workflow with the basic loop of a game: agents observe, act and receive rewards.

    If the task is a question, every agent answers it independently.

    The prompt of an agent contains the current observation as `{question}`. Agents do not read completions of the same round.
    """

    name: Literal["parallel"] = "parallel"

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError if a prompt uses a field other than `{question}`."""
        for agent in agents:
            check_template(agent, ["question"], "the workflow `parallel`")

    async def run(self, scene: Scene) -> None:
        """Run one episode."""
        while movers := scene.movers():
            turns = await scene.together({name: [observation_prompt(scene, name)] for name in movers})
            await scene.step({name: turn.text for name, turn in turns.items()})
