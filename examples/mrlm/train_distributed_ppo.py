"""The same run in one process or in several: the result does not depend on the number of processes.

python examples/mrlm/train_distributed_ppo.py
torchrun --nproc-per-node 2 examples/mrlm/train_distributed_ppo.py
"""

import sys

import kapelle
from kapelle.algorithms import PPO
from kapelle.environments import Arithmetic
from kapelle.workflows import Solo

SMALL = {"embedded": {"hidden": 64, "layers": 2, "intermediate": 128}}
"""A model that a laptop trains in seconds; replace it with `"Qwen/Qwen3-0.6B"` and change the learning rate."""


def main(steps: int = 4) -> None:
    """Train; every process rolls out and trains on its share, and only the first one prints."""
    trainer = kapelle.Trainer(
        model=SMALL,
        team={"agents": 1, "sampling": {"max_tokens": 4}},
        environment=Arithmetic(digits=1),
        workflow=Solo(),
        algorithm=PPO(),
        warmup={"steps": 10 * steps, "demonstrations": 300},
        optimizer={"lr": 1e-3},
        training={"tasks_per_step": 16},
    )
    with trainer:
        for step in trainer.steps(steps):
            if trainer.ranks.rank == 0:
                weights = sum(
                    float(tensor.detach().double().sum())
                    for tensor in trainer.engine.weights("agent_0").values()
                )
                print(f"{trainer.ranks.size} processes  step {step.number:3d}  sum of weights {weights:.6f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
