"""How many calls an episode and a training step take: counts are exact where times are not.

Counted is what runs on the thread that trains: functions of Python, and functions of C that Python calls. Both engines
write a fixed number of tokens, so that a count depends on the code alone: an episode is played by scripts, and the step is
the demo's, whose model here ends no turn before its limit and whose answers are paid by their episodes' seeds.
"""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Literal
from unittest.mock import patch

from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.grading.verdict import Grade, right, wrong
from kapelle.environments.questions import QuestionState
from kapelle.models.language_model import LanguageModel
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.event_loop import run_async
from kapelle.team import Agent, Policy, Team
from kapelle.training.trainer import Trainer
from kapelle.types import Task
from kapelle.workflows.chain import Chain

SAMPLES, TOKENS = 8, 10
"""Episodes of a group, and tokens of a turn."""


def counted(work: Callable[[], object]) -> Counter[str]:
    """Return the calls of a piece of work, of `python` and of `c`."""
    calls: Counter[str] = Counter(python=0, c=0)

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            calls["python"] += 1
        elif event == "c_call":
            calls["c"] += 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    calls["c"] -= 1  # the one that stops counting
    return calls


def of_an_episode() -> dict[str, float]:
    """Return the calls of one episode of two turns, of a chain of two scripted agents."""
    environment = Arithmetic(digits=2)
    names = ("reasoner", "actor")
    agents = Agent("reasoner", prompt="{question}"), Agent("actor", prompt="{reasoner}")
    team = Team(agents, {n: Policy(n, base="", trained=False) for n in names}, {n: n for n in names})
    engine = ScriptedEngine({"reasoner": lambda _: "12", "actor": lambda _: "132"})
    setup = RolloutSetup(team, environment, Chain(), engine)
    tasks = [environment.task("train", index) for index in range(8)]

    def played(count: int) -> Counter[str]:
        return counted(lambda: run_async(lambda: rollout(setup, tasks[:count], SAMPLES, seed=1)))

    played(8)  # what is made once is made
    few, many = played(2), played(8)
    return {kind: (many[kind] - few[kind]) / (6 * SAMPLES) for kind in many}


class PaidBySeed(Arithmetic):
    """Arithmetic that pays an episode by its seed, so that what is learned from does not depend on what is said."""

    name: Literal["benchmarks.calls:PaidBySeed"] = "benchmarks.calls:PaidBySeed"  # type: ignore[assignment]

    def start(self, task: Task, agents: Sequence[str], seed: int) -> QuestionState:
        """Open the world of one question."""

        def grade(_text: str) -> Grade:
            return right("1") if seed % 2 else wrong("0", "1")

        return QuestionState(task, agents, grade, self.about(task))


def of_a_step(tasks: int) -> Counter[str]:
    """Return the calls of one whole step of the demo, with so many tasks and turns of `TOKENS` tokens each."""
    settings = (
        "environment.name=benchmarks.calls:PaidBySeed",
        "environment.flaws={}",
        "team.agents.actor.prompt='{question}'",  # the texts that the model makes up differ in length
        f"team.sampling.max_tokens={TOKENS}",
        f"algorithm.group_size={SAMPLES}",
        "warmup=null",
        f"training.tasks_per_step={tasks}",
        "evaluation.before_and_after=false",
    )
    with (
        patch.object(LanguageModel, "end_ids", frozenset()),
        Trainer.from_recipe("demo", *settings) as trainer,
    ):
        steps = trainer.steps(3)
        next(steps)  # makes what is made once
        next(steps)
        return counted(lambda: next(steps))


def run() -> dict[str, Any]:
    """Count the calls of an episode, of a step of 64 episodes, and of each further episode of a step."""
    step, larger = of_a_step(8), of_a_step(16)
    more = 8 * SAMPLES
    return {
        "python": platform.python_version(),
        "episode of two scripted turns": of_an_episode(),
        "step of 64 episodes of two turns": dict(step),
        "each further episode of a step": {kind: (larger[kind] - step[kind]) / more for kind in step},
    }
