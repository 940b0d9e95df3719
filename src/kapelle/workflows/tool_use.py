"""An agent acts, reads what came of it as a message of the role `tool`, and acts again, until it has answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kapelle.environment import Environment
from kapelle.settings.base import Settings
from kapelle.team import Agent
from kapelle.types import Message
from kapelle.workflow import Scene, check_template, fill


class ToolUse(Settings):
    """Every agent works at the question by itself, all at once; the environment knows who has not answered yet.

    The first thing that an agent reads is its prompt, with `{question}` for what the world shows it. All that
    it reads later are results, which its model's own template marks as such.
    """

    name: Literal["tool_use"] = "tool_use"

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError when a prompt uses anything but `{question}`."""
        for agent in agents:
            check_template(agent, ["question"], "the workflow `tool_use`")

    async def run(self, scene: Scene) -> None:
        """Play one episode."""
        begun: set[str] = set()
        while movers := scene.movers():
            words: dict[str, Sequence[Message | str]] = {}
            for name in movers:
                shown = scene.observe(name)
                prompt = scene[name].agent.prompt or "{question}"
                words[name] = [Message("tool", shown) if name in begun else fill(prompt, {"question": shown})]
            begun.update(movers)
            turns = await scene.together(words)
            await scene.step({name: turn.text for name, turn in turns.items()})
