"""GRPO: several answers to each problem, each compared with the other answers in its group.

python examples/mrlm/train_grpo_math.py
"""

import sys

import kapelle
from kapelle.algorithms import GRPO
from kapelle.environments import MultiStep
from kapelle.workflows import Solo

SMALL = {"embedded": {"hidden": 64, "layers": 2, "intermediate": 128}}
"""A model that a laptop trains in seconds; replace it with `"Qwen/Qwen3-0.6B"` and change the learning rate."""


def main(steps: int = 10) -> None:
    """Train, and show how many groups had no variance."""
    trainer = kapelle.Trainer(
        model=SMALL,
        team={"agents": 1, "sampling": {"max_tokens": 6}},
        environment=MultiStep(difficulty=(1, 2)),
        workflow=Solo(),
        algorithm=GRPO(group_size=4),
        warmup={"steps": 6 * steps, "demonstrations": 300},
        optimizer={"lr": 1e-3},
        training={"tasks_per_step": 8},
    )
    with trainer:
        for step in trainer.steps(steps):
            dead = step.metrics["dead_groups"]
            print(
                f"step {step.number:3d}  success {step.metrics['success']:.2f}  groups all alike {dead:.0%}"
            )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
