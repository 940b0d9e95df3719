"""A pioneer answers, an observer answers having read the pioneer's answer; both answers are graded.

Cooperative roles of CORY (2410.06101). The exchange of weights between the two policies and the sum of
their rewards belong to the algorithm of that name; here the two texts are played and each is scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kapelle.environment import Environment
from kapelle.errors import ConfigError
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


class Cory(Settings, Drawable):
    """The first seat is the pioneer, the second the observer; the observer's answer is the team's.

    Each agent earns the score of its own answer. The observer's prompt may use `{question}` and the
    pioneer's text, as `{pioneer}` or by the pioneer's name; without a prompt it reads both.
    """

    name: Literal["cory"] = "cory"

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError for a game, any other number of agents than two, or an unknown field."""
        need_answers("cory", "grades two answers", environment)
        if len(agents) != 2:
            raise ConfigError(
                f"`workflow.name: cory` has a pioneer and an observer, and the team has {len(agents)} agents "
                f"({', '.join(agent.name for agent in agents)}). Name exactly two, the pioneer first."
            )
        pioneer, observer = agents
        # A pioneer may be called so; an observer with that name would read as the other role.
        check_names(agents, ["question"])
        check_names([observer], ["pioneer"])
        check_template(pioneer, ["question"], "the pioneer of `cory`")
        known = list(dict.fromkeys(["question", "pioneer", pioneer.name]))
        check_template(observer, known, f"the observer of `cory` (it may use {braced(known)})")

    async def run(self, scene: Scene) -> None:
        """Play one episode."""
        pioneer, observer = scene.names
        opening = scene[pioneer].agent.prompt or "{question}"
        first = (await scene[pioneer].say(fill(opening, {"question": scene.observe(pioneer)}))).text
        question = scene.observe(observer)
        template = scene[observer].agent.prompt
        prompt = (
            append_texts(question, {pioneer: first})
            if template is None
            else fill(template, {"question": question, "pioneer": first, pioneer: first})
        )
        second = (await scene[observer].say(prompt)).text
        await scene.step({pioneer: first, observer: second}, final=second)

    def mermaid(self, names: Sequence[str]) -> str:
        """Return pioneer and observer as a Mermaid flowchart."""
        pioneer, observer = names
        labels = {pioneer: f"pioneer: {pioneer}", observer: f"observer: {observer}"}
        return mermaid({pioneer: (), observer: (pioneer,)}, labels, observer)
