"""Your own workflow: which agent acts when, what each agent reads, and which answer counts.

python examples/own_workflow.py
kapelle train own.yaml          # with  workflow: {name: "own_workflow:SecondOpinion"}  on the Python path
"""

import sys
from collections.abc import Sequence
from typing import Literal

import kapelle
from kapelle.algorithms import GRPO
from kapelle.environments import Arithmetic
from kapelle.workflow import Scene, need_answers
from kapelle.workflows import majority


class SecondOpinion(kapelle.Settings):
    """Two agents answer; a third answers only if they differ, and then the majority counts."""

    name: Literal["own_workflow:SecondOpinion"] = "own_workflow:SecondOpinion"

    def check(self, agents: Sequence[kapelle.Agent], environment: kapelle.Environment) -> None:
        need_answers(self.name, "compares answers", environment)
        if len(agents) != 3:
            raise kapelle.ConfigError(f"A second opinion needs three agents, but the team has {len(agents)}.")

    async def run(self, scene: Scene) -> None:
        one, other, third = scene.names
        turns = await scene.together({name: [scene.observe(name)] for name in (one, other)})
        said = {name: turn.text for name, turn in turns.items()}
        if scene.extract(said[one]) != scene.extract(said[other]):
            said[third] = (await scene[third].say(scene.observe(third))).text
        answers = {name: scene.extract(text) for name, text in said.items()}
        await scene.step(said, final=majority(said, answers, scene.seed))


def main(steps: int = 20) -> None:
    """Train three agents with this workflow, after a warm-up on the environment's own script."""
    trainer = kapelle.Trainer(
        team={"agents": 3, "sampling": {"max_tokens": 6}},
        environment=Arithmetic(digits=1),
        workflow=SecondOpinion(),
        algorithm=GRPO(group_size=4),
        warmup={"steps": 20 * (steps > 2) + 1, "demonstrations": 200},
        training={"tasks_per_step": 8},
    )
    with trainer:
        for step in trainer.steps(steps):
            metrics = step.metrics
            asked = metrics["turns/agent_2"]
            print(f"step {step.number:3d}  success {metrics['success']:.2f}  third asked {asked:.0%}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
