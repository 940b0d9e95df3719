"""The workflow `summary`: several agents write drafts at the same time, and one agent reads all drafts and answers.

With several layers, the workflow is a mixture of agents (arXiv:2406.04692), in which every layer reads the drafts of the previous
layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from kapelle.environment import Environment
from kapelle.errors import ConfigError, need_known
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


class Summary(Settings, Drawable):
    """A workflow with one or more layers of drafts and an aggregator, whose answer is the team's answer.

    A drafter reads its prompt (default `{question}`) in its first turn, and the message `reply` in later turns. The prompt of the
    aggregator can use `{question}`, `{drafts}` and the names of the drafters of the last layer. An aggregator without a prompt reads
    the question and all drafts of the last layer.
    """

    name: Literal["summary"] = "summary"
    aggregator: str | None = None
    """Name of the agent that reads the drafts and answers. If null, this is the last agent of the team."""
    layers: int | tuple[tuple[str, ...], ...] = Field(default=1)
    """Number of layers, each of which contains all drafters, or a list with the names of the drafters of each layer."""
    reply: str = "{drafts}\n\nAnswer again."
    """Message to a drafter in a later layer. The field `{drafts}` contains the drafts of the previous layer, one per line after the name
    of the agent. The field `{question}` is the question, and `{NAME}` is the draft of the agent NAME."""
    score_drafts: bool = False
    """Whether each drafter is scored by its own last draft. The aggregator is always scored."""

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError if the environment is a game, or if there are too few agents, unknown names or unknown fields."""
        need_answers("summary", "ends in one answer", environment)
        names = [agent.name for agent in agents]
        need_two("`workflow.name: summary` needs a drafter and an aggregator", agents)
        need_known("workflow.aggregator", "agent", self.aggregator, names)
        check_names(agents, ["question", "drafts"])
        last = self._aggregator(names)
        self._check_layers(names, last)
        layers = self._layers(names)
        for agent in agents:
            if agent.name == last:
                known = ["question", "drafts", *layers[-1]]
                check_template(agent, known, "the aggregator of `summary`")
            else:
                check_template(agent, ["question"], "a first draft of `summary`")
        for layer in layers[:-1]:
            check_template(Agent(last, prompt=self.reply), ["question", "drafts", *layer], "`workflow.reply`")

    def _check_layers(self, names: Sequence[str], aggregator: str) -> None:
        if isinstance(self.layers, int):
            if self.layers < 1:
                raise ConfigError(f"workflow.layers is {self.layers}. Set it to 1 or more.")
            return
        if not self.layers or not all(self.layers):
            raise ConfigError(
                "workflow.layers has a layer without drafters. List at least one agent in each layer."
            )
        for layer in self.layers:
            for name in layer:
                need_known("workflow.layers", "agent", name, names)
                if name == aggregator:
                    raise ConfigError(
                        f"'{name}' is in workflow.layers, but it is also the aggregator. Set `workflow.aggregator` to an agent "
                        "that is in no layer."
                    )
            if len(set(layer)) < len(layer):
                raise ConfigError(
                    f"A layer of workflow.layers lists an agent twice: {', '.join(layer)}. Remove the duplicate."
                )

    def _aggregator(self, names: Sequence[str]) -> str:
        return self.aggregator or names[-1]

    def _layers(self, names: Sequence[str]) -> Sequence[Sequence[str]]:
        if not isinstance(self.layers, int):
            return self.layers
        return [[name for name in names if name != self._aggregator(names)]] * self.layers

    async def run(self, scene: Scene) -> None:
        """Run one episode."""
        latest: dict[str, str] = {}
        before: dict[str, str] = {}
        for number, layer in enumerate(self._layers(scene.names)):
            prompts = {name: [self._draft_prompt(scene, name, number, latest, before)] for name in layer}
            turns = await scene.together(prompts)
            before = {name: turns[name].text for name in layer}
            latest |= before
        last = self._aggregator(scene.names)
        question, template = scene.observe(last), scene[last].agent.prompt
        fields = {"question": question, "drafts": _lines(before), **before}
        prompt = append_texts(question, before) if template is None else fill(template, fields)
        answer = (await scene[last].say(prompt)).text
        await scene.step({**(latest if self.score_drafts else {}), last: answer}, final=answer)

    def mermaid(self, names: Sequence[str]) -> str:
        """Return the layers and the aggregator as a Mermaid flowchart."""
        graph: dict[str, tuple[str, ...]] = {}
        before: tuple[str, ...] = ()
        for number, layer in enumerate(self._layers(names), start=1):
            drafts = tuple(f"{name}, layer {number}" for name in layer)
            graph |= dict.fromkeys(drafts, before)
            before = drafts
        last = self._aggregator(names)
        return mermaid({**graph, last: before}, {}, last)

    def _draft_prompt(
        self, scene: Scene, name: str, layer: int, latest: Mapping[str, str], before: Mapping[str, str]
    ) -> str:
        question = scene.observe(name)
        fields = {"question": question, "drafts": _lines(before), **before}
        opening = fill(scene[name].agent.prompt or "{question}", {"question": question})
        if layer == 0:
            return opening
        reply = fill(self.reply, fields)
        # An agent that joins in a later layer has not read the question yet.
        return reply if name in latest or "{question}" in self.reply else f"{opening}\n\n{reply}"


def _lines(texts: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {text}" for name, text in texts.items())
