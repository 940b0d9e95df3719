"""Agents answer at the same moment and vote: the majority's answer, or the heaviest, is the team's.

Self-consistency (2203.11171) over agents instead of samples.
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
from kapelle.workflow import Drawable, GoesOnWithout, Scene, check_template, fill, need_answers, need_two
from kapelle.workflows.graph import mermaid

# -------- Which of several texts speaks for the team: votes over their answers, and how far they agree


def majority(
    said: Mapping[str, str],
    answers: Mapping[str, str | None],
    seed: int,
    weights: Mapping[str, float] | None = None,
) -> str:
    """Return the text whose answer has the most votes; `seed` draws among answers that tie.

    An agent has one vote, or its weight where `weights` has one. Texts without an answer have no vote,
    unless none has one.
    """
    votes = tally(answers, weights)
    if not votes:
        return next(iter(said.values()))
    most = max(votes.values())
    chosen = random.Random(f"{seed}/majority").choice(sorted(a for a, n in votes.items() if n == most))
    return next(text for name, text in said.items() if answers[name] == chosen)


def tally(
    answers: Mapping[str, str | None], weights: Mapping[str, float] | None = None
) -> Mapping[str, float]:
    """Return answer → votes; agents without an answer cast none."""
    votes: dict[str, float] = {}
    for name, answer in answers.items():
        if answer is not None:
            votes[answer] = votes.get(answer, 0.0) + (weights or {}).get(name, 1.0)
    return votes


def agreement(answers: Mapping[str, str | None]) -> float:
    """Return the share of all agents that give the commonest answer; who gives none agrees with nobody."""
    return max(tally(answers).values(), default=0.0) / len(answers)


class Vote(Settings, Drawable, GoesOnWithout):
    """One round of answers; each agent is scored by its own, the team by the one that wins the vote."""

    name: Literal["vote"] = "vote"
    weights: Mapping[str, FiniteFloat] = Field(default={})
    """Votes of an agent, at least 0; 1 for who is not named. Empty: one agent, one vote."""

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError for a game, one agent alone, weights of strangers or weights that elect nobody."""
        need_answers("vote", "counts answers", environment)
        names = [agent.name for agent in agents]
        need_two("A vote takes two agents or more", agents)
        for name, weight in self.weights.items():
            need_known("workflow.weights", "agent", name, names)
            if weight < 0:
                raise ConfigError(f"workflow.weights.{name} is {weight}. A vote weighs 0 or more.")
        if all(self.weights.get(name, 1.0) == 0 for name in names):
            raise ConfigError("workflow.weights gives nobody a vote. Leave one agent more than 0.")
        for agent in agents:
            check_template(agent, ["question"], "the workflow `vote`")

    async def run(self, scene: Scene) -> None:
        """Play one episode."""
        words = {
            name: [fill(scene[name].agent.prompt or "{question}", {"question": scene.observe(name)})]
            for name in scene.names
        }
        said = {name: turn.text for name, turn in (await scene.together(words)).items()}
        answers = {name: scene.extract(text) for name, text in said.items()}
        await scene.step(said, final=majority(said, answers, scene.seed, self.weights))

    def mermaid(self, names: Sequence[str]) -> str:
        """Return the vote as a Mermaid flowchart."""
        return mermaid({**dict.fromkeys(names, ()), "majority": names}, {}, "majority")
