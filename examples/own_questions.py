"""Your own questions: define how a problem is drawn and which kind of answer is expected. kapelle provides the rest.

python examples/own_questions.py
kapelle train own.yaml          # with  environment: {name: "own_questions:Largest"}  on the Python path
"""

import random
import sys
from typing import Literal

import kapelle
from kapelle.algorithms import GRPO
from kapelle.environments import Answers, Difficulty, Generated, Problem, numbers
from kapelle.workflows import Solo


class Largest(Generated):
    """Which of these digits is the largest? `difficulty` is the number of digits."""

    name: Literal["own_questions:Largest"] = "own_questions:Largest"
    difficulty: Difficulty = (3, 3)
    seed: int = 0

    @property
    def answers(self) -> Answers:
        return numbers(("last_number",))

    def problem(self, draw: random.Random, level: int) -> Problem:
        digits = [draw.randint(0, 9) for _ in range(level)]
        question = " ".join(map(str, digits))
        return Problem(question, {"answer": max(digits)}, key=question)


def main(steps: int = 20) -> None:
    """Train one agent on these questions."""
    trainer = kapelle.Trainer(
        team={"agents": 1, "sampling": {"max_tokens": 2}},
        environment=Largest(),
        workflow=Solo(),
        algorithm=GRPO(group_size=16),
        optimizer={"lr": 3e-3},
        training={"tasks_per_step": 8},
    )
    with trainer:
        for step in trainer.steps(steps):
            print(f"step {step.number:3d}  reward {step.metrics['return/agent_0']:.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
