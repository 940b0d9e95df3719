"""A taskset and an environment of two agents for verifiers 0.4, as its users write them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["DuoEnv", "SumTaskset"]


class SumData(vf.TaskData):  # type: ignore[misc]
    answer: str


class SumTask(vf.Task[SumData]):  # type: ignore[misc]
    @vf.reward(weight=1.0)
    async def right(self, trace: Any) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)

    @vf.metric
    async def length(self, trace: Any) -> float:
        return float(len(trace.last_reply or ""))


class SumConfig(vf.TasksetConfig):  # type: ignore[misc]
    first: int = 0
    count: int = 40


class SumTaskset(vf.Taskset[SumTask, SumConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[Any]:
        for k in range(self.config.first, self.config.first + self.config.count):
            yield SumTask(SumData(prompt=f"{k}+{k + 1}", answer=str(2 * k + 1)), self.config.task)


class DuoConfig(vf.EnvConfig):  # type: ignore[misc]
    solver: vf.AgentConfig = vf.AgentConfig()
    checker: vf.AgentConfig = vf.AgentConfig()
    fault: bool = False


class DuoEnv(vf.Env[DuoConfig]):  # type: ignore[misc]
    """A solver answers, a checker sees the answer and may send it back once; the checker earns what the solver gains."""

    async def run(self, task: Any, agents: Any) -> None:
        opening = vf.Task(vf.TaskData(prompt=None, system_prompt="Say ok or no."))
        async with agents.solver.interaction(task) as solver, agents.checker.interaction(opening) as checker:
            said = await solver.turn()
            verdict = await checker.turn(f"{task.data.prompt} = {said.last_reply}")
            if verdict.last_reply == "no":
                await solver.turn("Try again.")

    async def finalize(self, task: Any, episode: Any) -> None:
        if self.config.fault:
            raise KeyError("no such column")
        (solver,) = episode.by_agent["solver"]
        (checker,) = episode.by_agent["checker"]
        checker.record_reward("helped", 0.5 * solver.reward)
