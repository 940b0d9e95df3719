"""Agents speak one after another. Each reads what the earlier ones wrote, and the last one answers.

In a world with one seat (`OneSeat`: a conversation, a server's environment) the chain begins anew with each move.

A Reasoner that prepares and an Actor that answers, as in MARFT (2504.16129), are a chain of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kapelle.environment import Environment, OneSeat, offers
from kapelle.settings.base import Settings
from kapelle.team import Agent
from kapelle.workflow import (
    Drawable,
    Scene,
    append_texts,
    braced,
    check_names,
    check_template,
    fill,
    need_answers,
)
from kapelle.workflows.graph import mermaid


class Chain(Settings, Drawable):
    """Seat order is speaking order; only the last agent acts in the world and is scored by it.

    An agent's prompt may use `{question}` and the name of every earlier agent, such as `{reasoner}`, so
    it decides what the agent sees: one that leaves out `{question}` works from the others' words alone.
    Without a prompt an agent sees the question and all earlier texts.
    """

    name: Literal["chain"] = "chain"

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError for a game, or a prompt that uses a turn that its agent cannot have read."""
        if not offers(environment, OneSeat):
            need_answers("chain", "ends in one answer", environment)
        check_names(agents, ["question"])
        known = ["question"]
        for agent in agents:
            check_template(agent, known, f"the workflow `chain` at its place (it may use {braced(known)})")
            known.append(agent.name)

    async def run(self, scene: Scene) -> None:
        """Play one episode."""
        last = scene.names[-1]
        while True:
            said: dict[str, str] = {}
            for name in scene.names:
                question = scene.observe(name)
                template = scene[name].agent.prompt
                prompt = (
                    append_texts(question, said)
                    if template is None
                    else fill(template, {"question": question, **said})
                )
                said[name] = (await scene[name].say(prompt)).text
            await scene.step({last: said[last]}, final=said[last])
            if not (scene.one_seat and scene.movers()):  # a question is over with the first answer
                break

    def mermaid(self, names: Sequence[str]) -> str:
        """Return who reads whom as a Mermaid flowchart."""
        return mermaid({name: names[max(0, k - 1) : k] for k, name in enumerate(names)}, {}, names[-1])
