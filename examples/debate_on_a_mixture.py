"""Three agents debate sums and chains of steps in one run; the success of each kind of task is reported separately.

python examples/debate_on_a_mixture.py     # a few minutes
"""

import sys

import kapelle
from kapelle.algorithms import GRPO
from kapelle.environments import Arithmetic, Mixture, MultiStep, Part
from kapelle.workflows import Debate


def main(steps: int = 20) -> None:
    """Train a team of adapters on one tiny model; a debate ends early when all agree."""
    trainer = kapelle.Trainer(
        team={"agents": 3, "sharing": "lora", "sampling": {"max_tokens": 12}},
        environment=Mixture(
            parts={
                "sums": Part(environment=Arithmetic(digits=1), weight=2),
                "chains": Part(environment=MultiStep(difficulty=(1, 2))),
            }
        ),
        workflow=Debate(rounds=2, consensus=1.0),
        algorithm=GRPO(group_size=4),
        warmup={"steps": 200 if steps > 2 else 2, "demonstrations": 600},
        optimizer={"lr": 1e-3},
        training={"tasks_per_step": 8},
    )
    with trainer:
        for step in trainer.steps(steps):
            parts = {name: value for name, value in step.metrics.items() if name.startswith("success/")}
            rounds = step.metrics["turns/agent_0"]
            print(
                f"step {step.number:3d}  rounds {rounds:.2f} ",
                *(f"{k} {v:.2f}" for k, v in sorted(parts.items())),
            )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
