"""Everyone who may move speaks at once, round after round, until the world is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kapelle.environment import Environment
from kapelle.settings.base import Settings
from kapelle.team import Agent
from kapelle.workflow import Scene, check_template, fill


class Parallel(Settings):
    """The plain loop of a game: observe, move, be paid. On questions every agent answers for itself.

    An agent's prompt frames each observation, with `{question}` for what the world shows it. Nobody sees
    what another says in the same round.
    """

    name: Literal["parallel"] = "parallel"

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError when a prompt uses anything but `{question}`."""
        for agent in agents:
            check_template(agent, ["question"], "the workflow `parallel`")

    async def run(self, scene: Scene) -> None:
        """Play one episode."""
        while movers := scene.movers():
            words = {
                name: [fill(scene[name].agent.prompt or "{question}", {"question": scene.observe(name)})]
                for name in movers
            }
            turns = await scene.together(words)
            await scene.step({name: turn.text for name, turn in turns.items()})
