"""Imitation and a world model: two solvers learn to predict their own messages and their next observations.

python examples/mrlm/train_sft_world_model.py
"""

import sys

import kapelle
from kapelle.algorithms import SFT
from kapelle.environments import Arithmetic
from kapelle.workflows import Debate

SMALL = {"embedded": {"hidden": 64, "layers": 2, "intermediate": 128}}
"""A model that a laptop trains in seconds; replace it with `"Qwen/Qwen3-0.6B"` and change the learning rate."""


def main(steps: int = 20) -> dict[str, float]:
    """Train with each objective and with both; return the final NLL of a token, by objective."""
    left = {}
    for name, world_model in (("behaviour alone", 0.0), ("both", 1.0)):
        trainer = kapelle.Trainer(
            model=SMALL,
            team={"sharing": "shared", "agents": 2, "sampling": {"max_tokens": 4}},
            environment=Arithmetic(digits=1),
            workflow=Debate(rounds=2, reply="{answers}"),
            algorithm=SFT(world_model=world_model),
            optimizer={"lr": 3e-3},
            training={"tasks_per_step": 8},
        )
        with trainer:
            losses = [step.metrics["nll/shared"] for step in trainer.steps(steps)]
        left[name] = losses[-1]
        print(f"{name:16} NLL {losses[0]:.2f} → {losses[-1]:.2f} nats per token")
    return left


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
