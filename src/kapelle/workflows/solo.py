"""One agent answers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from kapelle.environment import Environment
from kapelle.errors import need_known
from kapelle.settings.base import Settings
from kapelle.team import Agent
from kapelle.workflow import CountsTurns, Drawable, Scene, check_template, fill, need_answers
from kapelle.workflows.graph import mermaid


class Solo(Settings, Drawable, CountsTurns):
    """The first agent, or the one that is named, reads the question and answers; nobody else speaks."""

    name: Literal["solo"] = "solo"
    agent: str | None = None
    """Who answers; null takes the first seat."""

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError for a game, an unknown agent, or a prompt with an unknown field."""
        need_answers("solo", "asks for one answer", environment)
        names = [agent.name for agent in agents]
        need_known("workflow.agent", "agent", self.agent, names)
        speaker = next(agent for agent in agents if agent.name == (self.agent or names[0]))
        check_template(speaker, ["question"], "the workflow `solo`")

    def most_turns(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return one turn for the agent that answers, and none for the others."""
        return {name: int(name == (self.agent or names[0])) for name in names}

    async def run(self, scene: Scene) -> None:
        """Play one episode."""
        name = self.agent or scene.names[0]
        question = scene.observe(name)
        turn = await scene[name].say(fill(scene[name].agent.prompt or "{question}", {"question": question}))
        await scene.step({name: turn.text}, final=turn.text)

    def mermaid(self, names: Sequence[str]) -> str:
        """Return the one who answers as a Mermaid flowchart."""
        speaker = self.agent or names[0]
        return mermaid({speaker: ()}, {}, speaker)
