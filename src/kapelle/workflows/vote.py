"""The workflow `vote`: agents answer at the same time, and the team's answer is the answer with the most votes.

The workflow is a form of self-consistency (arXiv:2203.11171) that uses several agents instead of several samples.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, FiniteFloat

from kapelle.environment import Environment
from kapelle.errors import ConfigError, need_known
from kapelle.settings.base import Settings
from kapelle.team import Agent
from kapelle.workflow import (
    Drawable,
    GoesOnWithout,
    Scene,
    check_template,
    need_answers,
    need_two,
    observation_prompt,
)
from kapelle.workflows.graph import mermaid

# -------- Votes over the answers in several texts, and their agreement


def majority(
    texts: Mapping[str, str],
    answers: Mapping[str, str | None],
    seed: int,
    weights: Mapping[str, float] | None = None,
) -> str:
    """Return the text whose answer has the most votes. Ties are broken at random with `seed`.

    Each agent has one vote, or the number of votes in `weights`. Texts without an answer have no vote. If no text has an answer, the
    first text is returned.
    """
    votes = tally(answers, weights)
    if not votes:
        return next(iter(texts.values()))
    most = max(votes.values())
    chosen = random.Random(f"{seed}/majority").choice(sorted(a for a, n in votes.items() if n == most))
    return next(text for name, text in texts.items() if answers[name] == chosen)


def tally(
    answers: Mapping[str, str | None], weights: Mapping[str, float] | None = None
) -> Mapping[str, float]:
    """Return a mapping from each answer to its number of votes. Agents without an answer have no vote."""
    votes: dict[str, float] = {}
    for name, answer in answers.items():
        if answer is not None:
            votes[answer] = votes.get(answer, 0.0) + (weights or {}).get(name, 1.0)
    return votes


def agreement(answers: Mapping[str, str | None]) -> float:
    """Return the share of all agents that gave the most frequent answer."""
    return max(tally(answers).values(), default=0.0) / len(answers)


class Vote(Settings, Drawable, GoesOnWithout):
    """A workflow with one round of answers. Each agent is scored by its own answer, and the team by the answer with the most votes."""

    name: Literal["vote"] = "vote"
    weights: Mapping[str, FiniteFloat] = Field(default={})
    """Mapping from agents to their number of votes (at least 0). Agents that are not listed have one vote."""

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError if the environment is a game, if there is only one agent, or if weights are unknown, negative or all 0."""
        need_answers("vote", "counts answers", environment)
        names = [agent.name for agent in agents]
        need_two("`workflow.name: vote` needs at least two agents", agents)
        for name, weight in self.weights.items():
            need_known("workflow.weights", "agent", name, names)
            if weight < 0:
                raise ConfigError(f"workflow.weights.{name} is {weight}. Set it to 0 or more.")
        if all(self.weights.get(name, 1.0) == 0 for name in names):
            raise ConfigError("workflow.weights is 0 for all agents. Set at least one weight above 0.")
        for agent in agents:
            check_template(agent, ["question"], "the workflow `vote`")

    async def run(self, scene: Scene) -> None:
        """Run one episode."""
        prompts = {name: [observation_prompt(scene, name)] for name in scene.names}
        texts = {name: turn.text for name, turn in (await scene.together(prompts)).items()}
        answers = {name: scene.extract(text) for name, text in texts.items()}
        await scene.step(texts, final=majority(texts, answers, scene.seed, self.weights))

    def mermaid(self, names: Sequence[str]) -> str:
        """Return the vote as a Mermaid flowchart."""
        return mermaid({**dict.fromkeys(names, ()), "majority": names}, {}, "majority")
