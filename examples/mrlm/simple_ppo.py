"""The smallest complete run: one agent adds digits and is trained by PPO, with its own critic.

python examples/mrlm/simple_ppo.py            # the number of steps may follow
"""

import sys

import kapelle
from kapelle.algorithms import PPO
from kapelle.environments import Arithmetic
from kapelle.workflows import Solo

SMALL = {"embedded": {"hidden": 64, "layers": 2, "intermediate": 128}}
"""A model that a laptop trains in seconds; replace it with `"Qwen/Qwen3-0.6B"` and change the learning rate."""


def main(steps: int = 10) -> float:
    """Train, and return the share of unseen sums that are correct."""
    trainer = kapelle.Trainer(
        model=SMALL,
        team={"agents": 1, "sampling": {"max_tokens": 4}},
        environment=Arithmetic(digits=1),
        workflow=Solo(),
        algorithm=PPO(epochs=2),
        warmup={"steps": 6 * steps, "demonstrations": 300},
        optimizer={"lr": 3e-3},
        training={"tasks_per_step": 16},
    )
    with trainer:
        for step in trainer.steps(steps):
            print(f"step {step.number:3d}  success {step.metrics['success']:.2f}")
        result = trainer.evaluate(problems=20)
        print("unseen sums:", result)
    return result.success or 0.0


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
