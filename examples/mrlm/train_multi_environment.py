"""One agent learns several kinds of tasks at once: sums, chains of steps and stories, with separate metrics.

python examples/mrlm/train_multi_environment.py
"""

import sys

import kapelle
from kapelle.algorithms import GRPO
from kapelle.environments import Arithmetic, Mixture, MultiStep, Part, WordProblems
from kapelle.workflows import Solo

SMALL = {"embedded": {"hidden": 64, "layers": 2, "intermediate": 128}}
"""A model that a laptop trains in seconds; replace it with `"Qwen/Qwen3-0.6B"` and change the learning rate."""


def main(steps: int = 10) -> None:
    """Train on a mixture; credit compares only answers to the same task."""
    trainer = kapelle.Trainer(
        model=SMALL,
        team={"agents": 1, "sampling": {"max_tokens": 6}},
        environment=Mixture(
            parts={
                "sums": Part(environment=Arithmetic(digits=1), weight=2),
                "steps": Part(environment=MultiStep(difficulty=(1, 2))),
                "stories": Part(environment=WordProblems(difficulty=(1, 1))),
            }
        ),
        workflow=Solo(),
        algorithm=GRPO(group_size=4),
        warmup={"steps": 6 * steps, "demonstrations": 200},
        optimizer={"lr": 1e-3},
        training={"tasks_per_step": 12},
    )
    with trainer:
        for step in trainer.steps(steps):
            parts = sorted(name for name in step.metrics if name.startswith("success/"))
            shown = "  ".join(f"{name.partition('/')[2]} {step.metrics[name]:.2f}" for name in parts)
            print(f"step {step.number:3d}  {shown}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
