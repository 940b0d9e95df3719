"""The workflow `play`: a game in which the environment decides which agents move, until the game ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from kapelle.environment import Environment, has_comparable_answers
from kapelle.errors import ConfigError
from kapelle.settings.base import Settings
from kapelle.team import Agent
from kapelle.workflow import Scene, check_template, observation_prompt


class PlayWorkflow(Settings):
    """A workflow for games: each agent whose turn it is reads its observation and writes a move. Several agents can move at the same time.

    The prompt of an agent contains the current observation as `{question}`. Agents that have left the game do not act.
    """

    name: Literal["play"] = "play"
    memory: Literal["observation", "conversation"] = "observation"
    """Context of each move: only the current observation (`observation`) or the agent's whole conversation (`conversation`)."""
    max_rounds: int | None = Field(default=None, ge=1)
    """Maximum number of rounds, after which the game is truncated. With null, there is no limit."""

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError if the environment consists of questions, or if a prompt uses a field other than `{question}`."""
        if has_comparable_answers(environment):
            raise ConfigError(
                f"`workflow.name: play` supports games, but the tasks of `{environment.name}` are questions. Set "
                "`workflow.name: solo`, `parallel` or `debate`."
            )
        for agent in agents:
            check_template(agent, ["question"], "the workflow `play`")

    async def run(self, scene: Scene) -> None:
        """Run one episode."""
        rounds = 0
        while (movers := scene.movers()) and rounds != self.max_rounds:
            prompts = {name: [observation_prompt(scene, name)] for name in movers}
            turns = await scene.together(prompts, fresh=self.memory == "observation")
            await scene.step({name: turn.text for name, turn in turns.items()})
            rounds += 1
