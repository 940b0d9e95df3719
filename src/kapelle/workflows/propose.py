"""The workflow `propose`: one agent writes a problem, and all other agents solve this problem at the same time.

The environment checks and rewards the problem and the solutions. The workflow implements the self-play of R-Zero (arXiv:2508.05004)
and Absolute Zero (arXiv:2505.03335), for environments such as `proposals` that decide which agent may write. If a test problem is
given, only the solvers move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from kapelle.environment import Environment, has_comparable_answers
from kapelle.errors import ConfigError
from kapelle.settings.base import Settings
from kapelle.team import Agent
from kapelle.workflow import CountsTurns, Drawable, Scene, check_template, need_two, observation_prompt
from kapelle.workflows.graph import mermaid


class Propose(Settings, Drawable, CountsTurns):
    """A workflow in which the first agent is the proposer and all other agents are solvers.

    The prompt of an agent contains its observation as `{question}`. The observation is an instruction for the proposer and the
    problem for the solvers.
    """

    name: Literal["propose"] = "propose"
    tries: int = Field(default=1, ge=1)
    """Maximum number of problems that the proposer may write until one problem is accepted. After a rejection, the proposer reads the
    reason in the same conversation."""

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError if the environment has its own questions, if there is only one agent, or if a prompt uses an unknown field."""
        if has_comparable_answers(environment):
            raise ConfigError(
                f"`workflow.name: propose` needs an environment in which an agent writes the problems, but `{environment.name}` has its "
                "own questions. Set `environment.name: proposals`, or `workflow.name: vote`."
            )
        need_two("`workflow.name: propose` needs a proposer and solvers", agents, "Add solvers")
        for agent in agents:
            check_template(agent, ["question"], "the workflow `propose`")

    async def run(self, scene: Scene) -> None:
        """Run one episode."""
        if self.tries > 1:
            scene.allow_answers(self.tries)
        is_first = True
        while movers := scene.movers():
            # After a rejection, the proposer reads the reason without its prompt.
            prompts = {
                name: [observation_prompt(scene, name)]
                if is_first or name != scene.names[0]
                else [scene.observe(name)]
                for name in movers
            }
            turns = await scene.together(prompts)
            await scene.step({name: turn.text for name, turn in turns.items()})
            is_first = False

    def most_turns(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return `tries` as the maximum number of turns of the proposer, and 1 for each solver."""
        return {name: self.tries if k == 0 else 1 for k, name in enumerate(names)}

    def mermaid(self, names: Sequence[str]) -> str:
        """Return the proposer, the solvers and the reward as a Mermaid flowchart."""
        proposer, *solvers = names
        share = "share of correct answers"
        return mermaid({proposer: (), **dict.fromkeys(solvers, (proposer,)), share: solvers}, {}, share)
