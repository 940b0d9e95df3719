"""The workflow `swarm`: a planner calls one worker agent for several subtasks at the same time, reads the reports and answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from kapelle.environment import Environment
from kapelle.errors import ConfigError, need_known
from kapelle.settings.base import Settings
from kapelle.team import Agent
from kapelle.types import Message, Turn
from kapelle.workflow import (
    Continued,
    Drawable,
    Scene,
    check_names,
    check_template,
    fill,
    instructions,
    need_answers,
    need_two,
)
from kapelle.workflows.graph import mermaid


class Swarm(Settings, Drawable):
    """A workflow in which a planner calls one worker agent several times at once. The planner's answer is the team's answer.

    Each line of the planner's message that begins with `mark` is a subtask, for which the worker starts a conversation of its own. A
    message without such a line is the answer. The prompt of the planner can use `{question}`, and the prompt of the worker can use
    `{question}` and `{subtask}` (its default prompt is the subtask). Only the planner is scored. Each call of the worker records the
    turn that caused it, so that `m_grpo` and the section `swarm` can tell which calls belong to which plan.
    """

    name: Literal["swarm"] = "swarm"
    planner: str | None = None
    """Name of the agent that plans and answers. If null, the first agent of the team plans."""
    worker: str | None = None
    """Name of the agent that solves subtasks. If null, this is the last agent of the team."""
    mark: str = Field(default="- ", min_length=1)
    """The beginning of a line that contains a subtask."""
    calls: int = Field(default=8, ge=1)
    """Maximum number of subtasks of one plan. Further subtasks are ignored."""
    stages: int = Field(default=1, ge=1)
    """Maximum number of plans in an episode. After that, every message of the planner is an answer."""
    report: str = "{reports}"
    """Message to the planner after the calls. The field `{reports}` contains the worker's completions in the order of the subtasks, one
    per line, and `{question}` is the question."""

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError if the environment is a game, or if an agent or a field is unknown."""
        need_answers("swarm", "ends in one answer", environment)
        need_two("`workflow.name: swarm` needs a planner and a worker", agents)
        names = [agent.name for agent in agents]
        need_known("workflow.planner", "agent", self.planner, names)
        need_known("workflow.worker", "agent", self.worker, names)
        planner, worker = self._roles(names)
        if planner == worker:
            raise ConfigError(
                f"'{planner}' is both the planner and the worker. Set `workflow.planner` and `workflow.worker` to different agents."
            )
        check_names(agents, ["question", "subtask", "reports"])
        check_template(Agent(planner, prompt=self.report), ["question", "reports"], "`workflow.report`")
        for agent in agents:
            if agent.name == planner:
                check_template(agent, ["question"], "the planner of `swarm`")
            elif agent.name == worker:
                check_template(agent, ["question", "subtask"], "the worker of `swarm`")
            else:
                raise ConfigError(
                    f"'{agent.name}' is neither the planner nor the worker of `workflow.name: swarm`. Remove the agent."
                )

    async def run(self, scene: Scene) -> None:
        """Run one episode."""
        planner, worker = self._roles(scene.names)
        question = scene.observe(planner)
        prompt = fill(scene[planner].agent.prompt or "{question}", {"question": question})
        turn = await scene[planner].say(prompt)
        for _ in range(self.stages):
            subtasks = self.subtasks(turn.words)
            if not subtasks:
                break
            reports = await asyncio.gather(
                *(_solve(scene, worker, question, subtask, turn) for subtask in subtasks)
            )
            fields = {"question": question, "reports": "\n".join(reports)}
            turn = await scene[planner].say(fill(self.report, fields))
        await scene.step({planner: turn.text}, final=turn.text)

    def subtasks(self, message: str) -> list[str]:
        """Return the subtasks in a message of the planner, at most `calls`."""
        lines = [line.removeprefix(self.mark) for line in message.splitlines() if line.startswith(self.mark)]
        return lines[: self.calls]

    def mermaid(self, names: Sequence[str]) -> str:
        """Return the plan, the calls and the answer as a Mermaid flowchart."""
        planner, worker = self._roles(names)
        answer, plan, calls = (
            f"{planner}, answer",
            f"{planner}, plan",
            f"{worker}, up to {self.calls} at once",
        )
        return mermaid({plan: (), calls: (plan,), answer: (plan, calls)}, {}, answer)

    def _roles(self, names: Sequence[str]) -> tuple[str, str]:
        return self.planner or names[0], self.worker or names[-1]


async def _solve(scene: Scene, worker: str, question: str, subtask: str, plan: Turn) -> str:
    agent = scene[worker].agent
    prompt = fill(agent.prompt or "{subtask}", {"question": question, "subtask": subtask})
    messages = (*instructions(agent, scene.task), Message("user", prompt))
    turns = await scene.converse({worker: Continued(messages, None, caller=plan.index)})
    return " ".join(turns[worker].words.split())  # one line for each report
