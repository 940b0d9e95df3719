"""One agent reads the question and answers or hands over to another by name, who may hand over in turn."""

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
    """The first seat, or the one that is named, has the floor first; who answers speaks for the team.

    A text hands over when it names another agent behind an `@`, and only one; any other text is an answer.
    Prompts may use `{question}`, `{agents}` (the other agents' names behind `@`) and `{message}`, the text
    that handed over, which is empty for who begins. Without a prompt an agent reads the question and that
    text. Only who answers is scored.
    """

    name: Literal["router"] = "router"
    first: str | None = None
    """Who has the floor first; null takes the first seat."""
    handovers: int = Field(default=1, ge=1)
    """How often the floor may change hands; after that a text is an answer whatever it names."""

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError for a game, one agent alone, an unknown agent or field."""
        need_answers("router", "ends in one answer", environment)
        need_two("`workflow.name: router` hands over", agents)
        need_known("workflow.first", "agent", self.first, [agent.name for agent in agents])
        check_names(agents, ["question", "agents", "message"])
        for agent in agents:
            check_template(agent, ["question", "agents", "message"], "the workflow `router`")

    async def run(self, scene: Scene) -> None:
        """Play one episode."""
        speaker = self.first or scene.names[0]
        handed: dict[str, str] = {}
        for left in range(self.handovers, -1, -1):
            text = (await scene[speaker].say(_prompt(scene, speaker, handed))).text
            chosen = addressee(text, speaker, scene.names) if left else None
            if chosen is None:
                await scene.step({speaker: text}, final=text)
                return
            handed, speaker = {speaker: text}, chosen

    def mermaid(self, names: Sequence[str]) -> str:
        """Return who may hand over to whom as a Mermaid flowchart."""
        first = self.first or names[0]
        readers = {name: tuple(o for o in names if o != name) for name in names}
        if self.handovers == 1:
            readers = {name: () if name == first else (first,) for name in names}
        return mermaid(readers, {first: f"first: {first}"})


def addressee(text: str, speaker: str, names: Sequence[str]) -> str | None:
    """Return the one other agent that a text names behind `@`; None when it names none, or several."""
    named = {name for name in _MARK.findall(text) if name in names and name != speaker}
    return named.pop() if len(named) == 1 else None


def _prompt(scene: Scene, name: str, handed: dict[str, str]) -> str:
    question, template = scene.observe(name), scene[name].agent.prompt
    if template is None:
        return append_texts(question, handed)
    others = ", ".join(f"@{other}" for other in scene.names if other != name)
    return fill(
        template, {"question": question, "agents": others, "message": next(iter(handed.values()), "")}
    )
