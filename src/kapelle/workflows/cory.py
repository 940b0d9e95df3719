"""The workflow `cory`: a pioneer answers, and an observer reads the pioneer's answer and then answers. Both answers are scored.

The roles are those of CORY (arXiv:2410.06101). The workflow generates and scores the two answers. The algorithm `cory` exchanges the
weights and adds the rewards.
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
    observation_prompt,
)
from kapelle.workflows.graph import mermaid


class Cory(Settings, Drawable):
    """A workflow in which the first agent is the pioneer and the second agent is the observer, whose answer is the team's answer.

    The reward of each agent is the score of its own answer. The prompt of the observer can use `{question}` and the pioneer's answer,
    either as `{pioneer}` or by the name of the pioneer. Without a prompt, the observer reads the question and the pioneer's answer.
    """

    name: Literal["cory"] = "cory"

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError if the environment is a game, if the number of agents is not two, or if a prompt uses an unknown field."""
        need_answers("cory", "grades two answers", environment)
        if len(agents) != 2:
            raise ConfigError(
                f"`workflow.name: cory` needs a pioneer and an observer, but the team has {len(agents)} agents "
                f"({', '.join(agent.name for agent in agents)}). Define exactly two, the pioneer first."
            )
        pioneer, observer = agents
        # The pioneer may be named `pioneer`; for the observer, this name would be ambiguous.
        check_names(agents, ["question"])
        check_names([observer], ["pioneer"])
        check_template(pioneer, ["question"], "the pioneer of `cory`")
        known = list(dict.fromkeys(["question", "pioneer", pioneer.name]))
        check_template(observer, known, f"the observer of `cory` (it may use {braced(known)})")

    async def run(self, scene: Scene) -> None:
        """Run one episode."""
        pioneer, observer = scene.names
        first = (await scene[pioneer].say(observation_prompt(scene, pioneer))).text
        question, template = scene.observe(observer), scene[observer].agent.prompt
        if template is None:
            prompt = append_texts(question, {pioneer: first})
        else:
            prompt = fill(template, {"question": question, "pioneer": first, pioneer: first})
        second = (await scene[observer].say(prompt)).text
        await scene.step({pioneer: first, observer: second}, final=second)

    def mermaid(self, names: Sequence[str]) -> str:
        """Return the roles of pioneer and observer as a Mermaid flowchart."""
        pioneer, observer = names
        labels = {pioneer: f"pioneer: {pioneer}", observer: f"observer: {observer}"}
        return mermaid({pioneer: (), observer: (pioneer,)}, labels, observer)
