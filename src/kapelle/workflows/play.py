"""A game: the environment decides who is to move, until it is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from kapelle.environment import Environment, asks_questions
from kapelle.errors import ConfigError
from kapelle.settings.base import Settings
from kapelle.team import Agent
from kapelle.workflow import Scene, check_template, fill


class PlayWorkflow(Settings):
    """Whoever is to move reads what it may see and writes a move; several at once where the game asks for it.

    An agent's prompt frames each observation, with `{question}` for what the world shows it. Agents that are
    out of the game are not asked again.
    """

    name: Literal["play"] = "play"
    memory: Literal["observation", "conversation"] = "observation"
    """What an agent reads for a move: what it sees now alone, or all that it has read and written before too."""
    max_rounds: int | None = Field(default=None, ge=1)
    """Most times that anybody is asked; a game that is not over by then is cut off. Null sets no limit."""

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError for questions instead of a game, or a prompt that uses anything but `{question}`."""
        if asks_questions(environment):
            raise ConfigError(
                f"`workflow.name: play` is for games of moves, and `{environment.name}` asks questions. "
                "Set `workflow.name: solo`, `parallel` or `debate`."
            )
        for agent in agents:
            check_template(agent, ["question"], "the workflow `play`")

    async def run(self, scene: Scene) -> None:
        """Play one episode."""
        rounds = 0
        while (movers := scene.movers()) and rounds != self.max_rounds:
            words = {
                name: [fill(scene[name].agent.prompt or "{question}", {"question": scene.observe(name)})]
                for name in movers
            }
            turns = await scene.together(words, fresh=self.memory == "observation")
            await scene.step({name: turn.text for name, turn in turns.items()})
            rounds += 1
