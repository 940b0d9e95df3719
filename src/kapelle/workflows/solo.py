"""The workflow `solo`: a single agent answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from kapelle.environment import Environment
from kapelle.errors import need_known
from kapelle.settings.base import Settings
from kapelle.team import Agent
from kapelle.workflow import CountsTurns, Drawable, Scene, check_template, need_answers, observation_prompt
from kapelle.workflows.graph import mermaid


class Solo(Settings, Drawable, CountsTurns):
    """A workflow in which one agent reads the question and answers. All other agents do not act."""

    name: Literal["solo"] = "solo"
    agent: str | None = None
    """Name of the agent that answers. If null, the first agent of the team answers."""

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError if the environment is a game, if the agent is unknown, or if its prompt uses an unknown field."""
        need_answers("solo", "ends in one answer", environment)
        names = [agent.name for agent in agents]
        need_known("workflow.agent", "agent", self.agent, names)
        chosen = next(agent for agent in agents if agent.name == (self.agent or names[0]))
        check_template(chosen, ["question"], "the workflow `solo`")

    def most_turns(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return a maximum of one turn for the agent that answers, and zero turns for all other agents."""
        return {name: int(name == (self.agent or names[0])) for name in names}

    async def run(self, scene: Scene) -> None:
        """Run one episode."""
        name = self.agent or scene.names[0]
        turn = await scene[name].say(observation_prompt(scene, name))
        await scene.step({name: turn.text}, final=turn.text)

    def mermaid(self, names: Sequence[str]) -> str:
        """Return the agent that answers as a Mermaid flowchart."""
        name = self.agent or names[0]
        return mermaid({name: ()}, {}, name)
