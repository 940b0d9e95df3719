"""One agent writes a problem, all others solve it at the same moment; the environment checks and pays both.

The self-play of R-Zero (2508.05004) and Absolute Zero (2505.03335), for environments such as `proposals` that decide who may
write. On a problem of a test, which nobody has to write, the solvers move at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from kapelle.environment import Environment, asks_questions
from kapelle.errors import ConfigError
from kapelle.settings.base import Settings
from kapelle.team import Agent
from kapelle.workflow import CountsTurns, Drawable, Scene, check_template, fill, need_two
from kapelle.workflows.graph import mermaid


class Propose(Settings, Drawable, CountsTurns):
    """The first seat is the proposer, all others solve what it wrote.

    An agent's prompt frames what it reads, with `{question}` for that: what the proposer is given, and the problem.
    """

    name: Literal["propose"] = "propose"
    tries: int = Field(default=1, ge=1)
    """How many problems the proposer may write until one is accepted; after a refusal it reads why, in the same conversation."""

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError for an environment that asks its own questions, a single agent, or an unknown field."""
        if asks_questions(environment):
            raise ConfigError(
                f"`workflow.name: propose` is for environments whose problems an agent writes, and `{environment.name}` asks its own "
                "questions. Set `environment.name: proposals`, or `workflow.name: vote`."
            )
        need_two("`workflow.name: propose` has a proposer and solvers", agents, "Add solvers")
        for agent in agents:
            check_template(agent, ["question"], "the workflow `propose`")

    async def run(self, scene: Scene) -> None:
        """Play one episode."""
        if self.tries > 1:
            scene.allow_answers(self.tries)
        refused = False
        while movers := scene.movers():
            words = {}
            for name in movers:
                # Why a proposal was refused stands for itself.
                prompt = None if refused and name == scene.names[0] else scene[name].agent.prompt
                words[name] = [fill(prompt or "{question}", {"question": scene.observe(name)})]
            turns = await scene.together(words)
            await scene.step({name: turn.text for name, turn in turns.items()})
            refused = True

    def most_turns(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return the tries of the proposer and the one answer of each solver."""
        return {name: self.tries if k == 0 else 1 for k, name in enumerate(names)}

    def mermaid(self, names: Sequence[str]) -> str:
        """Return proposer, solvers, and what their answers come to as a Mermaid flowchart."""
        proposer, *solvers = names
        share = "share of right answers"
        return mermaid({proposer: (), **dict.fromkeys(solvers, (proposer,)), share: solvers}, {}, share)
