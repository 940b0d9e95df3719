"""Three kinds of mathematics in one run, from easy to hard: sums, equations and chains of steps, with separate success rates.

python examples/mrlm/train_math_ppo.py
"""

import sys

import kapelle
from kapelle.algorithms import PPO
from kapelle.environments import Algebra, Arithmetic, Mixture, MultiStep, Part
from kapelle.workflows import Solo

SMALL = {"embedded": {"hidden": 64, "layers": 2, "intermediate": 128}}
"""A model that a laptop trains in seconds; replace it with `"Qwen/Qwen3-0.6B"` and change the learning rate."""


def environment(hardest: int) -> Mixture:
    """Return an environment of problems up to a difficulty."""
    return Mixture(
        parts={
            "sums": Part(environment=Arithmetic(digits=1), weight=2),
            "equations": Part(environment=Algebra(difficulty=(1, hardest))),
            "chains": Part(environment=MultiStep(difficulty=(1, hardest))),
        }
    )


def main(steps: int = 10) -> None:
    """Train on easy problems first, and then on harder ones."""
    for hardest in (1, 2):
        trainer = kapelle.Trainer(
            model=SMALL,
            team={"agents": 1, "sampling": {"max_tokens": 8}},
            environment=environment(hardest),
            workflow=Solo(),
            algorithm=PPO(),
            warmup={"steps": 4 * steps, "demonstrations": 200},
            optimizer={"lr": 1e-3},
            training={"tasks_per_step": 12},
        )
        with trainer:
            for step in trainer.steps(steps):
                parts = sorted(name for name in step.metrics if name.startswith("success/"))
                shown = "  ".join(f"{name.partition('/')[2]} {step.metrics[name]:.2f}" for name in parts)
                print(f"difficulty {hardest}  step {step.number:3d}  {shown}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
