"""The workflow `chain`: agents write one after another, each agent reads the earlier messages, and the last agent answers.

In an environment with the capability `TeamMoves`, such as a conversation, the whole chain runs again for every move. MARFT
(arXiv:2504.16129) uses a chain of two agents: a Reasoner prepares the answer and an Actor writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kapelle.environment import Environment, TeamMoves, offers
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
    """A workflow in which agents write in team order. Only the last agent acts in the environment and is scored.

    The prompt of an agent can use `{question}` and the name of every earlier agent, for example `{reasoner}`. The agent reads only
    the texts that its prompt contains. An agent without a prompt reads the question and all earlier messages.
    """

    name: Literal["chain"] = "chain"

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError if the environment is a game, or if a prompt uses an unknown field or the name of a later agent."""
        if not offers(environment, TeamMoves):
            need_answers("chain", "ends in one answer", environment)
        check_names(agents, ["question"])
        known = ["question"]
        for agent in agents:
            check_template(agent, known, f"the workflow `chain` at its place (it may use {braced(known)})")
            known.append(agent.name)

    async def run(self, scene: Scene) -> None:
        """Run one episode."""
        last = scene.names[-1]
        while True:
            texts: dict[str, str] = {}
            for name in scene.names:
                question, template = scene.observe(name), scene[name].agent.prompt
                if template is None:
                    prompt = append_texts(question, texts)
                else:
                    prompt = fill(template, {"question": question, **texts})
                texts[name] = (await scene[name].say(prompt)).text
            await scene.step({last: texts[last]}, final=texts[last])
            if not (scene.team_moves and scene.movers()):  # a question ends with the first answer
                break

    def mermaid(self, names: Sequence[str]) -> str:
        """Return the chain as a Mermaid flowchart."""
        return mermaid({name: names[max(0, k - 1) : k] for k, name in enumerate(names)}, {}, names[-1])
