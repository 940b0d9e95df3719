"""The workflow `router`: an agent answers, or hands the question over to another agent by name, which can hand it over again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from kapelle.environment import Environment
from kapelle.errors import need_known
from kapelle.settings.base import Settings
from kapelle.team import Agent
from kapelle.workflow import (
    Drawable,
    Scene,
    append_texts,
    check_names,
    check_template,
    fill,
    need_answers,
    need_two,
)
from kapelle.workflows.graph import mermaid

_MARK = re.compile(r"(?<![\w@])@([A-Za-z_]\w*)")


class Router(Settings, Drawable):
    """A workflow in which each agent either answers or hands the question over to another agent.

    The answer of an agent is the team's answer.

    The first agent of the team starts, or the agent given by `first`. A message that contains the name of exactly one other agent
    after an `@` hands the question over to this agent. Any other message is an answer. Prompts can use `{question}`, `{agents}` (the
    names of the other agents with `@`) and `{message}` (the message that handed the question over, which is empty at the start). An
    agent without a prompt reads the question and this message. Only the agent that answers is scored.
    """

    name: Literal["router"] = "router"
    first: str | None = None
    """Name of the agent that starts. If null, the first agent of the team starts."""
    handovers: int = Field(default=1, ge=1)
    """Maximum number of handovers. After that, every message is an answer."""

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError if the environment is a game, if there is only one agent, or if an agent or a field is unknown."""
        need_answers("router", "ends in one answer", environment)
        need_two("`workflow.name: router` needs an agent to hand over to", agents)
        need_known("workflow.first", "agent", self.first, [agent.name for agent in agents])
        check_names(agents, ["question", "agents", "message"])
        for agent in agents:
            check_template(agent, ["question", "agents", "message"], "the workflow `router`")

    async def run(self, scene: Scene) -> None:
        """Run one episode."""
        agent = self.first or scene.names[0]
        message: dict[str, str] = {}
        for left in range(self.handovers, -1, -1):
            text = (await scene[agent].say(_prompt(scene, agent, message))).text
            chosen = addressee(text, agent, scene.names) if left else None
            if chosen is None:
                await scene.step({agent: text}, final=text)
                return
            message, agent = {agent: text}, chosen

    def mermaid(self, names: Sequence[str]) -> str:
        """Return the possible handovers as a Mermaid flowchart."""
        first = self.first or names[0]
        readers = {name: tuple(other for other in names if other != name) for name in names}
        if self.handovers == 1:
            readers = {name: () if name == first else (first,) for name in names}
        return mermaid(readers, {first: f"first: {first}"})


def addressee(text: str, speaker: str, names: Sequence[str]) -> str | None:
    """Return the other agent whose name follows an `@` in a message, or None if there is no such agent or more than one."""
    named = {name for name in _MARK.findall(text) if name in names and name != speaker}
    return named.pop() if len(named) == 1 else None


def _prompt(scene: Scene, name: str, message: dict[str, str]) -> str:
    question, template = scene.observe(name), scene[name].agent.prompt
    if template is None:
        return append_texts(question, message)
    others = ", ".join(f"@{other}" for other in scene.names if other != name)
    text = next(iter(message.values()), "")
    return fill(template, {"question": question, "agents": others, "message": text})
